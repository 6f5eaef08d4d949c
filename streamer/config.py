"""Config: every setting of an engine and its server, in one frozen value.

Flags, environment variables (STREAMER_...) and TOML keys derive from these fields, and so do their
help texts and bounds; nothing else in the project reads the environment or a file for settings.
Names are vLLM's where vLLM has one. The cli calls `load_config`; the other rooms read a Config.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from streamer.errors import ConfigError
from streamer.spelling import as_choice, as_count, expected, hint

ENVIRONMENT_PREFIX = "STREAMER_"
FILE_VARIABLE = "STREAMER_CONFIG"
# Not a setting: for debugging, kernels/ops.py reads it to choose a CPU's kernels.
KERNELS_VARIABLE = "STREAMER_KERNELS"
_SERVICE_VARIABLE = re.compile(
    r"_SERVICE_(HOST|PORT)(_[A-Z0-9_]+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
SECRET = frozenset(
    {"api_key", "key_limits", "metrics_key"}
)  # values that stay out of messages and logs
SECTIONS = {"model": "model", "max_num_seqs": "scheduling and memory", "host": "server"}  # starts


Limit = Annotated[int, Meta(ge=0, le=1 << 40)]
Priority = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Method = Literal["suffix", "ngram", "draft_model", "none"]


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one key. 0: no limit. None: the limit of every key.

    priority  of its requests; one may name a priority that is not lower (a lower one runs first)
    """

    max_requests_per_minute: Limit | None = None
    max_tokens_per_minute: Limit | None = None
    max_streams_per_key: Limit | None = None
    max_sockets_per_key: Limit | None = None
    priority: Priority | None = None


