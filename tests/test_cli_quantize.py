"""`streamer quantize`: what it says and writes, and the command lines that it refuses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from streamer.cli import main
from streamer.demo import CHECKPOINT
from streamer.model.inspect import inspect_checkpoint


def test_the_bundled_model_in_eight_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "eight"
    assert main(["quantize", str(CHECKPOINT), "--to", "int8", "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "compressed-tensors, 8 bits, a scale for each output" in said
    assert (
        "9.60 bits a weight in the file with what stays as it is: embeddings and the last" in said
    )
    assert f"`streamer serve {out}` serves it" in said
    assert inspect_checkpoint(out).refused == ""
    assert (out / "tokenizer.json").read_bytes() == (CHECKPOINT / "tokenizer.json").read_bytes()
    assert main(["quantize", str(CHECKPOINT), "--to", "int8", "--out", str(out)]) == 1
    assert "is there already" in capsys.readouterr().err


def test_without_a_model_it_is_the_bundled_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["quantize", "--to", "int8", "--out", str(tmp_path / "eight")]) == 0
    assert capsys.readouterr().out.startswith("the bundled model in ")


def test_groups_of_other_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A matrix whose inputs are no multiple of them stays dense, and is named."""
    words = ["quantize", str(CHECKPOINT), "--to", "int4", "--group-size"]
    assert main([*words, "64", "--out", str(tmp_path / "64")]) == 0
    assert "4 bits, groups of 64, zero points" in " ".join(capsys.readouterr().out.split())
    assert main([*words, "128", "--out", str(tmp_path / "128")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 bits, groups of 128, zero points" in said
    assert "6 matrices stay dense" in said
    assert inspect_checkpoint(tmp_path / "128").refused == ""


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--to", "int8", "--calibration", "text"], "--calibration: int8 loses next to nothing"),
        (["--to", "fp8", "--group-size", "64"], "--group-size: fp8 has a scale for each output"),
        (["--to", "int4", "--group-size", "48"], "invalid choice: 48"),
        (
            ["--to", "int4", "--calibration", "missing"],
            "--calibration missing: No such file or directory; it is the path of",
        ),
        (["--to", "int3"], "invalid choice"),
        ([], "--to"),
    ],
)
def test_wrong_command_lines(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and nothing is written."""
    out = tmp_path / "out"
    assert main(["quantize", str(CHECKPOINT), "--out", str(out), *words]) == 2
    assert says in capsys.readouterr().err
    assert not out.exists()


def test_a_pipe_is_no_calibration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Opening it would wait for a writer that may never come."""
    os.mkfifo(pipe := tmp_path / "pipe")
    words = ["--to", "int4", "--out", str(tmp_path / "out"), "--calibration", str(pipe)]
    assert main(["quantize", str(CHECKPOINT), *words]) == 2
    assert "it is no regular file" in " ".join(capsys.readouterr().err.split())
