"""Store: the journal's file, SQLite in WAL mode: opened for one server, read, written, set aside.

Three tables: `requests` (an Accepted each), `parts` (of one request), `steps` (of all of them,
until their tokens are in parts). Used on one thread at a time. Raises sqlite3.Error and OSError
where the disk fails, ConfigError where the folder can't be used at all.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from streamer.engine.journal.aside import NEW, bound_aside, set_aside, sync_folder, take_place
from streamer.engine.journal.folder import FILE, check_own, in_use, take, unusable
from streamer.engine.journal.records import (
    Accepted,
    Part,
    Saved,
    Step,
    Tail,
    add_step,
    pack,
    unpack,
)
from streamer.errors import ConfigError

VERSION: Final = 2
APPLICATION: Final = 0x5374726D  # "Strm"
WAL_BYTES: Final = 16 << 20  # what the log keeps of its size when it is written back
# Free pages that a file keeps at least: what one burst needed the next one takes again.
SPARE_BYTES: Final = 16 << 20
# What may be written anew to give pages back while the server runs, in which nothing is accepted:
# twice, and a request that comes then has WAIT_S, which a disk of 1 MB/s must keep.
MOVED_BYTES: Final = 4 << 20
START_MOVED_BYTES: Final = 128 << 20  # at a start: 0.9 s, and as much memory
MAX_NUMBER: Final = 1 << 53  # of anything counted; a larger one is damage
MAX_ROWS: Final = 64  # of a statement; each number of them is compiled once
SCHEMA: Final = (  # a file with anything else in it, such as a trigger, is none of ours
    "CREATE TABLE about (name TEXT PRIMARY KEY, value BLOB)",
    "CREATE TABLE requests (id TEXT PRIMARY KEY, data BLOB, tries INTEGER, tokens INTEGER)",
    "CREATE TABLE parts (id TEXT, number INTEGER, data BLOB)",
    "CREATE INDEX parts_by_id ON parts (id)",
    "CREATE TABLE steps (number INTEGER PRIMARY KEY, data BLOB)",
)
DISK: Final = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
)
_ACCEPTED = msgspec.msgpack.Decoder(Accepted)
_PART = msgspec.msgpack.Decoder(Part)
_STEP = msgspec.msgpack.Decoder(Step)
_Row = tuple[str | bytes | int, ...]
_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Store:
    """An open journal; no other process has it open.

    epoch  a name that the journal has from its first start on
    has_deleted  what was deleted may be in SQLite's log yet, until erased
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.epoch = ""
        self._number = 0  # of the last step or part
        self._is_full: bool | None = None  # whether commits wait for the disk
        self._new: list[_Row] = []  # of this transaction: requests, and
        self._new_parts: list[_Row] = []
        self._gone: dict[str, None] = {}
        self._is_damaged = False
        self._can_shrink = True
        self.has_deleted = False
        self._lock = take(folder)
        try:
            take_place(folder / FILE)
            self._db = self._connect()
        except OSError as e:
            self._lock.release()
            raise unusable(folder, e) from e
        except BaseException:
            self._lock.release()
            raise
        bound_aside(folder / FILE)

    # ------------------------------------------------------------ opening

    def _connect(self) -> sqlite3.Connection:
        path = self.folder / FILE
        db: sqlite3.Connection | None = None
        try:
            db = self._open(path)
            self._prepare(db)
            return db
        except ConfigError:
            _close(db)
            raise
        except sqlite3.DatabaseError as e:
            _close(db)
            if _code(e) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise in_use(self.folder) from None  # one that knows nothing of the folder's lock
            if _code(e) in DISK or not os.access(path, os.W_OK):
                raise unusable(self.folder, e) from e
            set_aside(path, f"can't be read ({e})")
            return self._connect()

    def _open(self, path: Path) -> sqlite3.Connection:
        # Not opened where it exists: closing it would undo this process's lock on it.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        check_own(self.folder)
        path.chmod(0o600)
        self._is_full = None
        db = sqlite3.connect(path, timeout=0.0, isolation_level=None, check_same_thread=False)
        # A damaged id costs its row, and not all that come after it.
        db.text_factory = lambda text: text.decode(errors="replace")
        return db

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Lock the file, make the tables of a new one, and let it have a log."""
        self._make_tables(db)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA journal_size_limit = {WAL_BYTES}")
        db.execute("PRAGMA secure_delete = ON")  # what was deleted is overwritten
        found = db.execute("SELECT hex(value) FROM about WHERE name = 'epoch'").fetchone()
        self.epoch = found[0].lower() if found else secrets.token_hex(8)

    def _make_tables(self, db: sqlite3.Connection) -> None:
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("PRAGMA cell_size_check = ON")
        db.execute("PRAGMA locking_mode = EXCLUSIVE")
        db.execute("BEGIN EXCLUSIVE")  # fails where another program has it
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        tables = {sql for (sql,) in db.execute("SELECT sql FROM sqlite_schema") if sql}
        if tables and application != APPLICATION:
            raise ConfigError(
                f"journal: {self.folder / FILE} is another program's file", param="journal"
            )
        if tables and version != VERSION:
            raise sqlite3.DatabaseError(f"it is of version {version}, this is {VERSION}")
        if tables and tables != set(SCHEMA):
            raise sqlite3.DatabaseError("its tables are not a journal's")
        if not tables:
            for statement in SCHEMA:
                db.execute(statement)
            db.execute(f"PRAGMA application_id = {APPLICATION}")
            db.execute(f"PRAGMA user_version = {VERSION}")
            epoch = bytes.fromhex(self.epoch) if self.epoch else secrets.token_bytes(8)
            db.execute("INSERT INTO about VALUES ('epoch', ?)", (epoch,))
        db.execute("COMMIT")

    def close(self) -> None:
        """Let go of the file, and then of the folder."""
        _close(self._db)
        self._lock.release()

    # ------------------------------------------------------------ reading

    def read(self) -> list[Saved]:
        """Every request, in order of acceptance, with what it drew as far as that can be read.

        A file with damage is set aside, and what could be read of it is in the new one.
        """
        found: dict[str, Saved] = {}
        for name, data, tries, tokens in self._rows("SELECT * FROM requests"):
            accepted = unpack(data, _ACCEPTED, str(name))
            if accepted is None:
                self._is_damaged = True
                continue
            tail = Tail(accepted.request.params.n)
            found[name] = Saved(accepted, tail, self._count(tries) or 0, self._count(tokens) or 0)
        for name, value, data in self._rows("SELECT * FROM parts ORDER BY rowid"):
            part, saved = unpack(data, _PART, f"{name} {value}"), found.get(name)
            number = self._count(value)
            self._is_damaged |= part is None
            if saved is not None and not saved.tail.is_broken:
                if part is None or number is None or len(part.starts) != len(saved.tail.starts):
                    saved.tail.is_broken = True
                else:
                    saved.tail.add_part(part, number)
            self._number = max(self._number, number or 0)
        self._read_steps({name: saved.tail for name, saved in found.items()})
        if self._is_damaged or not self._is_sound():
            self._renew(list(found.values()))
        else:
            self._settle(list(found.values()))
        return sorted(found.values(), key=lambda saved: saved.accepted.created)

    def _read_steps(self, tails: dict[str, Tail]) -> None:
        for value, data in self._rows("SELECT * FROM steps ORDER BY number"):
            step, number = unpack(data, _STEP, str(value)), self._count(value)
            if step is None or number is None:
                self._is_damaged = True  # later steps have gaps where this one is missing
            else:
                add_step(tails, step, number)
            self._number = max(self._number, number or 0)

    def _count(self, value: object) -> int | None:
        """A number of a row, which no checksum is of; None: it is damaged."""
        if isinstance(value, int) and 0 <= value < MAX_NUMBER:
            return value
        self._is_damaged = True
        return None

    def _rows(self, query: str) -> Iterator[tuple[Any, ...]]:
        """The rows of a query, up to the first that can't be read."""
        try:
            yield from self._db.execute(query)
        except sqlite3.DatabaseError as e:
            log.error("the journal in %s: %s", self.folder, e)
            self._is_damaged = True

    def _is_sound(self) -> bool:
        try:
            return bool(self._db.execute("PRAGMA quick_check(1)").fetchone() == ("ok",))
        except sqlite3.DatabaseError:
            return False

    def _settle(self, saved: list[Saved]) -> None:
        """Move the tokens of all steps to their requests."""
        self.begin(is_durable=True)
        for each in saved:
            if each.tail.ended is None:
                self._db.execute("DELETE FROM parts WHERE id = ?", (each.request_id,))
                self.add_part(each.request_id, each.tail.part())
        self.drop_steps()
        self.commit()
        self._write_back()
        self.shrink(START_MOVED_BYTES)

    def _renew(self, saved: list[Saved]) -> None:
        """Begin a new file with what was read of the damaged one, and set that aside.

        The new one is on disk whole before the damaged one gives it its place: a process that dies
        between leaves either (take_place).
        """
        path, new = self.folder / FILE, self.folder / (FILE + NEW)
        _close(self._db)
        self._db = self._open(new)
        # In no other file: it is whole or deleted.
        self._db.execute("PRAGMA journal_mode = OFF")
        self._make_tables(self._db)
        self.begin(is_durable=True)
        for each in saved:
            self.add_request(each.accepted)
            self.add_part(each.request_id, each.tail.part())
        self.commit()
        self._db.close()
        sync_folder(self.folder)
        set_aside(path, f"is damaged, {len(saved)} responses of it could be read")
        take_place(path)
        self._db = self._connect()

    # ------------------------------------------------------------ writing

    def shrink(self, moved_bytes: int) -> None:
        """Give free pages back to the disk where most of the file is free, which SQLite alone never
        does; not where more than `moved_bytes` are in use, which are written anew.

        They are in memory meanwhile: SQLite's file for them would be in a folder that all users
        share, and what was deleted from the journal would stay on that disk.
        0.75 s for 25 MiB in a file of 504; pages given back one by one (incremental_vacuum) took
        30 s, and their deletion twice as long (2 busy cores of an EPYC Zen 4, 2026-11-26).
        """
        if not self._can_shrink:
            return
        try:
            page, count, free = (
                self._db.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("page_size", "page_count", "freelist_count")
            )
            used = count - free
            if free <= used or free * page < SPARE_BYTES or used * page > moved_bytes:
                return
            self._write_back()  # deleted text is overwritten
            self._db.execute("PRAGMA temp_store = MEMORY")
            self._db.execute("VACUUM")
            self._write_back()
        except (sqlite3.Error, MemoryError) as e:  # no room for both, say: all is as it was
            self._can_shrink = False
            why = str(e) or "out of memory"
            log.warning("the journal in %s keeps its size: %s", self.folder, why)
            with contextlib.suppress(sqlite3.Error, MemoryError):
                self._write_back()  # the log is as large as what was written of it

    def _write_back(self) -> None:
        """Move what is in the log to the file, and empty it."""
        self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def erase(self) -> None:
        """Leave nothing of what was deleted in SQLite's log either."""
        if self.has_deleted:
            self._write_back()
            self.has_deleted = False

    def undo(self) -> None:
        """End a transaction that failed, without what was written in it."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def begin(self, *, is_durable: bool) -> None:
        """Begin a transaction; durable: its commit waits for the disk.

        Any other is safe from the death of the process as soon as it is committed, and from a loss
        of power some commits later.
        """
        self._new, self._new_parts, self._gone = [], [], {}
        if is_durable is not self._is_full:
            self._db.execute(f"PRAGMA synchronous = {'FULL' if is_durable else 'NORMAL'}")
            self._is_full = is_durable
        self._db.execute("BEGIN")
        if is_durable:  # something of its own, or a transaction without changes would not wait
            self._db.execute("INSERT OR REPLACE INTO about VALUES ('number', ?)", (self._number,))

    def commit(self) -> None:
        self._write_out()
        self._db.execute("COMMIT")

    def _write_out(self) -> None:
        """Each statement gives the GIL away and waits for it again, up to 0.5 ms, while a step or
        the loop waits for this thread: so there is one for many rows."""
        gone = [*self._gone]
        for some in _in_pieces(gone):
            places = ", ".join("?" * len(some))
            self._db.execute(f"DELETE FROM requests WHERE id IN ({places})", some)
            self._db.execute(f"DELETE FROM parts WHERE id IN ({places})", some)
        for table, rows in (("requests", self._new), ("parts", self._new_parts)):
            for some_rows in _in_pieces(rows):
                row = "(" + ", ".join("?" * len(rows[0])) + ")"
                places = ", ".join([row] * len(some_rows))
                values = [*chain.from_iterable(some_rows)]
                self._db.execute(f"INSERT OR REPLACE INTO {table} VALUES {places}", values)
        self._new, self._new_parts, self._gone = [], [], {}

    def add_request(self, accepted: Accepted) -> None:
        name = accepted.request.request_id
        self._new.append((name, pack(accepted, name), 0, 0))

    def add_part(self, name: str, part: Part) -> None:
        self._number += 1
        self._new_parts.append((name, self._number, pack(part, f"{name} {self._number}")))

    def add_step(self, step: Step) -> None:
        self._number += 1
        data = pack(step, str(self._number))
        self._db.execute("INSERT INTO steps VALUES (?, ?)", (self._number, data))

    def drop_steps(self) -> None:
        """All tokens are in parts."""
        self._db.execute("DELETE FROM steps")

    def delete(self, name: str) -> None:
        self._new = [row for row in self._new if row[0] != name]
        self._new_parts = [row for row in self._new_parts if row[0] != name]
        self._gone[name] = None
        self.has_deleted = True

    def tried(self, name: str, tries: int, tokens: int) -> None:
        """A request is restored for the `tries`th time since it had fewer than `tokens`."""
        self._write_out()
        self._db.execute(
            "UPDATE requests SET tries = ?, tokens = ? WHERE id = ?", (tries, tokens, name)
        )


def _in_pieces(rows: list[_T]) -> Iterator[list[_T]]:
    return (rows[i : i + MAX_ROWS] for i in range(0, len(rows), MAX_ROWS))


def _code(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0: raised here, not by SQLite."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _close(db: sqlite3.Connection | None) -> None:
    if db is not None:
        with contextlib.suppress(sqlite3.Error):
            db.close()
