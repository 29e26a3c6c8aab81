"""From a journal back to a machine, and on into a new life of the master.

The state is rebuilt by stepping a machine through the events again, each under the policy of its epoch.
After each step the digest must be the one that was written then. It differs only if the file was tampered
with or if this version of the machine decides otherwise than the one that wrote it: then going on would run
a job on a state that nobody decided, so it is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aimaster.core.invariants import violations
from aimaster.core.machine import Machine
from aimaster.core.policy import Policy
from aimaster.core.transitions import IllegalEvent
from aimaster.ids import Incarnation
from aimaster.journal.base import Entry, Journal, Life
from aimaster.journal.errors import JournalDiverged


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """Where a new life of the master begins."""

    machine: Machine
    life: Life
    at_s: float
    """The job's clock at the moment of recovery; it goes on from here."""
    replayed: int
    """How many entries were replayed; 0 for a new job."""


def replay(journal: Journal, *, visit: Callable[[Entry], None] | None = None) -> Machine:
    """The machine that wrote the journal, as it was after its last entry.

    Args:
        journal: read once, from its first entry to its last.
        visit: called with each entry, for whoever else has to know them.

    Raises:
        JournalDiverged: if the state is another one than was written down.
    """
    lives = {life.epoch: life for life in journal.lives()}
    machine = Machine(lives[min(lives)].policy if lives else None)
    epoch = 0
    for entry in journal.entries():
        if entry.epoch != epoch:
            epoch = entry.epoch
            machine.policy = lives[epoch].policy
        record = entry.record
        try:
            machine.step(record.event, record.at_s)
        except IllegalEvent as error:
            raise _diverged(entry, str(error)) from error
        if machine.digest() != record.digest:
            raise _diverged(entry, "another state follows from it than was written down")
        if visit is not None:
            visit(entry)
    return machine


def recover(journal: Journal, *, incarnation: Incarnation, policy: Policy, wall_s: float) -> Recovered:
    """Replay the journal and begin the next life of the master.

    Raises:
        JournalDiverged: as for `replay`.
    """
    return go_on(journal, replay(journal), incarnation=incarnation, policy=policy, wall_s=wall_s)


def go_on(
    journal: Journal, machine: Machine, *, incarnation: Incarnation, policy: Policy, wall_s: float
) -> Recovered:
    """Begin the next life of the master with the machine that was replayed.

    Raises:
        JournalDiverged: the machine stands where none can stand.
    """
    broken = violations(machine.state, machine.policy)
    last = journal.last()
    if last is not None and broken:
        raise _diverged(last, "; ".join(broken))
    at_s = clock_after(last, wall_s)
    life = journal.begin_life(incarnation, policy=policy, at_s=at_s, wall_s=wall_s)
    machine.policy = policy
    return Recovered(machine=machine, life=life, at_s=at_s, replayed=0 if last is None else last.seq)


def clock_after(last: Entry | None, wall_s: float) -> float:
    """The job's clock: it has gone on by the wall time since the last entry; never backwards."""
    return 0.0 if last is None else last.record.at_s + max(0.0, wall_s - last.record.wall_s)


def _diverged(entry: Entry, what: str) -> JournalDiverged:
    return JournalDiverged(
        "the journal does not lead to the state that was written beside it",
        where=f"entry {entry.seq} ({type(entry.record.event).__name__}): {what}",
        next_step="Use the version that wrote it, or start the job under another --rdzv-id.",
        facts={"seq": entry.seq, "epoch": entry.epoch},
    )
