"""WeightFiles: tensors out of files that may change while they are read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from streamer.errors import ModelNotSupported
from streamer.model.checkpoint import TensorEntry
from streamer.model.files import Reused, WeightFiles

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


def test_a_large_tensor_is_read_by_several_threads(tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (3_000_001,), dtype=torch.uint8)
    (tmp_path / "a.bin").write_bytes(raw.numpy().tobytes())
    with closing(WeightFiles(tmp_path)) as files:
        for start, end in ((1, 3_000_001), (7, 1_048_576 + 7), (5, 2_000_000)):
            entry = TensorEntry("t", "U8", (end - start,), "a.bin", start, end)
            assert torch.equal(files.read(entry), raw[start:end])
        with pytest.raises(ModelNotSupported, match=r"a\.bin was cut while it was read"):
            files.read(TensorEntry("t", "U8", (3_000_000,), "a.bin", 1000, 3_001_000))


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with (
        closing(WeightFiles(tmp_path)) as files,
        pytest.raises(ModelNotSupported, match="No such file"),
    ):
        files.read(ENTRY)


def lending() -> Reused:
    """Memory as it is since the first layer."""
    memory = Reused()
    memory.shrink()
    return memory


def test_memory_is_lent_again_when_no_tensor_has_it_left() -> None:
    memory = lending()
    first = memory.empty(1 << 20)
    address, view = first.data_ptr(), first.view(torch.int32)[5:]
    del first
    second = memory.empty(1 << 20)
    assert second.data_ptr() != address  # a view is left
    del view
    third = memory.empty((1 << 20) - 100)
    assert third.data_ptr() == address
    assert memory.empty(1 << 19).data_ptr() != second.data_ptr()


def test_what_is_lent_is_little_larger_than_a_tensor() -> None:
    """A tensor that is kept, as some backends keep dense ones, keeps all of it."""
    memory = lending()
    address = memory.empty(1 << 20).data_ptr()
    assert memory.empty(3 << 18).data_ptr() != address
    assert memory.empty(15 << 16).data_ptr() == address


def test_what_precedes_the_layers_is_let_go_at_once() -> None:
    """An embedding of 1 GB would else be there beside its codes, its panels and two layers."""
    memory = Reused()
    memory.empty(1 << 20)
    assert not memory._free


def test_a_tensor_that_a_model_keeps_keeps_no_other_memory(tmp_path: Path) -> None:
    """What tensors return to held the blocks of the last layer for as long as the embedding was."""
    (tmp_path / "a.bin").write_bytes(bytes(1 << 20))
    files = WeightFiles(tmp_path)
    files.memory.shrink()
    sizes = (1 << 20, 1 << 17)
    kept, other = (files.read(TensorEntry("t", "U8", (n,), "a.bin", 0, n)) for n in sizes)
    del other
    assert len(files.memory._free) == 1
    files.close()
    assert not files.memory._free
    del kept
    assert not files.memory._free


def test_a_tensor_of_no_bytes_is_read(tmp_path: Path) -> None:
    """A scheme refuses it, where the file is to blame."""
    (tmp_path / "a.bin").write_bytes(b"1234")
    with closing(WeightFiles(tmp_path)) as files:
        assert len(files.read(TensorEntry("t", "U8", (0,), "a.bin", 4, 4))) == 0


def test_memory_that_was_not_lent_meanwhile_is_let_go() -> None:
    memory = lending()
    memory.empty(1 << 20)
    memory.shrink()
    assert len(memory._free) == 1  # it was, before the first call
    memory.shrink()
    assert not memory._free
