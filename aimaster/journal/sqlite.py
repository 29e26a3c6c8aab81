"""The journal in one SQLite file on a local disk.

Write-ahead log with full synchronisation: an append is one transaction and one flush, so whatever happens
afterwards, including SIGKILL or a power cut at any instruction, the file opens with a whole number of
records. SQLite's log and locks do not hold on network file systems; the shell keeps the file off them.

Two masters must never write one journal. SQLite would let them take turns, so a lock file beside the database
is held for as long as it is open for writing (`flock`, which the kernel drops with the process). Readers
need no lock and see whole records only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from aimaster.core.policy import Policy
from aimaster.errors import AimasterError, AlreadyRunning, FolderUnusable, NoSpace
from aimaster.ids import Incarnation
from aimaster.journal.base import Entry, Journal, Life, Record
from aimaster.journal.codec import SCHEMA, decode_decision, decode_event, decode_policy, encode
from aimaster.journal.errors import JournalCorrupt, JournalNewer

APPLICATION_ID = 0x41494D4A
"""Marks the file as ours ("AIMJ") in SQLite's own header."""

READ_ROWS = 500
"""How many rows a reader holds at a time."""

_TABLES = """
CREATE TABLE lives (
  epoch INTEGER PRIMARY KEY,
  incarnation TEXT NOT NULL,
  policy TEXT NOT NULL,
  at_s REAL NOT NULL,
  wall_s REAL NOT NULL
);
CREATE TABLE entries (
  seq INTEGER PRIMARY KEY,
  epoch INTEGER NOT NULL REFERENCES lives (epoch),
  at_s REAL NOT NULL,
  wall_s REAL NOT NULL,
  event TEXT NOT NULL,
  decision TEXT NOT NULL,
  digest TEXT NOT NULL
);
"""

_ROW = "SELECT seq, epoch, at_s, wall_s, event, decision, digest FROM entries"


