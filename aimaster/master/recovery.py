"""Open a job's journal and stand where the last life of the master stood.

A journal whose job is over is not gone on with: the file is set aside under a name with a number and a new
one begun, so that a requeued job starts afresh and the old story stays readable. The exception is a master
that is revived by the agent that has hosted it so far: agents may still have to hear that the job is over.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from pathlib import Path

from aimaster.clock import Clock
from aimaster.core.machine import Machine
from aimaster.core.policy import Policy
from aimaster.core.state import OVER
from aimaster.errors import FolderUnusable, SetupError
from aimaster.ids import Incarnation
from aimaster.journal.base import Entry, Journal, Life
from aimaster.journal.replay import go_on, replay
from aimaster.journal.sqlite import SqliteJournal
from aimaster.master.incidents import IncidentLog
from aimaster.master.intake import Intake
from aimaster.master.jobclock import JobClock

JOURNAL_NAME = "journal.db"
JOURNALS_KEPT_MAX = 1000
"""Past journals of one job; far more than anybody requeues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Everything that a life of the master begins with."""

    journal: Journal
    machine: Machine
    life: Life
    clock: JobClock
    intake: Intake
    incidents: IncidentLog
    replayed: int
    """Entries of earlier lives; 0 for a new job."""


def stand_up(state_dir: Path, *, policy: Policy, clock: Clock, revived: bool) -> Standing:
    """Recover from the journal in `state_dir`, or begin one.

    Raises:
        AlreadyRunning: another master writes it.
        SetupError: the folder or the journal cannot be used.
    """
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise FolderUnusable(
            f"cannot make the state folder ({error.strerror})",
            where=str(state_dir),
            next_step="choose another --state-dir",
        ) from error
    journal = SqliteJournal.open(state_dir / JOURNAL_NAME)
    try:
        past = _read(journal)
        if not revived and past.is_over:
            journal.set_aside(_free_name(state_dir))
            journal = SqliteJournal.open(state_dir / JOURNAL_NAME)
            past = _read(journal)
        return _begin(journal, past, policy=policy, clock=clock)
    except BaseException:
        journal.close()
        raise


def from_journal(journal: Journal, *, policy: Policy, clock: Clock) -> Standing:
    """Recover from any journal and begin the next life of the master."""
    return _begin(journal, _read(journal), policy=policy, clock=clock)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Past:
    """What earlier lives of the master have left."""

    machine: Machine
    intake: Intake
    incidents: IncidentLog

    @property
    def is_over(self) -> bool:
        """Whether the job has its outcome; a job that nobody has declared has none."""
        return self.machine.state.job.phase in OVER


def _read(journal: Journal) -> _Past:
    """One pass over the journal: in a long job it is what a start of the master takes its time for."""
    intake, incidents = Intake(), IncidentLog()

    def visit(entry: Entry) -> None:
        incidents.add(entry)
        intake.remember(entry.record.event)

    return _Past(machine=replay(journal, visit=visit), intake=intake, incidents=incidents)


def _begin(journal: Journal, past: _Past, *, policy: Policy, clock: Clock) -> Standing:
    incarnation = Incarnation(f"m-{uuid.uuid4().hex}")
    recovered = go_on(journal, past.machine, incarnation=incarnation, policy=policy, wall_s=clock.wall())
    return Standing(
        journal=journal,
        machine=recovered.machine,
        life=recovered.life,
        clock=JobClock(clock, resumed_at_s=recovered.at_s),
        intake=past.intake,
        incidents=past.incidents,
        replayed=recovered.replayed,
    )


def _free_name(state_dir: Path) -> Path:
    """Where the next past journal is kept."""
    for number in range(1, JOURNALS_KEPT_MAX + 1):
        kept = state_dir / f"journal-{number}.db"
        if not kept.exists():
            return kept
    raise SetupError(
        f"this job has {JOURNALS_KEPT_MAX} past journals",
        where=str(state_dir),
        next_step="remove old journal-*.db files, or start under another --rdzv-id",
    )
