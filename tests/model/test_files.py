"""WeightFiles: tensors out of files that may change while they are read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from streamer.errors import ModelNotSupported
from streamer.model.checkpoint import TensorEntry
from streamer.model.files import WeightFiles

ENTRY = TensorEntry("t", "U8", (8000,), "a.bin", 4, 8004)


def test_a_tensor_is_its_bytes_and_memory_of_its_own(tmp_path: Path) -> None:
    raw = bytes(range(256)) * 40
    (tmp_path / "a.bin").write_bytes(raw)
    with closing(WeightFiles(tmp_path)) as files:
        found = files.read(ENTRY)
    (tmp_path / "a.bin").write_bytes(bytes(len(raw)))
    assert bytes(found.tolist()) == raw[4:8004]


def test_a_file_cut_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    """Of a mapping, the pages that are gone would end the process (SIGBUS)."""
    file = tmp_path / "a.bin"
    file.write_bytes(bytes(10_000))
    with closing(WeightFiles(tmp_path)) as files:
        assert torch.equal(files.read(ENTRY), torch.zeros(8000, dtype=torch.uint8))
        file.write_bytes(bytes(100))
        with pytest.raises(ModelNotSupported, match=r"a\.bin was cut while it was read"):
            files.read(ENTRY)


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with (
        closing(WeightFiles(tmp_path)) as files,
        pytest.raises(ModelNotSupported, match="No such file"),
    ):
        files.read(ENTRY)
