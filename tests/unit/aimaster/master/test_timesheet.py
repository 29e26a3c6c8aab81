"""The account of a job's time as a master keeps it: over its lives, and with what heartbeats tell."""

from __future__ import annotations

from typing import Any

from aimaster.clock import SystemClock
from aimaster.core.events import AgentPhase, CaughtUp, StepCommitted, Tier
from aimaster.core.policy import Policy
from aimaster.core.sights import WorkerPhase
from aimaster.ids import Generation, Incarnation, NodeId
from aimaster.journal.base import Entry
from aimaster.journal.memory import MemoryJournal
from aimaster.master.commits import AGES_KEPT_MAX, CommitAges
from aimaster.master.recovery import from_journal
from aimaster.master.timesheet import TimeSheet
from aimaster.rpc.messages import Heartbeat, RankProgress
from tests.unit.aimaster.core.play import Play
from tests.unit.aimaster.journal.stories import a_job, records, write


def sheet_of(play: Play) -> TimeSheet:
    sheet = TimeSheet()
    for seq, record in enumerate(records(play), 1):
        sheet.add(Entry(seq=seq, epoch=1, record=record))
    return sheet


def beat(generation: int, *, base: int, steps: tuple[int, ...]) -> Heartbeat:
    ranks: dict[str, Any] = {"phase": WorkerPhase.TRAINING, "saved_step": None, "age_s": 0.0}
    progress = tuple(
        RankProgress(local_rank=rank, rank=rank, steps=done, **ranks) for rank, done in enumerate(steps)
    )
    return Heartbeat(
        phase=AgentPhase.RUNNING, progress=progress, generation=Generation(generation), base_step=base
    )


def test_a_master_that_starts_again_knows_where_the_time_went() -> None:
    play = a_job()
    journal = MemoryJournal()
    write(journal, play)
    standing = from_journal(journal.reopen(), policy=Policy(), clock=SystemClock())
    assert standing.times.status(play.now) == sheet_of(play).status(play.now)
    assert standing.times.status(play.now).wall_s > 0


def test_steps_done_again_are_over_once_a_heartbeat_says_so() -> None:
    play = Play()
    play.run("a", "b")
    play.stepped("a", 1)
    play.committed("a", 10)
    play.exited("b", step=14)
    play.restart()
    generation = play.view().generation
    play.restored("a", 10, Tier.MEMORY)
    play.stepped("a", 11)
    sheet = sheet_of(play)
    assert sheet.take(beat(generation, base=10, steps=(3, 2))) is None, "step 14 is not reached"
    assert sheet.take(beat(generation - 1, base=10, steps=(9,))) is None, "of an older generation"
    assert sheet.take(beat(generation, base=10, steps=())) is None
    found = sheet.take(beat(generation, base=10, steps=(5, 4)))
    assert found == CaughtUp(generation=generation, step=15)
    assert sheet.take(beat(generation, base=10, steps=(6, 5))) is None, "said once"


def test_where_nothing_is_done_again_heartbeats_say_nothing() -> None:
    play = Play()
    play.run("a", "b")
    play.stepped("a", 1)
    assert sheet_of(play).take(beat(play.view().generation, base=0, steps=(5,))) is None


def test_the_age_of_a_checkpoint_counts_from_when_it_was_first_heard_of() -> None:
    ages = CommitAges()
    for step, at_s in ((5, 10.0), (6, 20.0), (6, 30.0)):
        ages.note(commit(step), at_s)
    assert ages.age_s(6, durable=False, now=50.0) == 30.0
    assert ages.age_s(5, durable=False, now=50.0) == 40.0, "training fell back to it"
    assert ages.age_s(6, durable=True, now=50.0) is None
    assert ages.age_s(None, durable=False, now=50.0) is None
    for step in range(100, 100 + AGES_KEPT_MAX):
        ages.note(commit(step), 60.0)
    assert ages.age_s(6, durable=False, now=70.0) is None


def commit(step: int) -> StepCommitted:
    return StepCommitted(
        node=NodeId("a"), incarnation=Incarnation("1"), generation=Generation(1), step=step, durable=False
    )
