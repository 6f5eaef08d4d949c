"""The engines of compare: each one's path, command line and settings.

Nothing here starts an engine. Every engine gets the same threads, the same context, the same bytes
of KV pool and no prefix cache; all else is its own default, or what its documentation requires on a
CPU.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from streamer import __version__

from .peers.talk import PeerSetup
from .workload import KV_BYTES, MAX_LEN, MAX_SEQS, Model

BLOCK = 16  # tokens, of our own pool
SERVED = "model"  # the name that clients use
SLOTS = 32  # of llama.cpp, which divides its pool among them
PAGE = 256  # tokens, of transformers' pool


class Weights(msgspec.Struct, frozen=True):
    """A form of a model's weights; engines of the same kind are compared with each other.

    kind  16, 8 or 4 bits a weight;  stored_bits  with scales and zero points
    head_bits  of the last matrix, where it is stored otherwise
    group      columns of a scale, of a checkpoint that `streamer quantize` writes for it
    form       of a checkpoint that peers/to_int4.py writes
    """

    kind: int
    stored_bits: float
    is_gguf: bool = False
    head_bits: float | None = None
    group: int = 0
    form: str = ""

    def mean_bits(self, model: Model) -> float:
        """Bits a weight of all that a step reads."""
        layers, head = model.layer_parameters, model.head_parameters
        head_bits = self.stored_bits if self.head_bits is None else self.head_bits
        return (layers * self.stored_bits + head * head_bits) / (layers + head)


BF16 = "bf16"
WEIGHTS = {
    BF16: Weights(16, 16),
    "int8": Weights(8, 8),
    "Q8_0": Weights(8, 8.5, is_gguf=True),
    "int4": Weights(4, 4.63, head_bits=8),
    "int4-g128": Weights(4, 4.16, head_bits=8, group=128),
    "awq": Weights(4, 4.16, head_bits=16, form="awq"),
    "symmetric": Weights(4, 4.13, head_bits=16, form="symmetric"),
    "Q4_0": Weights(4, 4.5, is_gguf=True, head_bits=6.56),
    "Q4_K_M": Weights(4, 4.85, is_gguf=True),
}


class Engine(msgspec.Struct, frozen=True):
    """One column of the comparison.

    home       its virtual environment's folder below the peers' home; "": this interpreter
    label      for tables and charts
    runner     the module in peers/ that runs it in process; "": only its server is measured
    options    for the runner
    weights    of WEIGHTS; bf16 or the form that it makes of the checkpoint or reads
    serves     whether it has a server that streams completions
    is_plain   its server takes prompts as text alone, and no fields that OpenAI does not have
    has_pool   whether it keeps a KV pool, so that its memory can be compared
    ready      the path that answers 200 once it serves
    """

    name: str
    label: str
    home: str
    runner: str = ""
    options: dict[str, str] = {}
    serves: bool = False
    is_plain: bool = False
    has_pool: bool = True
    ready: str = "/health"
    weights: str = BF16

    @property
    def is_ours(self) -> bool:
        """Whether it is this package."""
        return not self.home

    @property
    def kind(self) -> int:
        """Bits a weight, in round figures."""
        return WEIGHTS[self.weights].kind

    @property
    def is_llama(self) -> bool:
        """Whether it is llama.cpp."""
        return self.home == LLAMA

    @property
    def is_vllm(self) -> bool:
        """Whether it is vLLM, with AMD's kernels or without."""
        return self.home in (VLLM, ZENTORCH)


OURS, LLAMA, VLLM, ZENTORCH = "streamer", "llamacpp", "vllm", "zentorch"


def _quantized() -> Iterator[Engine]:
    """Ours and the peers with weights in 8 and 4 bits."""
    for name in ("int8", "int4"):
        for suffix, also, cache in (
            ("", "", {}),
            ("-kv8", ", int8 KV", {"kv_cache_dtype": "int8"}),
        ):
            yield Engine(
                f"{OURS}-{name}{suffix}",
                f"Streamer {name}{also}",
                "",
                "run_streamer",
                {"quantization": name, **cache},
                serves=True,
                ready="/ready",
                weights=name,
            )
        yield Engine(
            f"openvino-{name}",
            f"OpenVINO {name.upper()}",
            "openvino",
            "run_openvino",
            {"kv": "u8", "weights": name},
            weights=name,
        )
    yield from _vllm()
    yield Engine(
        f"{OURS}-int4-g128-kv8",
        "Streamer int4 g128, int8 KV",
        "",
        "run_streamer",
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        serves=True,
        ready="/ready",
        weights="int4-g128",
    )
    for name in ("Q8_0", "Q4_0", "Q4_K_M", "awq"):
        low = name.lower()
        yield Engine(
            f"{OURS}-{low}",
            f"Streamer {'AWQ' if name == 'awq' else name}",
            "",
            "run_streamer",
            serves=True,
            ready="/ready",
            weights=name,
        )
        if WEIGHTS[name].is_gguf:
            yield Engine(f"{LLAMA}-{low}", f"llama.cpp {name}", LLAMA, serves=True, weights=name)


