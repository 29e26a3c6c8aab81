"""Pieces of the master, each alone: clock, intake, table, held commits, recovery, ledger."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from aimaster.clock import SystemClock
from aimaster.core.commands import FinishJob
from aimaster.core.events import (
    AgentPhase,
    JobDeclared,
    NodeJoined,
    NodeLeft,
    NodePrepared,
    StepCommitted,
    StopKind,
    StopRequested,
    WorkerExited,
    WorkersStarted,
)
from aimaster.core.policy import Policy
from aimaster.core.requeue import Requeued
from aimaster.core.state import JobPhase
from aimaster.core.transitions import IllegalEvent
from aimaster.errors import AlreadyRunning, FolderUnusable, NoSpace
from aimaster.ids import Generation, Incarnation, JobId, NodeId
from aimaster.journal.base import Entry, Record
from aimaster.journal.memory import MemoryJournal
from aimaster.journal.sqlite import SqliteJournal
from aimaster.master import ledger as ledger_module
from aimaster.master.commits import COMMIT_HOLD_S, HeldCommits
from aimaster.master.intake import Intake
from aimaster.master.jobclock import JobClock
from aimaster.master.ledger import Ledger
from aimaster.master.recovery import JOURNAL_NAME, Standing, from_journal, stand_up
from aimaster.master.table import NodeTable
from aimaster.rpc.messages import Heartbeat, Hello, Identity, ProcessInfo, Role

N1, A, B = NodeId("n1"), Incarnation("a"), Incarnation("b")


class HandClock:
    """Time that moves by hand."""

    def __init__(self, monotonic: float = 100.0, wall: float = 1e9) -> None:
        self.at, self.at_wall = monotonic, wall

    def monotonic(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at_wall


def declared() -> JobDeclared:
    return JobDeclared(job=JobId("job-1"), min_nodes=1, max_nodes=1, max_restarts=None)


def joined(incarnation: Incarnation = A) -> NodeJoined:
    return NodeJoined(node=N1, incarnation=incarnation, address="127.0.0.1", workers=1)


def prepared(seq: int, incarnation: Incarnation = A, generation: int = 1) -> NodePrepared:
    return NodePrepared(
        node=N1, incarnation=incarnation, seq=seq, generation=Generation(generation), rendezvous_port=4000
    )


def committed(step: int, *, durable: bool, node: NodeId = N1) -> StepCommitted:
    return StepCommitted(node=node, incarnation=A, generation=Generation(1), step=step, durable=durable)


# Clock ------------------------------------------------------------------------------------------------------


def test_the_jobs_clock_goes_on_over_a_restart_and_never_back() -> None:
    clock = HandClock(monotonic=5.0, wall=1000.0)
    first = JobClock(clock)
    assert first.now() == 0.0
    clock.at, clock.at_wall = 15.0, 1010.0
    assert first.now() == 10.0
    after_boot = HandClock(monotonic=1.0, wall=1040.0)
    assert JobClock(after_boot, resumed_at_s=10.0, resumed_wall_s=1010.0).now() == 40.0
    set_back = HandClock(monotonic=1.0, wall=500.0)
    assert JobClock(set_back, resumed_at_s=10.0, resumed_wall_s=1010.0).now() == 10.0


# Intake -----------------------------------------------------------------------------------------------------


def test_a_fact_is_taken_once_and_acknowledged_when_journalled() -> None:
    intake = Intake()
    assert not intake.accept(N1, A, seq=1), "nobody has joined yet"
    intake.open(N1, A)
    assert intake.accept(N1, A, seq=1)
    assert not intake.accept(N1, A, seq=1)
    assert intake.acknowledged(N1, A) == 0
    intake.journalled(N1, A, seq=1)
    assert intake.acknowledged(N1, A) == 1
    intake.open(N1, A)  # back after a cut
    assert not intake.accept(N1, A, seq=1)


def test_an_earlier_life_has_nothing_to_say() -> None:
    intake = Intake()
    intake.open(N1, A)
    assert intake.accept(N1, A, seq=7)
    intake.open(N1, B)
    assert not intake.accept(N1, A, seq=8)
    intake.journalled(N1, A, seq=7)  # it was still in the queue
    assert intake.acknowledged(N1, B) == 0
    assert intake.accept(N1, B, seq=1)


def test_a_restarted_master_knows_what_was_taken() -> None:
    intake = Intake()
    for event in (declared(), joined(), prepared(1), joined(B), prepared(1, B), prepared(4, B)):
        intake.remember(event)
    assert intake.acknowledged(N1, B) == 4
    assert not intake.accept(N1, B, seq=4)
    assert intake.accept(N1, B, seq=5)


# Table and commits ------------------------------------------------------------------------------------------


def test_a_heartbeat_of_another_life_changes_nothing() -> None:
    table = NodeTable()
    here = Identity(job=JobId("job-1"), node=N1, incarnation=A)
    agent = (ProcessInfo(role=Role.AGENT, pid=1),)
    hello = Hello(software="t", address="x", workers=1, min_nodes=1, max_nodes=1, processes=agent)
    table.hello(here, hello, now=1.0)
    other = Identity(job=JobId("job-1"), node=N1, incarnation=B)
    table.beat(other, Heartbeat(phase=AgentPhase.RUNNING, processes=()), now=2.0)
    table.beat(here, Heartbeat(phase=AgentPhase.PREPARED), now=3.0)
    row = table.row(N1, A)
    assert row is not None
    assert (row.phase, row.heard_s, row.processes) == (AgentPhase.PREPARED, 3.0, agent)
    assert table.row(N1, B) is None
    table.gone(N1, B)
    assert row.processes == agent
    table.gone(N1, A)
    assert row.processes == ()


def test_only_the_newest_commit_of_each_kind_is_held() -> None:
    held = HeldCommits()
    assert not held.due(1e9)
    held.hold(committed(1, durable=False), 10.0)
    held.hold(committed(1, durable=True), 11.0)
    held.hold(committed(2, durable=False), 12.0)
    assert not held.due(10.0 + COMMIT_HOLD_S - 0.1)
    assert held.due(10.0 + COMMIT_HOLD_S)
    assert held.newest(None, durable=False) == 2
    assert held.newest(9, durable=True) == 9
    assert [(fact.step, fact.durable) for fact in held.take()] == [(1, True), (2, False)]
    assert held.take() == ()
    assert held.newest(None, durable=True) is None
    assert not held.due(1e9)


def test_a_month_of_commits_is_a_short_journal() -> None:
    held, written = HeldCommits(), 0
    for at_s in range(0, 30 * 86_400, 5):
        held.hold(committed(at_s, durable=False), float(at_s))
        held.hold(committed(at_s, durable=True), float(at_s))
        if held.due(float(at_s)):
            written += len(held.take())
    assert 5_000 < written < 20_000


# Recovery ---------------------------------------------------------------------------------------------------


def standing(journal: MemoryJournal | None = None) -> Standing:
    return from_journal(journal or MemoryJournal(), policy=Policy(), clock=SystemClock())


def write(state_dir: Path, *events: object) -> None:
    """A life of a master that takes in these events and then dies."""
    stood = stand_up(state_dir, policy=Policy(), clock=SystemClock(), revived=False)
    with stood.journal:
        for event in events:
            now = stood.clock.now()
            decision = stood.machine.step(event, now)  # type: ignore[arg-type]
            record = Record(
                event=event,  # type: ignore[arg-type]
                decision=decision,
                digest=stood.machine.digest(),
                at_s=now,
                wall_s=stood.clock.wall(),
            )
            stood.journal.append([record])


def finished() -> tuple[object, ...]:
    started = WorkersStarted(node=N1, incarnation=A, seq=2, generation=Generation(1))
    exited = WorkerExited(
        node=N1,
        incarnation=A,
        seq=3,
        generation=Generation(1),
        local_rank=0,
        rank=0,
        exit_code=0,
        signal=None,
        step=9,
    )
    return declared(), joined(), prepared(1), started, exited


def test_a_job_under_way_is_gone_on_with(tmp_path: Path) -> None:
    write(tmp_path, declared(), joined(), prepared(1))
    stood = stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False)
    with stood.journal:
        assert (stood.life.epoch, stood.replayed) == (2, 3)
        assert stood.intake.acknowledged(N1, A) == 1
        assert stood.machine.view(stood.clock.now()).generation == 1


@pytest.mark.parametrize("goodbye", [(), (NodeLeft(node=N1, incarnation=A, seq=4, exit_code=0),)])
def test_a_job_that_is_over_begins_anew_unless_its_master_is_revived(
    tmp_path: Path, goodbye: tuple[object, ...]
) -> None:
    write(tmp_path, *finished(), *goodbye)
    stood = stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=True)
    with stood.journal:
        outstanding = stood.machine.outstanding(stood.clock.now())
        assert any(isinstance(command, FinishJob) for command in outstanding)
    stood = stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False)
    with stood.journal:
        assert (stood.life.epoch, stood.replayed) == (1, 0)
    assert (tmp_path / "journal-1.db").exists()


def preempted() -> tuple[object, ...]:
    """A job of one node that lost a worker once and was preempted then."""
    *begun, _ = finished()
    failed = replace(finished()[-1], exit_code=1)  # type: ignore[type-var]
    stop = StopRequested(node=N1, incarnation=A, seq=4, kind=StopKind.PREEMPTION, signal=15)
    return *begun, failed, stop


def test_a_requeued_job_keeps_what_it_has_spent(tmp_path: Path) -> None:
    write(tmp_path, *preempted())
    for _ in range(2):  # a master that is killed right after its first entry knows it, too
        stood = stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False)
        with stood.journal:
            assert stood.machine.state.job.history.restarts == 1
            assert stood.machine.state.job.seen_generation == 2
            (entry,) = stood.journal.entries()
            assert isinstance(entry.record.event, Requeued)
            assert stood.clock.now() >= entry.record.at_s > 0


def test_a_master_that_was_killed_before_it_took_that_over_takes_it_over(tmp_path: Path) -> None:
    write(tmp_path, *preempted())
    with SqliteJournal.open(tmp_path / JOURNAL_NAME) as journal:
        assert isinstance(journal, SqliteJournal)
        journal.set_aside(tmp_path / "journal-1.db")  # and no more
    stood = stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False)
    with stood.journal:
        assert stood.machine.state.job.history.restarts == 1


def test_a_job_that_ended_for_good_or_cannot_be_read_begins_with_nothing(tmp_path: Path) -> None:
    write(tmp_path, *finished())
    stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False).journal.close()
    (tmp_path / "journal-2.db").write_bytes(b"no journal" * 1000)
    stood = stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False)
    with stood.journal:
        assert stood.replayed == 0
        assert stood.machine.state.job.phase is JobPhase.UNDECLARED


KILLED_ON_THE_WAY = """
import os, sys
from pathlib import Path
from aimaster.clock import SystemClock
from aimaster.core.policy import Policy
from aimaster.master.recovery import stand_up
folder, left = sys.argv[1], int(sys.argv[2])
def hook(event, arguments):
    global left
    if event in ("os.remove", "os.rename") or (event == "open" and arguments[0] == folder):
        if left == 0:
            os._exit(0)
        left -= 1