# Of a key where no setting says otherwise: far above what a client that waits for its answers
# sends, far below what fills the server. The scheduler shares tokens among keys.
KEY_DEFAULTS = KeyLimits(
    max_requests_per_minute=12_000,
    max_tokens_per_minute=0,
    max_streams_per_key=1024,
    max_sockets_per_key=64,
)
NO_LIMITS = KeyLimits(0, 0, 0, 0)


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens are proposed before the model draws them; in vLLM's form.

    method  suffix: what followed the same tokens before, in the request or in its owner's recent
            outputs; ngram: in the request alone; draft_model: a smaller model; none: nothing.
            Absent: draft_model where `model` is given, suffix beside a speculative_model, else none
    model   the draft model's checkpoint
    num_speculative_tokens  maximum a row and step; how many pay is measured
    prompt_lookup_min, prompt_lookup_max  for ngram: tokens that must agree, tokens compared
    """

    method: Method | None = None
    model: str | None = None
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 16
    prompt_lookup_min: Annotated[int, Meta(ge=3, le=32)] | None = None
    prompt_lookup_max: Annotated[int, Meta(ge=3, le=32)] | None = None


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. None means "found out at start" (from the checkpoint or the machine).

    A value out of bounds, however it was given, raises ConfigError with `param` set to the field.
    """

    # the model
    model: Annotated[
        str | None,
        Meta(
            description="a folder, a GGUF file or a hub id; the bundled model if absent; fake: none"
        ),
    ] = None
    served_model_name: Annotated[
        str | None, Meta(description="the name that clients use for the model")
    ] = None
    revision: Annotated[str | None, Meta(description="branch, tag or commit on the hub")] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="data type of weights and activations"),
    ] = "auto"
    quantization: Annotated[
        Literal[
            "int8",
            "int4",
            "fp8",
            "gptq",
            "awq",
            "compressed-tensors",
            "fbgemm_fp8",
            "mxfp4",
            "bitsandbytes",
            "modelopt",
            "gguf",
        ]
        | None,
        Meta(
            description="make a dense checkpoint int8, int4 or fp8 while it is loaded; of a "
            "quantized one int8 makes what is dense in it, and its own name needs no flag"
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "int8"],
        Meta(
            description="data type of the KV cache; auto: the model's; fp8 "
            "and int8 take about half of it"
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Meta(description="where the model runs; auto: on a GPU where torch sees one"),
    ] = "auto"
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="context length in tokens; the checkpoint's if absent"),
    ] = None
    chat_template: Annotated[
        str | None, Meta(description="path of a Jinja file, instead of the checkpoint's template")
    ] = None
    tool_call_parser: Annotated[
        str | None,
        Meta(
            description="format of the model's tool calls, by vLLM's name of its parser, or none; "
            "the chat template's if absent"
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Meta(description="the same for the model's reasoning"),
    ] = None
    script: Annotated[
        str | None, Meta(description="path of a JSON file with the answers of the fake model")
    ] = None
    seed: Annotated[
        int | None, Meta(description="seed of the random seeds given to requests without one")
    ] = None
    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], Meta(description="engines that Ray starts; 1: no Ray")
    ] = 1
    tensor_parallel_size: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        Meta(description="processes that compute the model together, each a part of every matrix"),
    ] = 1
    nnodes: Annotated[
        Annotated[int, Meta(ge=1, le=64)],
        Meta(description="hosts on which these processes run, equally many on each"),
    ] = 1
    node_rank: Annotated[
        Annotated[int, Meta(ge=0, lt=64)],
        Meta(description="which of them this is; 0 serves, the others compute for it"),
    ] = 0
    master_addr: Annotated[
        str | None,
        Meta(description="address of host 0 at which the processes meet; its interface there"),
    ] = None
    master_port: Annotated[
        Annotated[int, Meta(ge=1, le=65535)], Meta(description="port of host 0 for the same")
    ] = 29501
    ranks_secret_file: Annotated[
        str | None,
        Meta(description="path of a file with what only these hosts know, 16 bytes or more"),
    ] = None
    load_progress: Annotated[bool, Meta(description="progress bars while loading")] = True
    speculative_model: Annotated[
        str | None,
        Meta(description="a smaller model with the same tokenizer, which proposes tokens as well"),
    ] = None
    speculative_config: Annotated[
        SpeculativeConfig,
        Meta(
            description="how tokens are proposed before they are drawn, as JSON: method (suffix, "
            "ngram, draft_model, none; default: none), model, num_speculative_tokens, and of ngram "
            "prompt_lookup_min and prompt_lookup_max"
        ),
    ] = SpeculativeConfig()

    # scheduling and memory
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 16)], Meta(description="sequences that run at once")
    ] = 256
    max_num_batched_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 24)] | None,
        Meta(
            description="tokens computed in one step; 512, on a GPU 2048, but beside running "
            "answers no more than make a step 3 to 4 times as long; at least max_num_seqs"
        ),
    ] = None
    block_size: Annotated[
        Annotated[int, Meta(ge=1, le=1024)], Meta(description="tokens in a block of the KV cache")
    ] = 16
    num_gpu_blocks_override: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="blocks in the KV pool, instead of a share of the memory"),
    ] = None
    gpu_memory_utilization: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None,
        Meta(description="share of the free memory that the KV pool may take; 0.5, on a GPU 0.9"),
    ] = None
    swap_space: Annotated[
        Annotated[float, Meta(ge=0.0, le=65536.0)], Meta(description="GiB of the host pool")
    ] = 0.25
    enable_prefix_caching: Annotated[
        bool, Meta(description="share the blocks of equal prefixes")
    ] = True

    # the server
    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)], Meta(description="port to listen on; 0: any free one")
    ] = 8000
    uds: Annotated[
        str | None, Meta(description="path of a Unix socket, instead of host and port")
    ] = None
    api_key: Annotated[
        tuple[Annotated[str, Meta(min_length=1)], ...],
        Meta(description="keys that clients may use; none: no key is required"),
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...], Meta(description="Origins allowed besides the server's own")
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="Host headers allowed besides localhost and the address")
    ] = ()
    allow_public_bind: Annotated[
        bool, Meta(description="listen beyond this machine without a key")
    ] = False
    root_path: Annotated[str, Meta(description="path under which a proxy mounts the server")] = ""
    ssl_certfile: Annotated[str | None, Meta(description="certificate, for https and wss")] = None
    ssl_keyfile: Annotated[str | None, Meta(description="private key of the certificate")] = None
    log_level: Annotated[
        Literal["critical", "error", "warning", "info", "debug"],
        Meta(description="minimum severity of the messages to log"),
    ] = "info"
    log_format: Annotated[
        Literal["text", "json"], Meta(description="format of the log's lines, on standard error")
    ] = "text"
    log_prompts: Annotated[
        bool, Meta(description="log the text of prompts with their finished requests")
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        Meta(description="where to send OpenTelemetry traces over HTTP; requires the extra [otel]"),
    ] = None
    watchdog_s: Annotated[
        Annotated[float, Meta(ge=0.0)],
        Meta(
            description="seconds a step may take before the engine is given up, and a prompt a "
            "quarter of that; 0: for ever"
        ),
    ] = 120.0
    drain_timeout: Annotated[
        Annotated[float, Meta(ge=0.0)],
        Meta(description="seconds that running streams get to finish when the server stops"),
    ] = 10.0
    max_queue: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 24)],
        Meta(description="choices that may wait; beyond it the answer is 503"),
    ] = 1024
    max_wait_s: Annotated[
        Annotated[float, Meta(ge=0.0)],
        Meta(
            description="seconds a request may be expected to wait before it runs; beyond it the "
            "answer is 503; 0: any"
        ),
    ] = 4.0
    max_requests_per_minute: Annotated[
        Limit | None,
        Meta(
            description="requests a minute of each key; beyond it the answer is "
            "429; 0: no limit; else 12,000"
        ),
    ] = None
    max_tokens_per_minute: Annotated[
        Limit | None,
        Meta(description="tokens a minute of each key, prompts and output; 0 or absent: no limit"),
    ] = None
    max_streams_per_key: Annotated[
        Limit | None,
        Meta(description="unfinished answers of each key; 0: no limit; else 1,024"),
    ] = None
    max_sockets_per_key: Annotated[
        Limit | None,
        Meta(
            description="open WebSockets of each key; beyond it close code 1013; 0: no limit; "
            "else 64"
        ),
    ] = None
    priority: Annotated[
        Priority,
        Meta(
            description="default priority; a lower one runs first, and "
            "no request may set a lower one"
        ),
    ] = 0
    key_limits: Annotated[
        dict[str, KeyLimits],
        Meta(
            description="limits of single keys: by key, a table of the five above; as text in JSON"
        ),
    ] = {}
    metrics_key: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="the one key for /metrics, valid for nothing else; absent: any api_key"),
    ] = None
    max_connections_per_address: Annotated[
        Limit,
        Meta(
            description="connections open at once; 0: no limit, as behind a "
            "proxy, where all have its address"
        ),
    ] = 2048
    stream_window: Annotated[
        Annotated[int, Meta(ge=0, le=1 << 24)],
        Meta(description="tokens a reader may lag before its sequence pauses; 0: never"),
    ] = 512
    detach_timeout: Annotated[
        Annotated[float, Meta(ge=0.0)],
        Meta(description="seconds a response outlives its last socket"),
    ] = 30.0
    pause_timeout: Annotated[
        Annotated[float, Meta(ge=0.0)],
        Meta(description="seconds a reader may lag beyond the window before it is disconnected"),
    ] = 60.0
    retain_s: Annotated[
        Annotated[float, Meta(ge=0.0)], Meta(description="seconds a finished response is kept")
    ] = 600.0
    retain_bytes: Annotated[
        Annotated[int, Meta(ge=0)], Meta(description="bytes of finished responses kept")
    ] = 64 << 20
    journal: Annotated[
        str | None,
        Meta(
            description="folder that keeps responses, prompts included, so that they survive a "
            "restart and go on after it; none if absent"
        ),
    ] = None

    def __post_init__(self) -> None:
        for setting in settings():
            value = setting.parse(getattr(self, setting.name), where=setting.name, is_text=False)
            msgspec.structs.force_setattr(self, setting.name, value)
        if self.root_path.strip("/") and not self.root_path.startswith("/"):
            raise ConfigError("root_path: must begin with a /", param="root_path")
        msgspec.structs.force_setattr(self, "root_path", self.root_path.rstrip("/"))
        if not self.key_limits.keys() <= set(self.api_key):
            raise ConfigError("key_limits: names a key that is not in api_key", param="key_limits")
        if self.metrics_key in self.api_key:
            raise ConfigError("metrics_key: is in api_key as well", param="metrics_key")
        if self.script is not None and (self.model or "").partition(":")[0] != "fake":
            raise ConfigError("script: is for the fake model alone", param="script")
        self._check_speculation()
        self._check_hosts()

    def _check_hosts(self) -> None:
        if self.nnodes == 1:
            names = [
                n for n in ("node_rank", "master_addr", "ranks_secret_file") if getattr(self, n)
            ]
            if names:
                raise ConfigError(f"{names[0]}: is for nnodes above 1", param=names[0])
            return
        if self.tensor_parallel_size % self.nnodes:
            why = f"tensor_parallel_size {self.tensor_parallel_size} is not a multiple of it"
            raise ConfigError(f"nnodes {self.nnodes}: {why}", param="nnodes")
        if self.node_rank >= self.nnodes:
            why = f"with nnodes {self.nnodes} they are 0 to {self.nnodes - 1}"
            raise ConfigError(f"node_rank {self.node_rank}: {why}", param="node_rank")
        for name in ("master_addr", "ranks_secret_file"):
            if getattr(self, name) is None:
                raise ConfigError(f"{name}: is missing, nnodes is {self.nnodes}", param=name)

    def _check_speculation(self) -> None:
        asked, param = self.speculative_config, "speculative_config"
        if asked != SpeculativeConfig() and self.speculation_method == "none" != asked.method:
            raise ConfigError(f"{param}: method is missing", param=param)
        if asked.model is not None and asked.method not in (None, "draft_model"):
            raise ConfigError(
                f"{param}: method {asked.method} has no model; --speculative-model adds one",
                param=param,
            )
        if self.speculative_model not in (None, asked.model or self.speculative_model):
            raise ConfigError(
                f"{param}: model is {asked.model}, but speculative_model is "
                f"{self.speculative_model}",
                param=param,
            )
        if self.speculation_method == "draft_model" and self.draft_model is None:
            raise ConfigError(f"{param}: method draft_model needs a model", param=param)
        low, high = asked.prompt_lookup_min, asked.prompt_lookup_max
        if (low, high) != (None, None) and asked.method != "ngram":
            raise ConfigError(f"{param}: prompt_lookup_min and _max are of ngram", param=param)
        if low is not None and high is not None and low > high:
            raise ConfigError(
                f"{param}: prompt_lookup_min {low} exceeds prompt_lookup_max {high}", param=param
            )

    @property
    def speculation_method(self) -> str:
        """The method of speculative_config, or what its absence means."""
        asked = self.speculative_config
        if asked.method is not None or asked.model is not None:
            return asked.method or "draft_model"
        return "none" if self.speculative_model is None else "suffix"

    @property
    def draft_model(self) -> str | None:
        """The draft model's checkpoint; None: there is none, or it is not used."""
        if self.speculation_method == "none":
            return None
        return self.speculative_config.model or self.speculative_model

    def limits_of(self, key: str) -> KeyLimits:
        """The limits of a key, its own before those of every key; no field is None.

        "" stands for all callers of a server without keys: no limit where no setting has one.
        """
        ranks = (self.key_limits.get(key), self, KEY_DEFAULTS if key else NO_LIMITS)
        found = {}
        for name in KeyLimits.__struct_fields__:
            candidates = (getattr(rank, name, None) for rank in ranks)
            found[name] = next(value for value in candidates if value is not None)
        return KeyLimits(**found)