def _vllm() -> Iterator[Engine]:
    """vLLM, and vLLM with AMD's zentorch beside it, whose kernels it then takes.

    Activations are int8 with int8 weights. With 4-bit weights they are where the CPU has AMX, and
    in zentorch where the weights have no zero points (W4A8); else in 16 bits (vLLM 0.32).
    """
    for home, weights, label in (
        (VLLM, "int8", "vLLM CPU INT8"),
        (VLLM, "int4", "vLLM CPU INT4"),
        (VLLM, "awq", "vLLM CPU AWQ"),
        (ZENTORCH, "int8", "vLLM, zentorch INT8"),
        (ZENTORCH, "int4", "vLLM, zentorch INT4"),
        (ZENTORCH, "symmetric", "vLLM, zentorch W4A8"),
    ):
        yield Engine(f"{home}-{weights}", label, home, "run_vllm", serves=True, weights=weights)


ENGINES = {
    engine.name: engine
    for engine in (
        Engine(OURS, "Streamer", "", "run_streamer", serves=True, ready="/ready"),
        Engine("openvino", "OpenVINO", "openvino", "run_openvino", {"kv": "bf16"}),
        Engine("openvino-u8", "OpenVINO, u8 KV", "openvino", "run_openvino", {"kv": "u8"}),
        Engine(VLLM, "vLLM CPU", VLLM, "run_vllm", serves=True),
        Engine(LLAMA, "llama.cpp", LLAMA, serves=True),
        Engine(
            "transformers",
            "transformers, static",
            "transformers",
            "run_transformers",
            {"mode": "static"},
            has_pool=False,
        ),
        Engine(
            "transformers-cb",
            "transformers, continuous",
            "transformers",
            "run_transformers",
            {"mode": "continuous"},
            serves=True,
            is_plain=True,
        ),
        *_quantized(),
    )
}


class Places(msgspec.Struct, frozen=True):
    """Folders of environments and checkpoints. `checkpoints` is filled where it is missing."""

    home: Path

    @classmethod
    def found(cls) -> Places:
        """$PEERS_HOME, or a folder of the user's cache."""
        given = os.environ.get("PEERS_HOME", "~/.cache/streamer-peers")
        return cls(Path(given).expanduser())

    def python(self, engine: Engine) -> Path:
        """The interpreter that runs the engine."""
        return self.home / engine.home / "bin" / "python" if engine.home else Path(sys.executable)

    def program(self, engine: Engine, name: str) -> Path:
        """A program of the engine's environment."""
        return self.python(engine).with_name(name)

    def is_installed(self, engine: Engine) -> bool:
        """Whether the engine's environment, and what only a server needs, is there."""
        if engine.is_llama and not self.program(engine, "llama-quantize").exists():
            return False
        return self.python(engine).exists()

    def checkpoint(self, model: Model) -> str:
        """The folder of a model's checkpoint; a model without weights is its own name."""
        return str(self.home / "models" / f"{model.name}-bf16") if model.vocabulary else model.name

    def gguf(self, model: Model, weights: str = BF16) -> Path:
        """The checkpoint as a GGUF file."""
        return self.home / "models" / f"{model.name}-{weights}.gguf"

    def written(self, model: Model, weights: str) -> Path:
        """The checkpoint as `streamer quantize` or to_int4.py writes it."""
        return self.home / "models" / f"{model.name}-{weights}"

    def source(self, engine: Engine, model: Model) -> str:
        """What the engine loads: the checkpoint, or the file or folder of its weights."""
        weights = WEIGHTS[engine.weights]
        if (engine.is_vllm and engine.weights != BF16) or weights.group or weights.form:
            return str(self.written(model, engine.weights))
        is_gguf = engine.is_llama or weights.is_gguf
        return str(self.gguf(model, engine.weights)) if is_gguf else self.checkpoint(model)


