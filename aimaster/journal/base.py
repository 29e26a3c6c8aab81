"""The journal of a job: what was seen, what was decided, and the digest of the state after it.

It is the job's memory. A master that starts again replays it and stands where the last one stood; `aimaster
status`, `events` and `explain` read what happened from it. Heartbeats are not in it, so a job that is well
writes nothing.

The order of things is: step the machine, append, carry out the commands. What was appended is durable when
`append` returns; what was carried out is therefore always in the journal, and what is in the journal may have
to be carried out again (`aimaster.core.machine.Machine.outstanding`).

Each life of a master opens an *epoch* and writes its policy beside it, so that a replay judges every event as
it was judged then, even if the next master runs with other limits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aimaster.core.commands import Decision
from aimaster.core.events import Event
from aimaster.core.policy import Policy
from aimaster.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One step of the machine."""

    event: Event
    decision: Decision
    digest: str
    """Of the state after the step."""
    at_s: float
    """On the job's clock, which goes on over restarts of the master."""
    wall_s: float
    """Seconds since the epoch, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record in its place."""

    seq: int
    """From 1, without holes."""
    epoch: int
    """Which life of the master wrote it."""
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life of a master."""

    epoch: int
    """From 1. Agents obey the highest that they have seen."""
    incarnation: Incarnation
    policy: Policy
    at_s: float
    wall_s: float


class Journal(ABC):
    """Append-only. One owner at a time; calls may come from different threads, but never at once."""

    @abstractmethod
    def begin_life(self, incarnation: Incarnation, *, policy: Policy, at_s: float, wall_s: float) -> Life:
        """Open the next epoch. What is appended belongs to it."""

    @abstractmethod
    def append(self, records: Sequence[Record]) -> int:
        """Write records in order, all or none, and durable on return.

        Returns:
            The number of the last entry.

        Raises:
            NoSpace: if the file system is full; nothing was written.
            RuntimeError: before `begin_life`.
        """

    @abstractmethod
    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries with a number above `after`, in order."""

    @abstractmethod
    def last(self) -> Entry | None:
        """The newest entry."""

    @abstractmethod
    def lives(self) -> tuple[Life, ...]:
        """All lives of the master, oldest first."""

    @abstractmethod
    def close(self) -> None:
        """Give the journal back; calling it again does nothing."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