class Setting(msgspec.Struct, frozen=True):
    """One field of Config as flags, environment and files see it.

    section  heading under which `--help` lists it
    kind     "bool", "list", "table", "choice" or "value"
    choices  of a "choice", else empty
    type     what `msgspec.convert` turns a raw value into
    """

    name: str
    type: Any
    default: Any
    help: str
    section: str
    kind: str
    choices: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.name.upper()

    def parse(self, raw: Any, *, where: str, is_text: bool) -> Any:
        """`raw` as this field's type, or ConfigError that names `where`.

        With `is_text`, strings become numbers and booleans, lists are comma-separated, and tables
        are JSON. Words of other engines for the same value are taken (streamer/spelling.py).
        """
        if self.choices and isinstance(raw, str):
            raw = as_choice(self.name, raw)
        elif is_text and isinstance(raw, str):
            raw = as_count(self.name, raw)
        if self.kind == "list" and is_text:
            parts = [raw] if isinstance(raw, str) else raw
            raw = [item for part in parts for item in map(str.strip, part.split(",")) if item]
        try:
            if self.kind == "table" and is_text:
                raw = msgspec.json.decode(raw)
            return msgspec.convert(raw, self.type, strict=not is_text)
        except msgspec.DecodeError as error:
            wanted = expected(error, get_args(Method), self.name)
            if self.choices:
                wanted = "expected one of " + ", ".join(self.choices)
            got = "" if self.name in SECRET else f", got {raw!r}"
            raise ConfigError(f"{where}: {wanted}{got}", param=self.name) from None