def setup(engine: Engine, model: Model, places: Places, threads: int) -> PeerSetup:
    """The setup that a runner gets."""
    return PeerSetup(
        model=places.source(engine, model),
        kv_bytes=KV_BYTES,
        kv_token_bytes=kv_token_bytes(engine, model),
        threads=threads,
        max_len=MAX_LEN,
        max_seqs=MAX_SEQS,
        options=engine.options,
    )


def kv_token_bytes(engine: Engine, model: Model) -> int:
    """KV bytes of a token in the pool; a model without weights counts as `small`."""
    return (model.kv_token_bytes or 8192) // (2 if "kv_cache_dtype" in engine.options else 1)


def environment(engine: Engine, places: Places, threads: int) -> dict[str, str]:
    """An engine's environment variables: this process's and its own, without Python's."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "STREAMER_", "VIRTUAL_ENV"))
    }
    kept |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "0"}
    if not engine.home:  # ours is this very package, installed or not
        return kept | {"PYTHONPATH": str(Path(__file__).absolute().parents[3])}
    if engine.is_vllm:
        kept |= {
            "VLLM_CPU_KVCACHE_SPACE": str(KV_BYTES >> 30),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "LD_PRELOAD": ":".join(_preloads(places.home / engine.home)),
        }
    return kept


def _preloads(home: Path) -> list[str]:
    """The allocator and OpenMP that vLLM needs preloaded, where its environment has them."""
    patterns = ("tcmalloc/usr/lib/*/libtcmalloc_minimal.so.4", "lib/libiomp5.so")
    return [str(path) for pattern in patterns for path in home.glob(pattern)]


def server_command(
    engine: Engine, model: Model, places: Places, threads: int, port: int
) -> list[str]:
    """The command line of an engine's own server on 127.0.0.1."""
    python, folder = str(places.python(engine)), places.source(engine, model)
    token_bytes = kv_token_bytes(engine, model)
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    same = ["--dtype", "bfloat16", "--max-model-len", str(MAX_LEN), "--max-num-seqs", str(MAX_SEQS)]
    same += ["--no-enable-prefix-caching", "--served-model-name", SERVED]
    if engine.is_ours:
        for name, value in engine.options.items():
            same += [f"--{name.replace('_', '-')}", value]
        blocks = ["--num-gpu-blocks-override", str(KV_BYTES // (BLOCK * token_bytes))]
        blocks += ["--block-size", str(BLOCK), "--no-load-progress", "--log-level", "warning"]
        return [python, "-m", "streamer", "serve", folder, *same, *blocks, *listen]
    if engine.is_vllm:
        module = "vllm.entrypoints.openai.api_server"
        return [python, "-m", module, "--model", folder, *same, *listen]
    if engine.is_llama:
        program = str(places.program(engine, "llama-server"))
        context = str(KV_BYTES // token_bytes)
        flags = ["-m", folder, "--alias", SERVED, "-c", context, "-np", str(SLOTS)]
        flags += ["-t", str(threads), "-tb", str(threads), "--no-kv-unified"]
        return [program, *flags, "--no-cache-prompt", "-cram", "0", "--no-webui", *listen]
    pages = str(KV_BYTES // (PAGE * token_bytes))
    flags = ["--continuous-batching", "--cb-block-size", str(PAGE), "--cb-num-blocks", pages]
    program = str(places.program(engine, "transformers"))
    flags += ["--cb-max-batch-tokens", "1024", "--dtype", "bfloat16"]
    return [program, "serve", folder, *flags, *listen]


def version(engine: Engine, places: Places) -> str | None:
    """The version of an engine that is served; None where it is not found."""
    if engine.is_ours:
        return __version__
    if engine.is_llama:
        command = [str(places.program(engine, "llama-server")), "--version"]
    else:
        names = {VLLM: ["vllm-cpu"], ZENTORCH: ["vllm-cpu", "zentorch"]}
        code = (
            "import sys, importlib.metadata as m; print('version:', *map(m.version, sys.argv[1:]))"
        )
        command = [str(places.python(engine)), "-c", code, *names.get(engine.home, [engine.home])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    found = re.search(r"version: (.+)", done.stdout + done.stderr)
    return found[1] if found else None


def served_name(engine: Engine, model: Model, places: Places) -> str:
    """The model's name in requests."""
    return places.checkpoint(model) if engine.name == "transformers-cb" else SERVED
