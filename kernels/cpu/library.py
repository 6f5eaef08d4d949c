"""The native library: compiled from the C files beside this one on first use, cached, loaded.

Owns the choice of a compiler ($CC, then the system's, then the one in PyPI's ziglang; $CFLAGS come
last) and the cache folder; contains no op. Raises Unavailable, with the reason, where there is no
compiler or it fails.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
MAIN = "team.c"
FLAGS = ["-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread"]
FLAGS += ["-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]


class Unavailable(Exception):
    """There is no native library on this machine; the message says why."""


def load() -> ctypes.CDLL:
    """The library for this CPU, from the cache or compiled now (GCC 12: 15 s on an EPYC Zen 4)."""
    if sys.platform == "win32":
        raise Unavailable("the native kernels need POSIX threads")
    command = [*_compiler(), *FLAGS, _native_flag(), *shlex.split(os.environ.get("CFLAGS", ""))]
    folder, prefix = _cache_folder(), "streamer-kernels-"
    try:
        if folder is not None:
            return _load(command, folder, "once")
        with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as own:
            return _load(command, Path(own), "at each start: there is no cache folder to write to")
    except (OSError, subprocess.TimeoutExpired) as e:  # a full disk, too
        raise Unavailable(f"the kernels can't be compiled or loaded: {e}") from e


def _load(command: list[str], folder: Path, when: str) -> ctypes.CDLL:
    """The library from the folder, which may be deleted once it is loaded."""
    key = _key(command)
    path = _cached(folder, key)
    if path is None:
        logger.info("compiling the kernels for this CPU, %s: some 15 seconds", when)
        path = _compile(command, folder, key)
    return ctypes.CDLL(str(path))


def _cached(folder: Path, key: str) -> Path | None:
    """A complete library that only this user can write. Other files of its name are deleted: a
    truncated one would end the process when mapped, an empty one would keep torch's backend in use.
    """
    for path in sorted(folder.glob(f"kernels-{key}-*.so")):
        try:
            if _is_private(path.lstat()) and path == _named(folder, key, path):
                return path
        except OSError:  # gone, or not to be read
            pass
        logger.warning("%s is damaged or another user's: compiling it again", path)
        path.unlink(missing_ok=True)
    return None


def _named(folder: Path, key: str, content: Path) -> Path:
    """Path of a library of this content, whose digest is in the name."""
    digest = hashlib.blake2b(content.read_bytes(), digest_size=16).hexdigest()
    return folder / f"kernels-{key}-{digest}.so"


def _is_private(about: os.stat_result) -> bool:
    """Whether the owner is this user and no other user may write."""
    return about.st_uid == os.getuid() and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _compiler() -> list[str]:
    named = os.environ.get("CC")
    if named:
        return shlex.split(named)
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return [found]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise Unavailable("there is no C compiler: install one, or `pip install ziglang`")


def _native_flag() -> str:
    """The compiler's flag for all instructions of this CPU."""
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _key(command: list[str]) -> str:
    """A digest of the sources, the compiler, its flags and the CPU."""
    digest = hashlib.blake2b(digest_size=16)
    for source in sorted(FOLDER.glob("*.[ch]")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join(command).encode())
    compiler = Path(shutil.which(command[0]) or command[0])
    if compiler.exists():
        about = compiler.stat()
        digest.update(f"{about.st_size} {about.st_mtime_ns} {platform.machine()}".encode())
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        prefixes = ("flags", "Features", "model name")
        lines = {x for x in cpuinfo.read_text().splitlines() if x.startswith(prefixes)}
        digest.update("\n".join(sorted(lines)).encode())
    return digest.hexdigest()


def _cache_folder() -> Path | None:
    """A folder that only this user can write to, if there is one: its libraries are executed."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = root / "streamer" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_private(folder.stat()) and os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # the latter from a user without a home
        pass
    return None


def _compile(command: list[str], folder: Path, key: str) -> Path:
    """Compile under another name, renamed once the file is on the disk: no process sees half a
    library.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        half = Path(scratch) / "kernels.so"
        command = [*command, str(FOLDER / MAIN), "-o", str(half), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise Unavailable(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
        half.chmod(0o700)  # whatever the umask
        with half.open("rb") as written:
            os.fsync(written.fileno())
        return half.replace(_named(folder, key, half))
