"""Open a job's journal and stand where the last life of the master stood.

A journal whose job is over is not gone on with: the file is set aside under a name with a number and a new
one begun, so that the old story stays readable. A job that its scheduler starts again takes what it has spent
into the new one (`aimaster.core.requeue`). The exception is a master
that is revived by the agent that has hosted it so far: agents may still have to hear that the job is over.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

from aimaster.clock import Clock
from aimaster.core.machine import Machine
from aimaster.core.policy import Policy
from aimaster.core.requeue import left_behind
from aimaster.core.state import OVER
from aimaster.errors import AimasterError, FolderUnusable, SetupError
from aimaster.ids import Incarnation
from aimaster.journal.base import Entry, Journal, Life, Record
from aimaster.journal.replay import clock_after, go_on, replay
from aimaster.journal.sqlite import SqliteJournal
from aimaster.master.incidents import IncidentLog
from aimaster.master.intake import Intake
from aimaster.master.jobclock import JobClock
from aimaster.master.timesheet import TimeSheet

JOURNAL_NAME = "journal.db"
JOURNALS_KEPT_MAX = 1000
"""Past journals of one job; far more than anybody requeues."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Everything that a life of the master begins with."""

    journal: Journal
    machine: Machine
    life: Life
    clock: JobClock
    intake: Intake
    incidents: IncidentLog
    times: TimeSheet
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
        if past.is_over and not revived:
            journal.set_aside(_kept(state_dir)[0])
            journal = SqliteJournal.open(state_dir / JOURNAL_NAME)
            past = _read(journal)
        standing = _begin(journal, past, policy=policy, clock=clock)
        return standing if standing.replayed else _with_legacy(standing, state_dir, clock)
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
    times: TimeSheet

    @property
    def is_over(self) -> bool:
        """Whether the job has its outcome; a job that nobody has declared has none."""
        return self.machine.state.job.phase in OVER


def _read(journal: Journal) -> _Past:
    """One pass over the journal: in a long job it is what a start of the master takes its time for."""
    intake, incidents, times = Intake(), IncidentLog(), TimeSheet()

    def visit(entry: Entry) -> None:
        incidents.add(entry)
        times.add(entry)
        intake.remember(entry.record.event)

    return _Past(machine=replay(journal, visit=visit), intake=intake, incidents=incidents, times=times)


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
        times=past.times,
        replayed=recovered.replayed,
    )


def _with_legacy(standing: Standing, state_dir: Path, clock: Clock) -> Standing:
    """A new journal takes over what the job's last one leaves, if that asked for another start.

    Looked for whenever a journal is empty, so that a master that was killed in between loses nothing.
    """
    newest = _kept(state_dir)[1]
    if newest is None:
        return standing
    try:
        with SqliteJournal.read(newest) as past:
            legacy, at_s = left_behind(replay(past).state), clock_after(past.last(), clock.wall())
    except AimasterError as error:
        log.warning("what the job has spent before is not known: %s", error)
        return standing
    if legacy is None:
        return standing
    decision = standing.machine.step(legacy, at_s)
    record = Record(
        event=legacy, decision=decision, digest=standing.machine.digest(), at_s=at_s, wall_s=clock.wall()
    )
    standing.journal.append([record])
    return replace(standing, clock=JobClock(clock, resumed_at_s=at_s))


def _kept(state_dir: Path) -> tuple[Path, Path | None]:
    """Where the next past journal is to be kept, and where the newest is."""
    newest: Path | None = None
    for number in range(1, JOURNALS_KEPT_MAX + 1):
        path = state_dir / f"journal-{number}.db"
        if not path.exists():
            return path, newest
        newest = path
    raise SetupError(
        f"this job has {JOURNALS_KEPT_MAX} past journals",
        where=str(state_dir),
        next_step="remove old journal-*.db files, or start under another --rdzv-id",
    )
