"""Config: its sources and their order, its bounds, and refusals that name the field."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from streamer.config import Config, KeyLimits, Setting, load_config, settings, unknown_variables
from streamer.errors import ConfigError


def test_flags_beat_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nhost = "file"\nmax_num_seqs = 3\n')
    environment = {"STREAMER_PORT": "2", "STREAMER_HOST": "environment"}
    config = load_config({"port": "4"}, environment, file)
    assert (config.port, config.host, config.max_num_seqs) == (4, "environment", 3)
    assert config.block_size == Config().block_size


def test_a_flag_that_was_not_given_hides_nothing() -> None:
    assert load_config({"port": None}, {"STREAMER_PORT": "2"}).port == 2


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('api_key = ["a", "b"]\n')
    assert load_config({}, {"STREAMER_CONFIG": str(file)}).api_key == ("a", "b")


def test_the_kernels_variable_is_ignored() -> None:
    assert load_config({}, {"STREAMER_KERNELS": "torch"}) == Config()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("max_model_len", "128", 128),
        ("max_model_len", "4k", 4000),
        ("max_model_len", "4K", 4096),
        ("max_num_batched_tokens", "25.6k", 25_600),
        ("max_num_batched_tokens", "1M", 1 << 20),
        ("swap_space", "0.5", 0.5),
        ("swap_space", "1", 1.0),
        ("enable_prefix_caching", "false", False),
        ("load_progress", "0", False),
        ("dtype", "bfloat16", "bfloat16"),
        ("dtype", "half", "float16"),
        ("dtype", "float", "float32"),
        ("dtype", "BF16", "bfloat16"),
        ("kv_cache_dtype", "fp8_e4m3", "fp8"),
        ("log_level", "WARN", "warning"),
        ("api_key", "a, b,,c", ("a", "b", "c")),
        ("api_key", "", ()),
        ("model", "a,b", "a,b"),
    ],
)
def test_text_becomes_the_fields_type(name: str, text: str, value: object) -> None:
    assert getattr(load_config({}, {f"STREAMER_{name.upper()}": text}), name) == value


def test_the_variables_of_kubernetes_services_are_ignored() -> None:
    environment = {
        "STREAMER_PORT": "tcp://10.0.0.7:8000",
        "STREAMER_SERVICE_HOST": "10.0.0.7",
        "STREAMER_SERVICE_PORT": "8000",
        "STREAMER_SERVICE_PORT_HTTP": "8000",
        "STREAMER_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "STREAMER_PORT_8000_TCP_ADDR": "10.0.0.7",
        "STREAMER_WEB_PORT": "tcp://10.0.0.8:80",
        "STREAMER_WEB_SERVICE_HOST": "10.0.0.8",
        "STREAMER_MAX_QUEUE": "3",
    }
    config = load_config({}, environment)
    assert (config.port, config.max_queue) == (8000, 3)
    assert unknown_variables(environment) == []


def test_an_unknown_variable_is_a_warning_and_not_an_error() -> None:
    environment = {"STREAMER_PROT": "1", "STREAMER_XYZZY": "1", "STREAMER_WEB_PORT": "80"}
    environment |= {"STREAMER_PORT": "5", "STREAMER_KERNELS": "torch", "HOME": "/"}
    assert load_config({}, environment).port == 5
    warnings = unknown_variables(environment)
    assert [line.split()[2] for line in warnings] == sorted(list(environment)[:3])
    assert warnings[0] == (
        "environment variable STREAMER_PROT is not a setting; did you mean STREAMER_PORT?"
    )


def test_a_list_flag_may_be_repeated() -> None:
    assert load_config({"api_key": ["a,b", "c"]}, {}).api_key == ("a", "b", "c")


@pytest.mark.parametrize(
    ("flags", "environment", "message", "param"),
    [
        ({"port": "x"}, {}, "--port: expected a whole number, got 'x'", "port"),
        ({"port": "65536"}, {}, "--port: expected a whole number <= 65535", "port"),
        ({}, {"STREAMER_PORT": "x"}, "STREAMER_PORT: expected", "port"),
        (
            {"dtype": "int3"},
            {},
            "--dtype: expected one of auto, float32, bfloat16, float16",
            "dtype",
        ),
        (
            {"gpu_memory_utilization": "0"},
            {},
            "--gpu-memory-utilization: expected a number > 0",
            None,
        ),
        (
            {"max_model_len": "1.5K"},
            {},
            "--max-model-len: expected a whole number, got '1.5K'",
            None,
        ),
        ({"max_num_seqs": "4k"}, {}, "--max-num-seqs: expected a whole number, got '4k'", None),
        ({"kv_cache_dtype": "fp8_e5m2"}, {}, "expected one of auto, fp8, int8, got", None),
    ],
)
def test_refusals_name_the_flag_variable_or_key(
    flags: dict[str, str], environment: dict[str, str], message: str, param: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(flags, environment)
    assert message in caught.value.message
    assert param is None or caught.value.param == param


def test_python_takes_the_same_words_of_choices_and_no_text_for_numbers() -> None:
    assert Config(dtype="half").dtype == "float16"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_model_len: expected a whole number, got '4k'"):
        Config(max_model_len="4k")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "prot is not a setting; did you mean port?"),
        ('port = "8000"', "port: expected a whole number"),
        ("port = ", "settings.toml:"),
        ("[server]\nport = 1", "server is not a setting"),
    ],
)
def test_files_are_refused_by_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"settings\.toml") as caught:
        load_config({}, {}, file)
    assert message in caught.value.message


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config({}, {}, tmp_path / "absent.toml")


def test_bounds_hold_for_python_too() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs: expected a whole number >= 1") as caught:
        Config(max_num_seqs=0)
    assert caught.value.param == "max_num_seqs"
    with pytest.raises(ConfigError, match="block_size"):
        msgspec.structs.replace(Config(), block_size=-1)


@pytest.mark.parametrize("keys", [("",), ("good-key", "")])
def test_an_empty_api_key_is_refused_and_no_key_is_shown(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="api_key: expected text of length >= 1") as caught:
        Config(api_key=keys)
    assert "good-key" not in caught.value.message


LIMITS = {"a.b": {"max_tokens_per_minute": 7}, "c": {"max_streams_per_key": 0}}


def test_a_key_may_have_limits_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'api_key = ["a.b", "c"]\nmax_streams_per_key = 2\n'
        '[key_limits."a.b"]\nmax_tokens_per_minute = 7\n[key_limits.c]\nmax_streams_per_key = 0\n'
    )
    config = load_config({}, {}, file)
    assert config.limits_of("a.b") == KeyLimits(12_000, 7, 2, 64, 0)
    assert config.limits_of("c") == KeyLimits(12_000, 0, 0, 64, 0)
    assert Config(max_streams_per_key=2).limits_of("") == KeyLimits(0, 0, 2, 0, 0)
    text = {"api_key": "a.b,c", "key_limits": json.dumps(LIMITS), "max_streams_per_key": "2"}
    assert load_config(text, {}) == config
    assert Config(api_key=("a.b", "c"), max_streams_per_key=2, key_limits=LIMITS) == config


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ('{"good-key": {"max_tokens_per_minute": -1}}', "expected a whole number >= 0"),
        ('{"good-key": {"max_token": 1}}', "unknown field `max_token`"),
        ('{"good-key": 3}', "expected an object"),
        ('{"good-key": ', "truncated"),
        ('{"good-kez": {}}', "a key that is not in api_key"),
    ],
)
def test_invalid_limits_of_a_key_are_refused_without_showing_it(limits: str, message: str) -> None:
    environment = {"STREAMER_KEY_LIMITS": limits, "STREAMER_API_KEY": "good-key"}
    with pytest.raises(ConfigError, match=message) as caught:
        load_config({}, environment)
    assert caught.value.param == "key_limits"
    assert "good-ke" not in caught.value.message


def test_speculation_is_what_vllms_json_says(tmp_path: Path) -> None:
    assert (Config().speculation_method, Config().draft_model) == ("none", None)
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4}'
    by_flag = load_config({"speculative_config": text}, {})
    assert by_flag.speculative_config.num_speculative_tokens == 5
    assert by_flag == load_config({}, {"STREAMER_SPECULATIVE_CONFIG": text})
    file = tmp_path / "settings.toml"
    file.write_text("[speculative_config]\n" + "\n".join(
        f"{key} = {json.dumps(value)}" for key, value in json.loads(text).items()
    ))  # fmt: skip
    assert load_config({}, {}, file) == by_flag
    both = Config(speculative_model="small")
    assert (both.speculation_method, both.draft_model) == ("suffix", "small")
    alone = load_config({"speculative_config": '{"model": "small"}'}, {})
    assert (alone.speculation_method, alone.draft_model) == ("draft_model", "small")
    off = load_config({"speculative_config": '{"method": "none"}', "speculative_model": "x"}, {})
    assert off.draft_model is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"method": "eagle"}', "'eagle'.* expected one of suffix, ngram, draft_model, none"),
        ('{"num_speculative_tokens": 0}', "expected a whole number >= 1"),
        ('{"num_speculative_tokens": 65}', "expected a whole number <= 64"),
        ('{"draft_tensor_parallel_size": 1}', "unknown field `draft_tensor_parallel_size`"),
        ('{"method": "draft_model"}', "method draft_model needs a model"),
        ('{"method": "ngram", "model": "x"}', "method ngram has no model"),
        ('{"method": "suffix", "prompt_lookup_min": 3}', "prompt_lookup_min and _max are of ngram"),
        ('{"num_speculative_tokens": 5}', "method is missing"),
        (
            '{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}',
            "prompt_lookup_min 5 exceeds prompt_lookup_max 4",
        ),
        ("suffix", r"""it is JSON, such as '{"method": "suffix"}'; JSON is malformed"""),
    ],
)
def test_a_wrong_speculative_config_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_config({"speculative_config": text}, {})
    assert caught.value.param == "speculative_config"
    assert "speculative" in caught.value.message


def test_two_different_draft_models_are_refused() -> None:
    text = {"speculative_config": '{"model": "a"}', "speculative_model": "b"}
    with pytest.raises(ConfigError, match="model is a, but speculative_model is b"):
        load_config(text, {})


@pytest.mark.parametrize("setting", settings(), ids=lambda s: s.name)
def test_every_setting_says_what_it_does_and_accepts_its_default(setting: Setting) -> None:
    assert setting.help
    assert setting.section in ("model", "scheduling and memory", "server")
    assert setting.parse(setting.default, where="here", is_text=False) == setting.default


def test_a_root_path_begins_with_a_slash_and_ends_without() -> None:
    assert Config(root_path="/api/").root_path == "/api"
    assert Config(root_path="/").root_path == ""
    with pytest.raises(ConfigError, match="root_path"):
        Config(root_path="api")


HOSTS = {"nnodes": 2, "tensor_parallel_size": 4, "master_addr": "a", "ranks_secret_file": "f"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"nnodes": 1}, "master_addr"),
        (
            {"nnodes": 1, "master_addr": None, "ranks_secret_file": None, "node_rank": 1},
            "node_rank",
        ),
        ({"nnodes": 3}, "nnodes"),
        ({"node_rank": 2}, "node_rank"),
        ({"master_addr": None}, "master_addr"),
        ({"ranks_secret_file": None}, "ranks_secret_file"),
    ],
)
def test_hosts_of_ranks_are_checked(changes: dict[str, object], param: str) -> None:
    Config(**HOSTS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=param) as refusal:
        Config(**{**HOSTS, **changes})  # type: ignore[arg-type]
    assert refusal.value.param == param
