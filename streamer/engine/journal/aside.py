"""Aside: journal files that could not be used, kept for people to look into, and how many; and how
a new one takes the place of one, whenever the process dies.

Renames and deletes in the journal's folder, and reads none of the files, which have prompts. Called
by store.py while it has the folder's lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Final

BESIDE: Final = ("-wal", "-shm", "-journal")  # files that SQLite has beside its file
NEW: Final = "-new"  # what could be read of a damaged file, until that one is set aside
MAX_ASIDE: Final = 4  # each may be as large as a journal
_AT: Final = re.compile(rf"(\.\d{{8}}-\d{{6}}-[0-9a-f]{{4}})({'|'.join(BESIDE)})?")

log = logging.getLogger(__name__)


def set_aside(path: Path, why: str) -> None:
    """Rename the journal's file, so that the next one begins empty, and say so."""
    kept = _name_aside(path)
    path.rename(kept)
    _move_beside(path, kept)
    log.error("the journal %s %s: it is kept as %s, and a new one begun", path, why, kept)
    bound_aside(path, kept)


def take_place(path: Path) -> None:
    """Finish what this process has begun, or one that died: a new file takes the place of one that
    was set aside. Where that one is still there, the new one may not be whole and is deleted."""
    new = Path(f"{path}{NEW}")
    if path.exists():
        if new.exists():
            new.unlink()
        return
    _move_beside(path, _name_aside(path))  # SQLite would take the old one's log for the new one's
    if new.exists():
        sync_folder(path.parent)
        new.rename(path)
        sync_folder(path.parent)
        log.warning("the journal %s has what could be read of the one that was set aside", path)


def sync_folder(folder: Path) -> None:
    """Have names on disk before what follows; a file system that can't is used as it is."""
    with contextlib.suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _name_aside(path: Path) -> Path:
    return Path(f"{path}.{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")


def _move_beside(path: Path, kept: Path) -> None:
    for suffix in BESIDE:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{suffix}").rename(f"{kept}{suffix}")


def bound_aside(path: Path, newest: Path | None = None) -> None:
    """Keep the newest MAX_ASIDE that were set aside, for their user alone; delete older ones.

    newest  is kept whatever the clock said when it was named
    """
    try:
        found = _found(path)
        for kept in sorted(found, key=lambda kept: (kept == newest, kept))[:-MAX_ASIDE]:
            for file in found.pop(kept):
                file.unlink()
            log.warning("%s is deleted: of those set aside %d are kept", kept, MAX_ASIDE)
        for files in found.values():
            for file in files:
                file.chmod(0o600)
    except OSError as e:
        log.error("%s: those set aside before are left as they are: %s", path, e)


def _found(path: Path) -> dict[Path, list[Path]]:
    """The files of each that was set aside: plain ones of this user alone."""
    found: dict[Path, list[Path]] = {}
    for file in path.parent.glob(f"{path.name}.*"):
        match, about = _AT.fullmatch(file.name.removeprefix(path.name)), file.lstat()
        is_own = about.st_uid == os.geteuid() and about.st_nlink == 1
        if match and stat.S_ISREG(about.st_mode) and is_own:
            found.setdefault(Path(f"{path}{match[1]}"), []).append(file)
    return found
