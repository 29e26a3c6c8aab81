"""The journal in memory: for tests and simulation, and the yardstick for the one on disk.

It keeps text, not objects, so that everything that goes through it has been through the codec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from aimaster.core.policy import Policy
from aimaster.ids import Incarnation
from aimaster.journal.base import Entry, Journal, Life, Record
from aimaster.journal.codec import decode_decision, decode_event, decode_policy, encode


class MemoryJournal(Journal):
    """Lives as long as the object; `reopen` gives the same content as a master that starts again sees it."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, float, float, str, str, str]] = []
        self._lives: list[tuple[str, str, float, float]] = []
        self._writing = False

    def reopen(self) -> MemoryJournal:
        """What a master that starts again would open."""
        other = MemoryJournal()
        other._rows, other._lives = self._rows, self._lives
        self._writing = False
        return other

    def begin_life(self, incarnation: Incarnation, *, policy: Policy, at_s: float, wall_s: float) -> Life:
        """Open the next epoch."""
        self._lives.append((incarnation, encode(policy), at_s, wall_s))
        self._writing = True
        return self.lives()[-1]

    def append(self, records: Sequence[Record]) -> int:
        """Write records, all or none."""
        if not self._writing:
            raise RuntimeError("append before begin_life")
        epoch = len(self._lives)
        self._rows += [
            (epoch, r.at_s, r.wall_s, encode(r.event), encode(r.decision), r.digest) for r in records
        ]
        return len(self._rows)

    def entries(self, after: int = 0) -> Iterator[Entry]:
        """All entries with a number above `after`."""
        for seq in range(after + 1, len(self._rows) + 1):
            yield self._entry(seq)

    def last(self) -> Entry | None:
        """The newest entry."""
        return self._entry(len(self._rows)) if self._rows else None

    def _entry(self, seq: int) -> Entry:
        epoch, at_s, wall_s, event, decision, digest = self._rows[seq - 1]
        record = Record(
            event=decode_event(event),
            decision=decode_decision(decision),
            digest=digest,
            at_s=at_s,
            wall_s=wall_s,
        )
        return Entry(seq=seq, epoch=epoch, record=record)

    def lives(self) -> tuple[Life, ...]:
        """All lives of the master."""
        return tuple(
            Life(
                epoch=epoch,
                incarnation=Incarnation(incarnation),
                policy=decode_policy(policy),
                at_s=at_s,
                wall_s=wall_s,
            )
            for epoch, (incarnation, policy, at_s, wall_s) in enumerate(self._lives, start=1)
        )

    def close(self) -> None:
        """Nothing to give back."""
        self._writing = False
