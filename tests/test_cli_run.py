"""The commands as they run: with the fake model in process, as a server, and with a checkpoint."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamer.cli import main
from streamer.demo import CHECKPOINT
from streamer.errors import StreamerError
from tests.checkpoints import make_checkpoint

DEADLINE_S = 60.0


def numbers(text: str) -> list[int]:
    """The numbers in the fake model's answer; fails unless they count up."""
    found = [int(word) for word in text.split()]
    assert found
    assert found == list(range(found[0], found[0] + len(found)))
    return found


def test_generate_streams_the_answer_alone_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--model", "fake", "--max-tokens", "12"]) == 0
    output = capsys.readouterr()
    assert len(numbers(output.out)) == 12
    assert "12 tokens" in output.err
    assert "first token" in output.err
    assert "ended: length" in output.err


def test_generate_without_a_chat_template_names_raw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not a server's ways to give it one."""
    folder = Path(shutil.copytree(CHECKPOINT, tmp_path / "m"))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    words = ["--model", str(folder), "--max-tokens", "2", "--num-gpu-blocks-override", "8"]
    assert main(["generate", "hello", *words, "--max-model-len", "64"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "no chat template: --chat-template FILE gives it one" in said
    assert "`streamer generate --raw` continues plain text" in said
    assert main(["generate", "hello", "--raw", *words, "--max-model-len", "64"]) == 0


def test_generate_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--raw", "--model", "fake:length=3"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("a b c"))
    assert main(words) == 0
    assert len(numbers(capsys.readouterr().out)) == 3
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main([*words, "-"]) == 2
    assert "PROMPT is empty" in capsys.readouterr().err


def test_chat_in_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = iter(["hi", "again"])

    def read(*_: object) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", "fake:length=4", "--system", "count"]) == 0
    screen = capsys.readouterr().out
    assert "/help lists commands" in screen
    assert "Ctrl-D" in screen
    answers = re.findall(r"(?:\d+ ){2,}\d+", screen)
    assert [len(numbers(answer)) for answer in answers] == [4, 4]


def test_a_missing_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--model", "./absent"]) == 1
    output = capsys.readouterr().err
    assert "there is no folder or file ./absent" in output
    assert "Traceback" not in output


@contextmanager
def server(*words: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`streamer serve` on any free port: the process, its URL, and what it announced."""
    process = subprocess.Popen(
        [sys.executable, "-m", "streamer", "serve", *words, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        is_json = "json" in words
        announced = ""
        for line in process.stderr if is_json else process.stdout:  # ends when the process ends
            announced += line
            if ('"started"' if is_json else "serving on") in line:
                break
        found = re.search(r'http://[^\s"]+', announced)
        assert found, process.communicate(timeout=DEADLINE_S)
        yield process, found[0], announced
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_S)


def test_serve_says_what_it_serves_streams_and_drains() -> None:
    with server("fake:length=5", "--served-model-name", "counter") as (process, url, announced):
        assert re.search(r"model +counter", announced)
        assert re.search(r"KV cache +[\d,]+ tokens", announced)
        body = {"model": "counter", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            lines = [line.decode() for line in answer]
        events = [json.loads(x[6:]) for x in lines if x.startswith("data: {")]
        text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events)
        assert len(numbers(text)) == 5
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=DEADLINE_S) == 0
        assert process.stderr is not None
        output = process.stderr.read()
        assert f"started url={url} model=counter load_s=" in output
        assert "draining streams=0 timeout_s=10.0" in output
        assert "stopped exit_code=0" in output
        assert "Traceback" not in output


def test_every_line_of_a_json_server_is_an_object() -> None:
    """From its start to its end, a refusal included; nothing goes to standard output."""
    words = ["fake", "--log-format", "json"]
    with server(*words) as (process, url, announced):
        request = urllib.request.Request(
            f"{url}/v1/completions", b'{"prompt": "x", "max_tokens": -1}'
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=DEADLINE_S)
        refused.value.close()
        taken = url.rsplit(":", 1)[1]
        second = subprocess.run(
            [sys.executable, "-m", "streamer", "serve", *words, "--port", taken],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        process.terminate()
        out, err = process.communicate(timeout=DEADLINE_S)
    (started,) = (json.loads(line) for line in announced.splitlines())
    output = [json.loads(line) for line in err.splitlines()]
    assert (started["message"], started["url"]) == ("started", url)
    assert [line["message"] for line in output] == ["refused", "draining", "stopped"]
    assert (output[0]["status"], output[0]["param"]) == (400, "max_tokens")
    assert (second.returncode, second.stdout) == (1, "")
    (line,) = (json.loads(line) for line in second.stderr.splitlines())
    assert (line["level"], out) == ("critical", "")
    assert f"cannot listen on 127.0.0.1:{taken}" in line["message"]


def test_a_server_serves_on_if_its_announcement_is_not_read() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    words = [sys.executable, "-m", "streamer", "serve", "fake", "--port", "0"]
    with subprocess.Popen(words, stdout=write_end, stderr=subprocess.PIPE, text=True) as process:
        os.close(write_end)
        assert process.stderr is not None
        try:
            found = re.search(r"url=(\S+)", process.stderr.readline())
            assert found
            with urllib.request.urlopen(f"{found[1]}/health", timeout=DEADLINE_S) as answer:
                assert answer.status == 200
        finally:
            process.terminate()
        process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0


def test_output_to_a_pipe_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    model = "./" + "absent " * 30
    assert main(["generate", "hi", "--model", model]) == 1
    assert f"there is no folder or file {model}\n" in capsys.readouterr().err


def test_generate_and_serve_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server("fake:length=6", "--api-key", "k1") as (_, url, _):
        assert main(["generate", "hi", "--url", url, "--key", "k1"]) == 0
        output = capsys.readouterr()
        assert len(numbers(output.out)) == 6
        assert "tokens/s" in output.err
        assert main(["generate", "hi", "--url", url, "--key", "wrong"]) == 1
        output = capsys.readouterr()
        assert "the API key is not known here (--key gives one)" in " ".join(output.err.split())
        assert "Traceback" not in output.err
        monkeypatch.setenv("STREAMER_API_KEY", "k1")
        assert main(["generate", "hi", "--url", url]) == 0


def test_piped_lines_without_an_answer_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise StreamerError("not now")

    monkeypatch.setattr("streamer.cli.talk.InProcess.answer", fail)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "fake"]) == 1
    assert "not now" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", "fake"]) == 0


def test_chat_without_a_server_says_so_before_it_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal too, so that nothing is typed in vain."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
    assert main(["chat", "--url", "127.0.0.1:9"]) == 1
    output = capsys.readouterr()
    assert "127.0.0.1:9" in output.err
    assert output.out == ""


def test_new_after_an_answer_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n/new\n"))
    assert main(["chat", "fake:length=2"]) == 0
    assert "forgotten" in capsys.readouterr().out


def test_a_port_in_use_is_an_error_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    with server("fake") as (_, url, _):
        taken = url.rsplit(":", 1)[1]
        done = subprocess.run(
            [sys.executable, "-m", "streamer", "serve", "fake", "--port", taken],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{taken}" in " ".join(done.stderr.split())


def test_info_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINT / name, folder)
    assert main(["info", str(folder), "--dtype", "float32", "--max-num-seqs", "2"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM, served by the engine's own decoder" in output
    assert re.search(r"parameters [\d,]+, 0\.\d MiB stored as F32", output)
    assert "768 bytes a token, 12,288 a block of 16" in output  # 3 layers x K, V x 2 heads x 16 x 4
    assert "1,024 tokens in 64 blocks" in output  # two sequences of 512
    (folder / "tokenizer.json").unlink()
    assert main(["info", str(folder)]) == 1
    assert "has no tokenizer.json" in capsys.readouterr().out


def test_info_of_a_refused_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path)]) == 1
    assert "refused" in capsys.readouterr().out
    assert main(["info", "fake"]) == 2
