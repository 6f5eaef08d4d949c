"""The commands as they run: with the fake model in process, as a server, and with a checkpoint."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamer.cli import main
from tests.checkpoints import make_checkpoint

DEADLINE_S = 60.0


def numbers(text: str) -> list[int]:
    """The fake model's answer, which counts; fails unless it does."""
    found = [int(word) for word in text.split()]
    assert found
    assert found == list(range(found[0], found[0] + len(found)))
    return found


def test_generate_streams_the_answer_alone_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hello", "--model", "fake", "--max-tokens", "12"]) == 0
    told = capsys.readouterr()
    assert len(numbers(told.out)) == 12
    assert "12 tokens" in told.err
    assert "first token" in told.err
    assert "ended: length" in told.err


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
    answers = re.findall(r"(?:\d+ ){2,}\d+", capsys.readouterr().out)
    assert [len(numbers(answer)) for answer in answers] == [4, 4]


def test_a_model_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--model", "./absent"]) == 1
    told = capsys.readouterr().err
    assert "there is no folder ./absent" in told
    assert "Traceback" not in told


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
        announced = ""
        for line in process.stdout:  # ends with the process, if it never gets there
            announced += line
            if "serving on" in line:
                break
        found = re.search(r"http://\S+", announced)
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
        assert "Traceback" not in process.stderr.read()


def test_generate_and_serve_meet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with server("fake:length=6", "--api-key", "k1") as (_, url, _):
        assert main(["generate", "hi", "--url", url, "--key", "k1"]) == 0
        told = capsys.readouterr()
        assert len(numbers(told.out)) == 6
        assert "tokens/s" in told.err
        assert main(["generate", "hi", "--url", url, "--key", "wrong"]) == 1
        told = capsys.readouterr()
        assert "the API key is not known here (--key gives one)" in " ".join(told.err.split())
        assert "Traceback" not in told.err
        monkeypatch.setenv("STREAMER_API_KEY", "k1")
        assert main(["generate", "hi", "--url", url]) == 0


def test_piped_lines_without_an_answer_are_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert main(["chat", "--url", "127.0.0.1:9"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().out


def test_a_taken_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
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
    assert main(["info", str(folder), "--dtype", "float32", "--max-num-seqs", "2"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "LlamaForCausalLM, served by the engine's own decoder" in told
    assert "768 bytes a token, 12,288 a block of 16" in told  # 3 layers x K, V x 2 heads x 16 x 4
    assert "1,024 tokens in 64 blocks" in told  # two sequences of 512


def test_info_of_a_refused_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path)]) == 1
    assert "refused" in capsys.readouterr().out
    assert main(["info", "fake"]) == 2
