"""The command line: parsing, exit codes, messages, and what `--help` does not import."""

from __future__ import annotations

import argparse
import gc
import io
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from streamer.cli import COMMANDS, doctor, main
from streamer.cli.arguments import (
    Parser,
    UsageError,
    add_config_flags,
    add_sampling_flags,
    config_from,
    sampling_from,
)
from streamer.cli.bench import BENCHES
from streamer.cli.commands import Command
from streamer.cli.doctor import port_free
from streamer.cli.generate import add_arguments as generate_arguments
from streamer.cli.loadtest import PROGRAMS
from streamer.cli.loop import COLLECT_AFTER
from streamer.cli.others import COMMANDS as OTHERS_COMMANDS
from streamer.cli.others import FLAGS
from streamer.cli.serve import _serve, announce, check_bind
from streamer.config import Config, SpeculativeConfig, settings
from streamer.core.sizes import ModelInfo
from streamer.errors import StreamerError
from streamer.kernels import ops

HEAVY = ("torch", "transformers", "starlette", "uvicorn", "rich", "numpy", "websockets", "jinja2")


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["serve", "--help"], ["chat", "-h"]])
def test_help_imports_no_large_library(words: list[str]) -> None:
    """Imports are checked instead of times: what makes `--help` slow is what it loads."""
    script = (
        "import sys; from streamer.cli import main\n"
        f"code = main({words!r})\n"
        f"loaded = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "sys.exit(f'loaded {loaded}' if loaded or code else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "streamer" in done.stdout


def test_the_module_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamer", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "streamer 0.1.0\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert COMMANDS[name].help in capsys.readouterr().out


GROUPS = {"bench": BENCHES, "loadtest": PROGRAMS}
SUBCOMMANDS = [
    (group, name, command)
    for group in GROUPS
    for name, command in GROUPS[group].items()
    if not command.is_foreign
]  # Locust's own tests run it: it patches what imports it


@pytest.mark.parametrize(("group", "name", "command"), SUBCOMMANDS)
def test_every_subcommand_has_help(
    group: str, name: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([group, name, "--help"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert f"usage: streamer {group} {name}" in output
    assert command.help in output


def test_a_missing_locust_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "locust", None)
    with pytest.raises(SystemExit, match=r"pip install 'streamer-llm\[loadtest\]'"):
        main(["loadtest", "locust", "--help"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["bench"], "commands: step host time of a step"),
        (["loadtest"], "open-loop requests when they are due"),
        (["bench", "--x"], "required: WHAT see `streamer bench --help`"),
        (["bench", "stream", "--streams", "0,1"], "--streams: must be numbers above 0, not '0,1'"),
        (["bench", "stream", "--slow-readers", "x"], "--slow-readers: must be whole numbers"),
        (["bench", "x"], "invalid choice: 'x'"),
        (["loadtest", "x"], "invalid choice: 'x'"),
        (["loadtest", "open-loop", "--rate"], "unrecognized arguments: --rate"),
        ([], "usage: streamer"),
        (["swerve"], "unknown command 'swerve'; did you mean serve?"),
        (["run", "llama3"], "unknown command 'run'; here: `streamer chat MODEL`"),
        (["pull", "x"], "`streamer serve OWNER/NAME` fetches"),
        (["serve", "--prot", "1"], "unrecognized arguments: --prot; did you mean --port?"),
        (["serve", "--gpu-memory", "1"], "; did you mean --gpu-memory-utilization?"),
        (["serve", "--max-num-seq=1"], "--max-num-seq=1; did you mean --max-num-seqs?"),
        (["serve", "--max-num", "1"], "unrecognized arguments: --max-num"),
        (["serve", "--alias", "x"], "--alias; it is --served-model-name here see"),
        (["serve", "a", "-c", "4096"], "-c 4096; it is --max-model-len here"),
        (["doctor", "-c", "4096"], "unrecognized arguments: -c 4096 see"),
        (["serve", "-hf", "a/b"], "-hf; the model is the first argument"),
        (
            ["serve", "--trust_remote_code", "--prot=1"],
            "; --trust_remote_code: code of a checkpoint never runs; --prot: did you mean --port?",
        ),
        (["serve", "--allias", "x"], "unrecognized arguments: --allias see"),
        (["serve", "--port", "x"], "--port: expected a whole number, got 'x'"),
        (["serve", "--max-model-len", "four"], "--max-model-len: expected a whole number, got"),
        (["serve", "--nnodes", "3"], "error: --nnodes 3: tensor_parallel_size 1 is not"),
        (["serve", "--dtype", "int3"], "--dtype: expected one of"),
        (["serve", "a", "--model", "b"], "MODEL is a but --model is b"),
        (["serve", "--host", "0.0.0.0"], "--host 0.0.0.0 is reachable from other machines"),
        (["serve", "--config", "absent.toml"], "absent.toml"),
        (["generate", "hi", "--temperature", "3"], "--temperature must be from 0.0 to 2.0"),
        (["generate", "hi", "--top-k", "x"], "--top-k: expected a whole number"),
        (["generate", " "], "PROMPT is empty"),
        (["generate", "hi", "--raw", "--system", "x"], "leave --raw out"),
        (["chat", "--url", "ftp://x"], "--url: ftp://x is not the address of a server"),
        (["chat", "fake", "--url", "localhost:1"], "leave MODEL out"),
        (["chat", "--url", "localhost:1", "--max-num-seqs", "3"], "leave --max-num-seqs out"),
        (["simulate", "--lengths", "1,x"], "--lengths must be numbers"),
    ],
)
def test_wrong_usage_is_2_and_names_the_flag(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert message in " ".join((output.err + output.out).split())
    assert "Traceback" not in output.err


def test_what_other_engines_call_a_flag_is_none_of_ours_and_leads_to_one() -> None:
    serve, generate = Parser(), Parser()
    add_config_flags(serve)
    generate_arguments(generate)
    known = {*serve._option_string_actions, *generate._option_string_actions}
    assert not known & FLAGS.keys()
    for ours in FLAGS.values():
        assert {word.rstrip(")") for word in re.findall(r"--[a-z-]+", ours)} <= known, ours
    assert not COMMANDS.keys() & OTHERS_COMMANDS.keys()
    for ours in OTHERS_COMMANDS.values():
        (word,) = re.findall(r"`(?:streamer|hf) ([\w-]+)", ours)
        assert word in (*COMMANDS, "cache", "--help", "--version"), ours


def test_an_error_names_the_flag_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--model", "fake", "--chat-template", "chatml"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "error: --chat-template: chatml: No such file or directory; it is the path of" in said
    assert main(["generate", "hi", "--model", "fake", "--script", "absent"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "error: --script: absent: No such file or directory; it is the path of a JSON" in said
    parser = Parser()
    parser.add_argument("--max-model-len")
    for message, shown in (
        ("max_model_len 9 exceeds", "--max-model-len 9 exceeds"),
        ("max_model_length", "max_model_length"),
        ("the max_model_len", "the max_model_len"),
    ):
        assert parser.with_flag(message, "max_model_len") == shown
    assert parser.with_flag("block_size: 3", "block_size") == "block_size: 3"
    assert parser.with_flag("no", None) == "no"
    assert parser.with_flag("model is no folder", "model") == "model is no folder"


def test_doctor_gives_the_advice_on_a_compiler_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "there is no C compiler: install one, or `pip install ziglang`"
    monkeypatch.setattr(ops, "why_not_native", lambda: said)
    finding = doctor._kernels()
    assert (finding.detail, finding.remedy) == (f"torch's own operators: {said}", "")


def test_an_unknown_variable_is_logged_as_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("STREAMER_PROT", "1")
    assert main(["info"]) == 0
    (warning,) = caplog.records
    assert "STREAMER_PROT is not a setting" in warning.getMessage()


def test_a_streamer_error_is_1_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> int:
        raise StreamerError("the pool has [3] blocks, 5 are needed")

    monkeypatch.setattr("streamer.cli.doctor.run", fail)
    assert main(["doctor"]) == 1
    output = capsys.readouterr().err
    assert "error: the pool has [3] blocks, 5 are needed" in output
    assert "Traceback" not in output


def test_names_in_files_give_the_terminal_no_orders(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise StreamerError("the tensor \x1b]0;é\x07 is\nmisshapen")

    monkeypatch.setattr("streamer.cli.doctor.run", fail)
    assert main(["doctor"]) == 1
    assert "the tensor \\x1b]0;é\\x07 is\nmisshapen" in capsys.readouterr().err


def test_info_gives_the_terminal_no_orders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither among what is known nor in why a checkpoint is refused."""
    folder = tmp_path / "a\x1b]0;x\x07"
    folder.mkdir()
    assert main(["info", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert shown.count("a\\x1b]0;x\\x07") == 2
    assert not {"\x1b", "\x07"} & set(shown)


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamer.cli.doctor.run", interrupt)
    assert main(["doctor"]) == 130


def _parsed(*words: str) -> argparse.Namespace:
    parser = Parser()
    add_config_flags(parser)
    return parser.parse_args(words)


def test_every_setting_is_a_flag() -> None:
    parser = Parser()
    add_config_flags(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert {setting.flag for setting in settings()} <= flags
    assert {"--no-enable-prefix-caching", "--no-load-progress"} <= flags


def test_flags_become_a_config() -> None:
    args = _parsed("m", "--port=1", "--no-enable-prefix-caching", "--api-key", "a,b", "--api-key=c")
    config = config_from(args, {"STREAMER_PORT": "2", "STREAMER_MAX_QUEUE": "3"})
    assert config == Config(
        model="m", port=1, enable_prefix_caching=False, api_key=("a", "b", "c"), max_queue=3
    )


def test_sampling_flags_become_parameters() -> None:
    parser = Parser()
    add_sampling_flags(parser)
    words = ["--temperature", "0", "--stop", "a,b", "--stop", "c", "--seed", "7", "--ignore-eos"]
    given = sampling_from(parser.parse_args(words))
    assert given == {"temperature": 0.0, "stop": ("a,b", "c"), "seed": 7, "ignore_eos": True}
    assert sampling_from(parser.parse_args([])) == {}


@pytest.mark.parametrize(
    ("config", "is_allowed"),
    [
        (Config(), True),
        (Config(host="localhost"), True),
        (Config(host="127.8.8.8"), True),
        (Config(host="::1"), True),
        (Config(host="[::1]"), True),
        (Config(host="0.0.0.0"), False),
        (Config(host="::"), False),
        (Config(host="192.168.1.2"), False),
        (Config(host="myhost"), False),
        (Config(host="0.0.0.0", api_key=("k",)), True),
        (Config(host="0.0.0.0", allow_public_bind=True), True),
        (Config(host="0.0.0.0", uds="/tmp/s"), True),
    ],
)
def test_a_public_bind_needs_a_key(config: Config, is_allowed: bool) -> None:
    if is_allowed:
        check_bind(config)
    else:
        with pytest.raises(UsageError, match="api-key"):
            check_bind(config)


TINY = ModelInfo(
    name="tiny [1]",
    dtype="bfloat16",
    vocab_size=10,
    max_model_len=2048,
    eos_token_ids=(1,),
    num_blocks=4096,
    num_host_blocks=8,
    block_size=16,
    block_bytes=1 << 20,
    num_parameters=5_500_000,
    generation_defaults={},
    device="cpu",
)


def announced(info: ModelInfo, config: Config) -> str:
    screen = io.StringIO()
    announce(info, config, "http://127.0.0.1:8000", Console(file=screen, width=40))
    return screen.getvalue()


def test_the_announcement_shows_model_sizes_and_address() -> None:
    output = announced(TINY, Config())
    assert "tiny [1], 5.5 M parameters" in output
    assert "bfloat16 on cpu" in output
    assert "65,536 tokens in 4,096 blocks (4,096 MiB)" in output
    assert "http://127.0.0.1:8000 " in output
    assert "weights" not in output
    assert "speculation" not in output


def test_the_announcement_shows_what_was_asked_for() -> None:
    """What becomes of the weights and the cache, and speculation: else only measuring would."""
    info = replace(TINY, weight_bytes=3 << 20, quantization="int4 made while loading")
    output = announced(
        info, Config(kv_cache_dtype="int8", speculative_config=SpeculativeConfig(method="suffix"))
    )
    assert "weights  3 MiB, int4 made while loading" in output
    assert "(4,096 MiB, int8)" in output
    assert "speculation  suffix" in output


async def test_what_loading_left_is_frozen_while_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command alone: a server in another program leaves the program's heap as it is."""

    async def serve(*_: object, on_ready: Callable[[str], None]) -> int:
        assert gc.get_threshold()[0] == 0  # no collection
        on_ready("http://x")
        return 0 if gc.get_threshold() == COLLECT_AFTER and gc.get_freeze_count() > before else 1

    monkeypatch.setattr("streamer.server.lifecycle.serve", serve)
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        assert await _serve(Config(model="fake", log_format="json"), Console()) == 0
    finally:
        gc.set_threshold(*thresholds)


def test_doctor_says_that_a_port_is_in_use_not_missing() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        screen = io.StringIO()
        finding = port_free(Config(port=port))
        args = argparse.Namespace(config=None, config_port=port)
        assert doctor.run(args, Console(file=screen, width=200)) == 1
    assert (finding.state, finding.detail) == ("failing", f"127.0.0.1:{port} is in use")
    assert re.search(rf"^fails +port +127.0.0.1:{port} is in use", screen.getvalue(), re.MULTILINE)
    assert "--port" in finding.remedy
    assert port_free(Config(host="[::1]", port=0)).state == "good"
    assert port_free(Config(host="no.such.host.invalid", port=0)).state == "failing"
    assert port_free(Config(port=0)).state == "good"


@pytest.mark.parametrize("closed", [(1,), (0, 1, 2)])
def test_a_closed_standard_stream_is_no_abort_at_exit(closed: tuple[int, ...]) -> None:
    """uvloop aborts over a socket below 3; `subprocess` can't close these, so a shell does."""
    redirects = " ".join(f"{fd}{'>' if fd else '<'}&-" for fd in closed)
    words = f"{sys.executable} -m streamer generate hi --model fake:length=3"
    done = subprocess.run(
        ["/bin/sh", "-c", f"{words} {redirects}"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if 1 in closed else " 1 2 3\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no disk that is always full here")
def test_a_full_disk_is_an_error_without_a_traceback() -> None:
    words = [sys.executable, "-m", "streamer", "generate", "hi", "--model", "fake:length=3"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")