class SqliteJournal(Journal):
    """A journal file. `open` for the one who writes, `read` for all others."""

    def __init__(self, database: sqlite3.Connection, *, path: Path, lock: int | None) -> None:
        self._database = database
        self._path = path
        self._lock = lock
        self._epoch = 0
        self._seq = 0
        self._closed = False

    @classmethod
    def open(cls, path: Path) -> SqliteJournal:
        """Open for writing; make it if it is not there.

        Raises:
            AlreadyRunning: if another process writes it.
            JournalNewer: if a newer version wrote it.
            JournalCorrupt: if it is no journal, or damaged.
            FolderUnusable, NoSpace: if the file system does not let us.
        """
        lock = _take_lock(path)
        try:
            with _plain_errors(path):
                database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                journal = cls(database, path=path, lock=lock)
                journal._prepare()
                return journal
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def read(cls, path: Path) -> SqliteJournal:
        """Open for reading, also while a master writes.

        Raises:
            FolderUnusable: if there is no such file.
            JournalNewer, JournalCorrupt: as for `open`.
        """
        if not path.is_file():
            raise FolderUnusable("there is no journal", where=str(path), next_step="Check --state-dir.")
        with _plain_errors(path):
            uri = f"{path.absolute().as_uri()}?mode=ro"
            database = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            journal = cls(database, path=path, lock=None)
            try:
                journal._check_head()
            except BaseException:
                database.close()
                raise
            return journal

    def _prepare(self) -> None:
        """Make the tables if the file is new; refuse what is not ours."""
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            self._database.execute("PRAGMA foreign_keys = ON")
            if self._pragma("application_id") == 0 and self._is_empty():
                self._database.execute("BEGIN IMMEDIATE")
                for statement in _TABLES.split(";")[:-1]:
                    self._database.execute(statement)
                self._database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                self._database.execute(f"PRAGMA user_version = {SCHEMA}")
                self._database.execute("COMMIT")
                _sync_folder(self._path.parent)
            self._check_head()
            self._seq = self._database.execute("SELECT coalesce(max(seq), 0) FROM entries").fetchone()[0]
        except BaseException:
            self._database.close()
            raise

    def _pragma(self, name: str) -> int:
        return int(self._database.execute(f"PRAGMA {name}").fetchone()[0])

    def _is_empty(self) -> bool:
        return int(self._database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]) == 0

    def _check_head(self) -> None:
        if self._pragma("application_id") != APPLICATION_ID:
            raise JournalCorrupt(
                "this is not a journal of aimaster",
                where=str(self._path),
                next_step="Choose another --state-dir, or move the file away.",
            )
        schema = self._pragma("user_version")
        if schema > SCHEMA:
            raise JournalNewer(
                f"the journal has schema {schema}, this version reads up to {SCHEMA}",
                where=str(self._path),
                next_step="Use the version that wrote it, or start the job under another --rdzv-id.",
                facts={"schema": schema, "known": SCHEMA},
            )

    def begin_life(self, incarnation: Incarnation, *, policy: Policy, at_s: float, wall_s: float) -> Life:
        """Open the next epoch, durable on return."""
        with _plain_errors(self._path):
            cursor = self._database.execute(
                "INSERT INTO lives (incarnation, policy, at_s, wall_s) VALUES (?, ?, ?, ?)",
                (incarnation, encode(policy), at_s, wall_s),
            )
        assert cursor.lastrowid is not None
        self._epoch = cursor.lastrowid
        return Life(epoch=self._epoch, incarnation=incarnation, policy=policy, at_s=at_s, wall_s=wall_s)

    def append(self, records: Sequence[Record]) -> int:
        """Write records in one transaction and one flush."""
        if self._epoch == 0:
            raise RuntimeError("append before begin_life")
        rows = [
            (seq, self._epoch, r.at_s, r.wall_s, encode(r.event), encode(r.decision), r.digest)
            for seq, r in enumerate(records, start=self._seq + 1)
        ]
        with _plain_errors(self._path):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                self._database.execute("COMMIT")
            except BaseException:
                # A full disk may have rolled back by itself already.
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        self._seq += len(rows)
        return self._seq

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries with a number above `after`, read in bounded pieces."""
        while True:
            with _plain_errors(self._path):
                rows = self._database.execute(
                    f"{_ROW} WHERE seq > ? ORDER BY seq LIMIT ?", (after, READ_ROWS)
                ).fetchall()
            for row in rows:
                yield _entry(row)
            if len(rows) < READ_ROWS:
                return
            after = rows[-1][0]

    def last(self) -> Entry | None:
        """The newest entry."""
        with _plain_errors(self._path):
            row = self._database.execute(f"{_ROW} ORDER BY seq DESC LIMIT 1").fetchone()
        return None if row is None else _entry(row)

    def lives(self) -> tuple[Life, ...]:
        """All lives of the master."""
        with _plain_errors(self._path):
            rows = self._database.execute(
                "SELECT epoch, incarnation, policy, at_s, wall_s FROM lives ORDER BY epoch"
            ).fetchall()
        return tuple(
            Life(
                epoch=epoch,
                incarnation=Incarnation(incarnation),
                policy=decode_policy(policy),
                at_s=at_s,
                wall_s=wall_s,
            )
            for epoch, incarnation, policy, at_s, wall_s in rows
        )

    def set_aside(self, kept: Path) -> None:
        """Keep the file under another name in its folder, and close it. The lock is held to the end.

        The log is written back and removed first, since two files cannot be renamed at once: whatever ends
        this half-way, there is one whole journal under one of the two names.

        Raises:
            FolderUnusable: somebody reads it for longer than one waits.
        """
        with _plain_errors(self._path):
            busy = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            if busy:
                raise FolderUnusable(
                    "the journal of the last run is being read, and cannot be set aside",
                    where=str(self._path),
                    next_step="End what reads it, and start again.",
                )
            self._database.close()
        try:
            # A reader keeps its own hold of them; a new journal must not meet them.
            for suffix in ("-wal", "-shm"):
                self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._path.rename(kept)
            _sync_folder(self._path.parent)
        except OSError as error:
            raise _from_os(error, self._path) from error
        finally:
            self.close()

    def close(self) -> None:
        """Close the file and drop the lock."""
        if self._closed:
            return
        self._closed = True
        self._database.close()
        if self._lock is not None:
            os.close(self._lock)


def _entry(row: tuple[int, int, float, float, str, str, str]) -> Entry:
    seq, epoch, at_s, wall_s, event, decision, digest = row
    record = Record(
        event=decode_event(event),
        decision=decode_decision(decision),
        digest=digest,
        at_s=at_s,
        wall_s=wall_s,
    )
    return Entry(seq=seq, epoch=epoch, record=record)


def lock_path(path: Path) -> Path:
    """The file that the writer of a journal holds a lock on."""
    return path.with_name(path.name + ".lock")


def _take_lock(path: Path) -> int:
    """Hold the writer's lock, as an open descriptor."""
    where = lock_path(path)
    try:
        lock = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _from_os(error, path) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if not isinstance(error, BlockingIOError):
            raise _from_os(error, path) from error
        raise AlreadyRunning(
            "another master writes this journal",
            where=str(path),
            next_step="End it first, or start this job under another --rdzv-id.",
        ) from error
    return lock


def _from_os(error: OSError, path: Path) -> AimasterError:
    return FolderUnusable(
        f"the journal cannot be opened: {error.strerror or error}",
        where=str(path),
        next_step="Choose a --state-dir on a local disk that you may write to.",
    )


@contextlib.contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """SQLite's errors as ours: what, where, what to do next."""
    try:
        yield
    except sqlite3.OperationalError as error:
        text = str(error)
        if "full" in text:
            raise NoSpace(
                "the journal cannot grow: the disk is full",
                where=str(path),
                next_step="Make room on that file system; the job goes on as it is until then.",
            ) from error
        raise FolderUnusable(
            f"the journal cannot be used: {text}",
            where=str(path),
            next_step="Choose a --state-dir on a local disk that you may write to.",
        ) from error
    except sqlite3.DatabaseError as error:
        raise JournalCorrupt(
            f"the journal is damaged: {error}",
            where=str(path),
            next_step="Start the job under another --rdzv-id, or move its state directory away.",
        ) from error


def _sync_folder(folder: Path) -> None:
    """A new file is only there after a power cut if its folder was flushed."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