@cache
def settings() -> tuple[Setting, ...]:
    """Every field of Config, in order; the one source of flags, variables, keys and help."""
    hints = get_type_hints(Config, include_extras=True)
    found: list[Setting] = []
    section = ""
    for field in msgspec.structs.fields(Config):
        section = SECTIONS.get(field.name, section)
        default = {} if field.default is msgspec.NODEFAULT else field.default
        found.append(_setting(field.name, hints[field.name], default, section))
    return tuple(found)


def _setting(name: str, hint: Any, default: Any, section: str) -> Setting:
    described = [m.description for m in hint.__metadata__ if m.description]
    inner = hint.__origin__
    literals = [kind for kind in (inner, *get_args(inner)) if get_origin(kind) is Literal]
    choices: tuple[str, ...] = get_args(literals[0]) if literals else ()
    kind = "choice" if choices else "value"
    if inner is bool:
        kind = "bool"
    elif get_origin(inner) is tuple:
        kind = "list"
    elif get_origin(inner) is dict or (
        isinstance(inner, type) and issubclass(inner, msgspec.Struct)
    ):
        kind = "table"
    return Setting(name, hint, default, described[0], section, kind, choices)


def load_config(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None = None
) -> Config:
    """The Config of flags > environment > TOML file > defaults.

    flags        field name -> text (a list of texts for lists, a bool for bools); None: not given
    environment  usually os.environ; only STREAMER_... is read; `unknown_variables` reports
                 variables that are not settings
    file         TOML; without it the file that STREAMER_CONFIG names, if any

    Raises ConfigError that names the flag, variable or key.
    """
    known = {s.name: s for s in settings()}
    if file is None and environment.get(FILE_VARIABLE):
        file = Path(environment[FILE_VARIABLE])
    values = _from_file(known, file) if file is not None else {}
    values |= _from_environment(known, environment)
    for name, raw in flags.items():
        if raw is not None:
            setting = known[name]
            values[name] = setting.parse(raw, where=setting.flag, is_text=True)
    return Config(**values)


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """A warning for each STREAMER_... variable that is no setting and so has no effect.

    The variable may be another program's or a misspelt setting, so it is not refused.
    """
    known = {s.variable for s in settings()} | {FILE_VARIABLE, KERNELS_VARIABLE}
    return [
        f"environment variable {variable} is not a setting{hint(variable, sorted(known))}"
        for variable in sorted(environment)
        if variable.startswith(ENVIRONMENT_PREFIX)
        and variable not in known
        and not _is_orchestrators(variable, environment[variable])
    ]


def _from_environment(
    known: Mapping[str, Setting], environment: Mapping[str, str]
) -> dict[str, Any]:
    return {
        setting.name: setting.parse(
            environment[setting.variable], where=setting.variable, is_text=True
        )
        for setting in known.values()
        if setting.variable in environment
        and not _is_orchestrators(setting.variable, environment[setting.variable])
    }


def _is_orchestrators(variable: str, value: str) -> bool:
    """Whether Kubernetes set the variable, for a service named streamer or streamer-*."""
    return bool(_SERVICE_VARIABLE.search(variable) or _SERVICE_ADDRESS.match(value))


def _from_file(known: Mapping[str, Setting], file: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}", param="config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {error}", param="config") from None
    values = {}
    for key, raw in table.items():
        setting = known.get(key)
        if setting is None:
            raise ConfigError(f"{file}: {key} is not a setting{hint(key, known)}", param=key)
        values[key] = setting.parse(raw, where=f"{file}: {key}", is_text=False)
    return values
