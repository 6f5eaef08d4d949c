"""Names of GGUF files: the parts of a split model, and the file of a quantization in a repository.

Pure functions. Called by checkpoint.py of this folder and by build.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from streamer.errors import ConfigError

SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def split_files(name: str) -> list[str]:
    """The names of all files of a model of which `name` is one, in order."""
    match = SPLIT.fullmatch(name)
    if match is None:
        return [name]
    return [f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]


def model_name(file: str) -> str:
    """`Qwen3-8B-Q4_K_M` of `Qwen3-8B-Q4_K_M-00001-of-00002.gguf`."""
    match = SPLIT.fullmatch(file)
    return file.removesuffix(".gguf") if match is None else match[1]


def choose_file(listed: Iterable[str], repository: str, selector: str) -> str:
    """The file of a repository for `selector`: a quantization such as Q4_K_M, or a file's name.

    Of a split model its first. ConfigError where there is none, or more than one.
    """
    files = [
        f for f in sorted(listed) if f.endswith(".gguf") and f == split_files(f)[0] and _is_model(f)
    ]
    ends = re.compile(rf"(?:.*[-._/])?{re.escape(selector)}(?:-\d{{5}}-of-\d{{5}})?\.gguf", re.I)
    found = [f for f in files if f == selector] or [f for f in files if ends.fullmatch(f)]
    if len(found) == 1:
        return found[0]
    if not files:
        raise ConfigError(f"{repository} has no GGUF files", param="model")
    names = ", ".join(found or files)
    what = f"{len(found)} files for {selector}, name one" if found else f"no {selector}, but"
    raise ConfigError(f"{repository} has {what}: {names[:2000]}", param="model")


def _is_model(file: str) -> bool:
    """Not the projector of a vision model, nor the statistics of its quantization."""
    name = file.rsplit("/", 1)[-1].lower()
    return not name.startswith(("mmproj", "imatrix"))