sys.addaudithook(hook)
stand_up(Path(folder), policy=Policy(), clock=SystemClock(), revived=False)
os._exit(1)
"""


@pytest.mark.parametrize("left", range(4))
def test_a_kill_while_a_journal_is_set_aside_loses_no_word_of_it(tmp_path: Path, left: int) -> None:
    write(tmp_path, *finished())
    with SqliteJournal.read(tmp_path / JOURNAL_NAME) as reader:  # so that the log is not gone of itself
        told = tuple(reader.entries())
        subprocess.run([sys.executable, "-c", KILLED_ON_THE_WAY, str(tmp_path), str(left)], check=True)
    stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False).journal.close()
    with SqliteJournal.read(tmp_path / "journal-1.db") as kept:
        assert tuple(kept.entries()) == told
    assert not (tmp_path / "journal-2.db").exists()


def test_two_masters_never_write_one_journal(tmp_path: Path) -> None:
    stood = stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False)
    with stood.journal, pytest.raises(AlreadyRunning):
        stand_up(tmp_path, policy=Policy(), clock=SystemClock(), revived=False)


def test_a_state_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderUnusable, match="--state-dir"):
        stand_up(tmp_path / "file" / "below", policy=Policy(), clock=SystemClock(), revived=False)
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage" / JOURNAL_NAME).write_bytes(b"not a database at all" * 100)
    with pytest.raises(Exception, match="journal"):
        stand_up(tmp_path / "garbage", policy=Policy(), clock=SystemClock(), revived=False)


# Ledger -----------------------------------------------------------------------------------------------------


class FullDisk(MemoryJournal):
    """A file system that is full for the first few writes."""

    def __init__(self, refusals: int) -> None:
        super().__init__()
        self.refusals = refusals

    def append(self, records: Sequence[Record]) -> int:
        if self.refusals > 0:
            self.refusals -= 1
            raise NoSpace("the disk is full", where="here")
        return super().append(records)


async def run_ledger(ledger: Ledger) -> asyncio.Task[None]:
    return asyncio.create_task(ledger.run())


async def stop(task: asyncio.Task[None], ledger: Ledger) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    ledger.close()


def test_what_is_carried_out_is_in_the_journal_first() -> None:
    async def scenario() -> None:
        stood = standing()
        seen: list[tuple[int, int]] = []

        def carry_out(entry: Entry) -> None:
            last = stood.journal.last()
            assert last is not None
            assert last.seq >= entry.seq
            seen.append((entry.seq, threading.get_ident()))

        ledger = Ledger(stood, carry_out=carry_out)
        task = await run_ledger(ledger)
        await ledger.settle(declared())
        await ledger.settle(joined())
        assert seen == [(1, threading.get_ident()), (2, threading.get_ident())]
        await stop(task, ledger)

    asyncio.run(scenario())


def test_an_illegal_event_changes_nothing_and_is_not_journalled() -> None:
    async def scenario() -> None:
        stood = standing()
        ledger = Ledger(stood, carry_out=lambda _: None)
        task = await run_ledger(ledger)
        assert isinstance(await ledger.settle(joined()), IllegalEvent)
        assert stood.journal.last() is None
        await ledger.settle(declared())
        assert not task.done()
        await stop(task, ledger)

    asyncio.run(scenario())


def test_late_messages_do_not_fill_the_journal() -> None:
    async def scenario() -> None:
        stood = standing()
        ledger = Ledger(stood, carry_out=lambda _: None)
        task = await run_ledger(ledger)
        for event in (declared(), joined(), prepared(1)):
            await ledger.settle(event)
        before = stood.journal.last()
        for seq in range(2, 50):
            await ledger.settle(prepared(seq, B))  # a life that nobody knows
        assert stood.journal.last() == before
        await stop(task, ledger)

    asyncio.run(scenario())


def test_a_full_disk_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "FULL_DISK_RETRY_S", 0.05)

    async def scenario() -> None:
        stood = standing(FullDisk(refusals=3))
        carried: list[Entry] = []
        ledger = Ledger(stood, carry_out=carried.append)
        task = await run_ledger(ledger)
        arrival = asyncio.create_task(ledger.settle(declared()))
        while not ledger.trouble:
            await asyncio.sleep(0.005)
        assert not carried
        await arrival
        assert ledger.trouble == ""
        assert [entry.seq for entry in carried] == [1]
        await stop(task, ledger)

    asyncio.run(scenario())


def test_a_burst_is_few_transactions() -> None:
    class Counting(MemoryJournal):
        writes = 0

        def append(self, records: Sequence[Record]) -> int:
            Counting.writes += 1
            return super().append(records)

    async def scenario() -> None:
        stood = standing(Counting())
        ledger = Ledger(stood, carry_out=lambda _: None)
        task = await run_ledger(ledger)
        await ledger.settle(declared())
        for number in range(1000):
            node = NodeId(f"n{number}")
            ledger.put(NodeJoined(node=node, incarnation=A, address="127.0.0.1", workers=1))
        await ledger.settle(joined(B))
        last = stood.journal.last()
        assert last is not None
        assert last.seq >= 1000
        assert Counting.writes < 20
        await stop(task, ledger)

    asyncio.run(scenario())
