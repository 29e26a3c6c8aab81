"""What every journal must do. Each implementation runs all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from aimaster.core.policy import Budget, Policy
from aimaster.ids import Incarnation
from aimaster.journal.base import Journal
from aimaster.journal.memory import MemoryJournal
from aimaster.journal.replay import recover, replay
from aimaster.journal.sqlite import SqliteJournal
from tests.unit.aimaster.journal.stories import WALL_S, a_job, records, write

Reopen = Callable[[], Journal]


@pytest.fixture(params=["memory", "sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Reopen]:
    """Opens one and the same journal, each time as a new master would; closes what is open before."""
    current: list[Journal] = []

    def again() -> Journal:
        last = current.pop() if current else None
        if last is not None:
            last.close()
        if request.param == "memory":
            journal: Journal = last.reopen() if isinstance(last, MemoryJournal) else MemoryJournal()
        else:
            journal = SqliteJournal.open(tmp_path / "journal.db")
        current.append(journal)
        return journal

    yield again
    for journal in current:
        journal.close()


def test_a_new_journal_is_empty(reopen: Reopen) -> None:
    journal = reopen()
    assert journal.last() is None
    assert list(journal.entries()) == []
    assert journal.lives() == ()


def test_what_is_appended_comes_back_equal_and_in_order(reopen: Reopen) -> None:
    written = records(a_job())
    journal = reopen()
    journal.begin_life(Incarnation("m1"), policy=Policy(), at_s=0.0, wall_s=WALL_S)
    assert journal.append(written[:1]) == 1
    assert journal.append(written[1:4]) == 4
    assert journal.append([]) == 4
    assert journal.append(written[4:]) == len(written)
    again = reopen()
    entries = list(again.entries())
    assert [entry.record for entry in entries] == written
    assert [entry.seq for entry in entries] == list(range(1, len(written) + 1))
    assert {entry.epoch for entry in entries} == {1}
    assert again.last() == entries[-1]
    assert list(again.entries(after=3)) == entries[3:]
    assert list(again.entries(after=10_000)) == []


def test_many_more_entries_than_are_read_at_a_time(reopen: Reopen) -> None:
    record = records(a_job())[0]
    journal = reopen()
    journal.begin_life(Incarnation("m1"), policy=Policy(), at_s=0.0, wall_s=WALL_S)
    journal.append([record] * 1501)
    assert [entry.seq for entry in reopen().entries(after=1)] == list(range(2, 1502))


def test_nothing_is_appended_before_a_life_has_begun(reopen: Reopen) -> None:
    journal = reopen()
    with pytest.raises(RuntimeError, match="begin_life"):
        journal.append(records(a_job())[:1])
    write(journal, a_job())
    count = len(list(journal.entries()))
    with pytest.raises(RuntimeError, match="begin_life"):
        reopen().append(records(a_job())[:1])
    assert len(list(reopen().entries())) == count


def test_all_or_none(reopen: Reopen) -> None:
    written = records(a_job())
    journal = reopen()
    journal.begin_life(Incarnation("m1"), policy=Policy(), at_s=0.0, wall_s=WALL_S)
    unknown = replace(written[1], event=object())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cannot hold"):
        journal.append([written[0], unknown, written[2]])
    assert list(journal.entries()) == []
    assert journal.append(written[:2]) == 2


def test_each_life_opens_an_epoch_and_keeps_its_policy(reopen: Reopen) -> None:
    strict = Policy(worker_failures=Budget(limit=1))
    reopen().begin_life(Incarnation("m1"), policy=Policy(), at_s=0.0, wall_s=WALL_S)
    life = reopen().begin_life(Incarnation("m2"), policy=strict, at_s=5.0, wall_s=WALL_S + 5)
    assert (life.epoch, life.incarnation, life.policy) == (2, "m2", strict)
    assert [(life.epoch, life.incarnation, life.policy) for life in reopen().lives()] == [
        (1, "m1", Policy()),
        (2, "m2", strict),
    ]


def test_a_replay_stands_where_the_master_stood(reopen: Reopen) -> None:
    play = a_job()
    write(reopen(), play)
    machine = replay(reopen())
    assert machine.digest() == play.machine.digest()
    assert machine.view(play.now) == play.view()


def test_every_prefix_of_a_journal_is_a_journal(reopen: Reopen) -> None:
    journal = reopen()
    journal.begin_life(Incarnation("m1"), policy=a_job().machine.policy, at_s=0.0, wall_s=WALL_S)
    for record in records(a_job()):
        journal.append([record])
        assert replay(journal).digest() == record.digest


def test_after_a_crash_at_any_point_the_same_decisions_follow(tmp_path: Path) -> None:
    """Whichever record was the last one that was written, no attempt is counted twice and none forgotten."""
    written = records(a_job())
    policy = a_job().machine.policy
    for count in range(len(written) + 1):
        with SqliteJournal.open(tmp_path / f"{count}.db") as journal:
            journal.begin_life(Incarnation("m1"), policy=policy, at_s=0.0, wall_s=WALL_S)
            for record in written[:count]:
                journal.append([record])
        with SqliteJournal.open(tmp_path / f"{count}.db") as journal:
            machine = recover(journal, incarnation=Incarnation("m2"), policy=policy, wall_s=WALL_S).machine
            for record in written[count:]:
                assert machine.step(record.event, record.at_s) == record.decision
                assert machine.digest() == record.digest
            assert machine.state.job.starts == a_job().machine.state.job.starts
            assert machine.state.job.history == a_job().machine.state.job.history


def test_the_jobs_clock_goes_on_while_no_master_lives_and_never_back(reopen: Reopen) -> None:
    play = a_job()
    write(reopen(), play)
    later = recover(reopen(), incarnation=Incarnation("m2"), policy=Policy(), wall_s=WALL_S + play.now + 60)
    assert later.at_s == pytest.approx(play.now + 60, abs=0.001)
    assert (later.life.epoch, later.replayed) == (2, len(play.seen))
    back = recover(reopen(), incarnation=Incarnation("m3"), policy=Policy(), wall_s=WALL_S - 1e6)
    assert back.at_s == pytest.approx(play.now)


def test_events_are_judged_by_the_policy_of_their_life(reopen: Reopen) -> None:
    play = a_job()
    write(reopen(), play)
    strict = Policy(worker_failures=Budget(limit=0), node_losses=Budget(limit=0))
    recovered = recover(reopen(), incarnation=Incarnation("m2"), policy=strict, wall_s=WALL_S)
    assert recovered.machine.policy == strict
    assert recovered.machine.digest() == play.machine.digest()


def test_closing_twice_is_nothing(reopen: Reopen) -> None:
    journal = reopen()
    journal.close()
    journal.close()
