"""Folder: where a journal is: made, checked for what another user may have put there, and locked.

The lock is a file of its own, so that it outlives each closing of the journal's: Store has it from
before anything else is opened until it is closed itself. Opens none of the journal's files.
"""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from io import FileIO
from pathlib import Path
from typing import Final

from streamer.engine.journal.aside import BESIDE, NEW
from streamer.errors import ConfigError, JournalInUse

try:
    import fcntl
except ImportError:  # Windows: SQLite's own lock alone keeps a second server out
    fcntl = None  # type: ignore[assignment]

FILE: Final = "journal.sqlite"
LOCK: Final = "journal.lock"  # never deleted: whoever has it open would hold another one's lock
FILES: Final = (LOCK, *(f"{FILE}{new}{suffix}" for new in ("", NEW) for suffix in ("", *BESIDE)))


_open_locks: weakref.WeakSet[FileIO] = weakref.WeakSet()


def _close_copies() -> None:
    """In a child that was forked alone: what its parent holds is not held by it."""
    for file in [*_open_locks]:
        file.close()


if fcntl is not None:
    os.register_at_fork(after_in_child=_close_copies)


class Lock:
    """The folder is this process's: until released, or the process ends or becomes another program.

    A child has none of it, whether it runs a program (close-on-exec) or was forked alone.
    """

    def __init__(self, folder: Path) -> None:
        self._file = open(folder / LOCK, "ab", buffering=0, opener=_open)  # noqa: SIM115
        try:
            if fcntl is not None:
                _open_locks.add(self._file)
                os.fchmod(self._file.fileno(), 0o600)
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._file.close()
            raise in_use(folder) if isinstance(e, BlockingIOError) else e from None

    def release(self) -> None:
        """Let others have it; a second time is nothing."""
        if fcntl is not None and not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # also of a child that has not run yet
        self._file.close()


def _open(path: str, flags: int) -> int:
    if fcntl is not None:  # what was planted since the check is neither followed nor waited for
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    return os.open(path, flags, 0o600)


def take(folder: Path) -> Lock:
    """Make the folder if it is not there, and have it alone; ConfigError where that can't be."""
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
        check_own(folder)
        return Lock(folder)
    except OSError as e:
        raise unusable(folder, e) from e


def check_own(folder: Path) -> None:
    """Raise ConfigError unless the folder and its files are such as other users can't have made.

    A link to the folder is followed; one in the place of a file is not.
    """
    about = folder.stat()
    if about.st_uid not in (0, os.geteuid()):
        raise _foreign(folder, f"belongs to user {about.st_uid}, not to {os.geteuid()}")
    if about.st_mode & stat.S_IWOTH:
        raise _foreign(folder, "is a folder that every user may write to")
    for name in FILES:
        path = folder / name
        with contextlib.suppress(FileNotFoundError):
            about = path.lstat()
            if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
                raise _foreign(path, "is a link or no plain file")
            if about.st_uid != os.geteuid():
                raise _foreign(path, f"belongs to user {about.st_uid}, not to {os.geteuid()}")
            # Kubernetes lets a volume's group (fsGroup) write to every file when it mounts it.
            if about.st_mode & stat.S_IWOTH:
                raise _foreign(path, "may be written by other users")


def _foreign(path: Path, why: str) -> ConfigError:
    return ConfigError(f"journal: {path} {why}: it is not read", param="journal")


def in_use(folder: Path) -> JournalInUse:
    """The error for a folder that another process has."""
    return JournalInUse(
        f"journal: another server uses {folder}; each needs a folder of its own", param="journal"
    )


def unusable(folder: Path, error: BaseException) -> ConfigError:
    """The error for a folder that the journal can't be in."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return ConfigError(f"journal: {folder} can't be used: {why}", param="journal")
