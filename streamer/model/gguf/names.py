"""Names of GGUF files: the parts of a split model, and the file of a quantization in a repository.

Pure functions. Called by checkpoint.py of this folder and by build.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from streamer.errors import ConfigError, ModelNotSupported

SPLIT = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
MAX_FILES = 1000  # of one model; those of a terabyte have some 30


class Part(NamedTuple):
    """What the name of a split model's file says: file `number` of 1 to `num_files`."""

    model: str
    number: int
    num_files: int


def split_files(name: str) -> list[str]:
    """The names of all files of a model of which `name` is one, in order.

    ModelNotSupported where they are more than MAX_FILES.
    """
    part = _part(name)
    if part is None:
        return [name]
    model, _, count = part
    if count > MAX_FILES:
        raise ModelNotSupported(
            f"{name} is one of {count} files of a model; at most {MAX_FILES} are read",
            param="model",
        )
    return [f"{model}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]


def model_name(file: str) -> str:
    """`Qwen3-8B-Q4_K_M` of `Qwen3-8B-Q4_K_M-00001-of-00002.gguf`."""
    part = _part(file)
    return file.removesuffix(".gguf") if part is None else part.model


def models_of(listed: Iterable[str]) -> list[str]:
    """The GGUF files that are models, of split ones the first."""
    return [f for f in sorted(listed) if f.endswith(".gguf") and _is_first(f) and _is_model(f)]


def choose_file(listed: Iterable[str], repository: str, selector: str) -> str:
    """The file of a repository for `selector`: a quantization such as Q4_K_M, or a file's name.

    Of a split model its first. ConfigError where there is none, or more than one.
    """
    files = models_of(listed)
    ends = re.compile(rf"(?:.*[-._/])?{re.escape(selector)}", re.I)
    found = [f for f in files if f == selector]
    found = found or [
        f for f in files if any(map(ends.fullmatch, (model_name(f), f.removesuffix(".gguf"))))
    ]
    if len(found) == 1:
        return found[0]
    if not files:
        raise ConfigError(f"{repository} has no GGUF files", param="model")
    names = ", ".join(found or files)
    what = f"{len(found)} files for {selector}, name one" if found else f"no {selector}, but"
    raise ConfigError(f"{repository} has {what}: {names[:2000]}", param="model")


def files_of(first: str, listed: Iterable[str], repository: str) -> list[str]:
    """All files of the model whose first file is `first`; ConfigError names one that is missing."""
    files, there = split_files(first), set(listed)
    if missing := [name for name in files if name not in there]:
        raise ConfigError(
            f"{repository} lacks {len(missing)} of {len(files)} files: {', '.join(missing[:8])} "
            "(on the hub, or in the cache if the hub can't be reached)",
            param="model",
        )
    return files


def _part(name: str) -> Part | None:
    """What a name says of a split model's file; None for a whole model's, and for no such file."""
    match = SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return None
    return Part(match[1], int(match[2]), int(match[3]))


def _is_first(file: str) -> bool:
    part = _part(file)
    return part is None or part.number == 1


def _is_model(file: str) -> bool:
    """Not the projector of a vision model, nor the statistics of its quantization."""
    name = file.rsplit("/", 1)[-1].lower()
    return not name.startswith(("mmproj", "imatrix"))
