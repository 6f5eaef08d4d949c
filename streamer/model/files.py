"""A checkpoint's files, read a tensor at a time into memory of its own.

Owns the open files while a model is loaded. They are read and not mapped: a file that is cut or
replaced meanwhile is an error here, where a mapping would end the process (SIGBUS), and no check of
its size beforehand changes that. It takes as long: 600 MB in tensors of 4 or 30 MB 0.02 to 0.03 s,
as copies out of a mapping do (page cache, 2 cores of an EPYC Zen 5, 2026-11-22), and one tensor's
bytes are in memory at a time. Called by loader.py.
"""

from __future__ import annotations

from contextlib import ExitStack
from io import FileIO
from pathlib import Path

import torch

from streamer.errors import ModelNotSupported
from streamer.model.checkpoint import TensorEntry


class WeightFiles:
    """The files in a folder, each opened when a tensor of it is first read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, FileIO] = {}
        self._stack = ExitStack()

    def close(self) -> None:
        """Close what was opened."""
        self._stack.close()

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The tensor's bytes, uint8 [bytes]; ModelNotSupported where the file has no such bytes."""
        found = torch.empty(entry.end - entry.start, dtype=torch.uint8)
        left = found.numpy().data
        try:
            file = self._open(entry.file)
            file.seek(entry.start)
            while left:  # a call reads at most 2 GiB
                count = file.readinto(left)
                if not count:
                    raise ModelNotSupported(
                        f"{entry.file} was cut while it was read", param="model"
                    )
                left = left[count:]
        except OSError as e:
            raise ModelNotSupported(f"{entry.file} can't be read: {e}", param="model") from e
        return found

    def _open(self, name: str) -> FileIO:
        if name not in self._files:
            self._files[name] = self._stack.enter_context(FileIO(self._folder / name))
        return self._files[name]
