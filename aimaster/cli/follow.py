"""`aimaster events --follow`: the journal as it grows, a line per event, until the job is over.

Only the journal is asked, so that following costs a job nothing and needs no address and no secret. It ends
when the journal says that nobody is left, when a new job has taken its place, and when the process that wrote
it has been gone for `GONE_S`: an agent that lives starts a dead master again within seconds.

Whether somebody writes is read from the kernel's table of locks. Taking the lock would tell as well, but
could keep a master from starting. Where the writer was never seen there (it is in another container), its
absence says nothing, and Ctrl-C ends the command.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from aimaster.cli.journals import ENTRIES_READ_MAX
from aimaster.core.goodput import Goodput
from aimaster.errors import MasterUnreachable
from aimaster.journal.base import Entry
from aimaster.journal.sqlite import SqliteJournal, lock_path

__all__ = ["follow"]

EVERY_S = 0.5
GONE_S = 60.0
LOCKS = Path("/proc/locks")
LOCKS_BYTES_MAX = 4 * 1024 * 1024


def follow(path: Path, *, last: int | None, say: Callable[[Entry], None]) -> None:
    """Say every entry of a journal, those to come included.

    Args:
        path: the journal.
        last: how many of those that are there already; None for all.
        say: called with each, in order.

    Raises:
        SetupError: there is no journal, or it cannot be read.
        MasterUnreachable: whoever wrote it has been gone for long.
    """
    goodput = Goodput()
    after = _first(path, goodput, last=last, say=say)
    led = _Led(path)
    while not goodput.is_over:
        time.sleep(EVERY_S)
        if not path.exists():
            return  # it was set aside a moment ago, as is done with one that is over
        with SqliteJournal.read(path) as journal:
            newest = journal.last()
            if newest is None or newest.seq < after:
                return  # the journal of another job, which has taken its place
            after = _pass_on(journal.entries(after), goodput, say) or after
        if led.gone_s() > GONE_S and not goodput.is_over:
            raise MasterUnreachable(
                f"nobody has led the job for {GONE_S:.0f} s",
                where=str(path),
                next_step="look whether its agents still run: aimaster status",
            )


def _first(path: Path, goodput: Goodput, *, last: int | None, say: Callable[[Entry], None]) -> int:
    """What is there already; returns the number of the newest entry."""
    with SqliteJournal.read(path) as journal:
        newest = journal.last()
        end = newest.seq if newest is not None else 0
        shown_after = 0 if last is None else end - last
        entries = journal.entries(max(0, end - ENTRIES_READ_MAX))
        return _pass_on(entries, goodput, lambda one: say(one) if one.seq > shown_after else None) or end


def _pass_on(entries: Iterable[Entry], goodput: Goodput, say: Callable[[Entry], None]) -> int:
    """Say them all; returns the number of the last one, 0 where there was none."""
    seq = 0
    for entry in entries:
        goodput.take(entry.record.event, entry.record.decision, entry.record.at_s)
        say(entry)
        seq = entry.seq
    return seq


class _Led:
    """For how long nobody has written a journal, once somebody was seen to."""

    def __init__(self, path: Path) -> None:
        self._lock = lock_path(path)
        self._seen_s: float | None = None

    def gone_s(self) -> float:
        """0 while somebody is there, or never was."""
        now = time.monotonic()
        if self._is_held():
            self._seen_s = now
        return 0.0 if self._seen_s is None else now - self._seen_s

    def _is_held(self) -> bool:
        try:
            found = self._lock.stat()
            with LOCKS.open("rb") as file:
                table = file.read(LOCKS_BYTES_MAX).decode("ascii", "replace")
        except OSError:
            return False
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        return any(device in words for words in _rows(table))


def _rows(table: str) -> Iterator[list[str]]:
    for line in table.splitlines():
        words = line.split()
        if "FLOCK" in words and "WRITE" in words:
            yield words
