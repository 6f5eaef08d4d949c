"""The package's public names: what a program imports from `streamer`, and what it loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streamer
from streamer import errors


def test_outputs_and_every_error_are_exported() -> None:
    family = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.StreamerError)
    }
    assert {"Output", "Completion", "Usage", "Delta", *family} <= set(streamer.__all__)
    for name in streamer.__all__:
        assert getattr(streamer, name) is not None
    assert streamer.Overloaded is errors.Overloaded
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = streamer.Nothing


def test_names_load_neither_torch_nor_each_other() -> None:
    script = (
        "import sys, streamer; dir(streamer)\n"
        "assert not [m for m in sys.modules if m.startswith('streamer.')]\n"
        "from streamer import Output, Completion, Overloaded\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
