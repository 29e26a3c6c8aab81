"""`RestartScope.NODE`: one node's workers start again while the others go on."""

from __future__ import annotations

from typing import Any

import pytest

from aimaster.core.commands import Decision, Prepare, Reason
from aimaster.core.events import AgentPhase, RestartScope, TimerKind, WorkersHung, WorkersStarted
from aimaster.core.events import HangKind as Kind
from aimaster.core.policy import Budget, Policy
from aimaster.core.state import JobPhase, NodeState
from aimaster.ids import NodeId
from tests.unit.aimaster.core.play import Play, of, told_to_end, told_to_prepare, told_to_start


class Nodes(Play):
    """A job whose nodes start alone: each is addressed by its own generation."""

    def __init__(self, nodes: tuple[int, int] = (2, 2), **more: Any) -> None:
        super().__init__(nodes, scope=RestartScope.NODE, **more)

    def current(self, node: str) -> dict[str, Any]:
        seen = self.view().node(NodeId(node))
        assert seen is not None
        return {**self.about(node), "generation": seen.generation}


def running(*names: str, nodes: tuple[int, int] | None = None, **more: Any) -> Nodes:
    play = Nodes(nodes or (len(names), len(names)), **more)
    play.run(*names, workers=2)
    assert play.view().phase is JobPhase.RUNNING
    return play


def state(play: Play, node: str) -> NodeState:
    seen = play.view().node(NodeId(node))
    assert seen is not None
    return seen.state


def test_each_node_leads_itself() -> None:
    play = Nodes()
    for node in ("a", "b"):
        play.join(node, workers=2)
    starts = told_to_start(play.prepared("a", "b"))
    assert {s.node: (s.master_addr, s.master_port, s.saver_lead) for s in starts.values()} == {
        "a": ("a.net", 1000 + ord("a"), "a.net:7"),
        "b": ("b.net", 1000 + ord("b"), "b.net:7"),
    }


def test_a_failed_worker_restarts_its_node_alone() -> None:
    play = running("a", "b")
    before = play.view().node(NodeId("a"))
    decision = play.exited("b", local_rank=1)
    assert told_to_prepare(decision) == ["b"]
    assert play.view().phase is JobPhase.RUNNING
    started = told_to_start(play.prepared("b"))
    assert list(started) == ["b"]
    assert (started["b"].node_rank, started["b"].first_rank, started["b"].world_size) == (1, 2, 4)
    assert started["b"].attempt == 1
    assert play.started("b").reason is Reason.WORKERS_RUNNING
    assert play.view().node(NodeId("a")) == before
    assert play.view().restarts == 1


def test_two_nodes_start_again_at_the_same_time() -> None:
    play = running("a", "b", "c")
    play.exited("a")
    play.exited("b")
    assert {n: state(play, n) for n in "abc"} == {
        "a": NodeState.PREPARING,
        "b": NodeState.PREPARING,
        "c": NodeState.RUNNING,
    }
    play.prepared("b")
    play.prepared("a")
    play.started("a", "b")
    assert state(play, "a") is state(play, "b") is NodeState.RUNNING
    assert play.view().timers == ()


def test_the_others_may_finish_meanwhile() -> None:
    play = running("a", "b")
    play.exited("b")
    play.exited("a", local_rank=0, code=0)
    play.exited("a", local_rank=1, code=0)
    assert play.view().phase is JobPhase.RUNNING
    play.prepared("b")
    play.started("b")
    play.exited("b", local_rank=0, code=0)
    decision = play.exited("b", local_rank=1, code=0)
    assert decision.reason is Reason.JOB_FINISHED
    assert told_to_end(decision) == {"a": 0, "b": 0}


def test_the_second_worker_of_a_broken_node_is_old_news() -> None:
    play = running("a", "b")
    old = play.current("b")["generation"]
    play.exited("b", local_rank=0)
    assert play.exited("b", local_rank=1, generation=old).reason is Reason.STALE


def test_a_lost_node_gives_its_seat_to_a_spare() -> None:
    play = running("a", "b", nodes=(2, 2))
    play.join("c", workers=2)
    assert told_to_prepare(play.died("b")) == ["c"]
    start = told_to_start(play.prepared("c"))["c"]
    assert (start.node_rank, start.first_rank) == (1, 2)
    assert state(play, "a") is NodeState.RUNNING


@pytest.mark.parametrize("spare", [None, 1])
def test_without_a_fitting_spare_the_whole_job_waits(spare: int | None) -> None:
    play = running("a", "b")
    if spare is not None:
        play.join("c", workers=spare)
    decision = play.died("b")
    # The spare with another number of workers changes everyone's ranks: all start again.
    assert told_to_prepare(decision) == (["a"] if spare is None else ["a", "c"])
    assert play.view().phase is (JobPhase.WAITING if spare is None else JobPhase.PREPARING)


def test_an_agent_that_started_anew_takes_its_own_seat() -> None:
    play = running("a", "b")
    assert told_to_prepare(play.join("b", life="2", workers=2)) == ["b"]
    assert play.prepared("b").reason is Reason.GENERATION_PREPARED


def test_a_node_that_cannot_do_it_gives_way_to_a_spare() -> None:
    play = running("a", "b")
    play.join("c", workers=2)
    play.exited("b")
    decision = play.failed("b")  # an unkillable worker
    assert [c.node for c in of(decision, Prepare) if c.reason is not Reason.NODE_IS_SPARE] == ["c"]
    assert state(play, "b") is NodeState.SPARE
    assert state(play, "a") is NodeState.RUNNING


def test_a_late_node_is_set_aside() -> None:
    play = running("a", "b")
    play.join("c", workers=2)
    play.exited("b")
    assert told_to_prepare(play.timer(TimerKind.UNIT)) == ["c"]
    assert state(play, "b") is NodeState.ASIDE
    play.prepared("c")
    assert told_to_prepare(play.timer(TimerKind.UNIT)) == ["a"]  # nobody is left for that seat
    assert play.view().phase is JobPhase.WAITING


def test_before_everyone_runs_the_whole_job_starts_again() -> None:
    play = Nodes()
    for node in ("a", "b"):
        play.join(node, workers=2)
    play.prepared("a", "b")
    play.started("a")
    assert told_to_prepare(play.exited("a")) == ["a", "b"]


def test_a_hang_restarts_the_node_that_hangs() -> None:
    play = running("a", "b")
    hung = WorkersHung(
        generation=play.current("b")["generation"],
        kind=Kind.STOPPED,
        node=NodeId("b"),
        culprits=(3,),
        stalled_s=4.0,
        limit_s=3.0,
        step=7,
    )
    assert told_to_prepare(play.tell(hung)) == ["b"]
    assert play.tell(hung).reason is Reason.STALE


def fails_at(play: Play, node: str, step: int, digest: str) -> Decision:
    decision = play.exited(node, code=1, step=step, error_digest=digest)
    if decision.reason is Reason.WORKER_FAILED:
        play.prepared(node)
        play.started(node)
    return decision


def test_a_seat_that_gets_nowhere_is_not_helped_by_the_steps_of_another() -> None:
    play = running("a", "b")
    for attempt in range(3):
        play.committed("a", 100 * (attempt + 1))
        decision = fails_at(play, "b", 5, f"e{attempt}")
        assert (decision.reason is Reason.NO_PROGRESS) == (attempt == 3)
    play.committed("a", 1000)
    assert fails_at(play, "b", 5, "e3").reason is Reason.NO_PROGRESS


def test_errors_of_two_seats_are_not_the_same_error() -> None:
    play = running("a", "b")
    assert fails_at(play, "a", 5, "e").reason is Reason.WORKER_FAILED
    assert fails_at(play, "b", 5, "e").reason is Reason.WORKER_FAILED
    assert fails_at(play, "a", 5, "e").reason is Reason.SAME_ERROR_TWICE


def test_restarts_and_charges_count_for_the_job() -> None:
    play = running("a", "b", policy=Policy(worker_failures=Budget(limit=1)))
    assert fails_at(play, "a", 5, "e1").reason is Reason.WORKER_FAILED
    assert fails_at(play, "b", 6, "e2").reason is Reason.BUDGET_SPENT
    capped = running("a", "b", max_restarts=1)
    assert fails_at(capped, "a", 5, "e1").reason is Reason.WORKER_FAILED
    assert fails_at(capped, "b", 6, "e2").reason is Reason.BUDGET_SPENT


def test_a_seat_is_told_to_expect_its_own_checkpoint_alone() -> None:
    play = running("a", "b", nodes=(2, 2))
    play.committed("a", 10)
    play.exited("b")
    assert not told_to_start(play.prepared("b"))["b"].progress_expected
    play.started("b")
    play.join("c", workers=2)
    play.died("a")
    assert told_to_start(play.prepared("c"))["c"].progress_expected


def test_an_agent_that_was_cut_off_hears_the_same_start_again() -> None:
    play = running("a", "b")
    play.exited("a")
    play.exited("b")
    first = told_to_start(play.prepared("a"))["a"]
    play.prepared("b")
    again = play.join("a", workers=2, phase=AgentPhase.PREPARED, generation=first.generation)
    assert told_to_start(again)["a"] == first


def test_what_was_said_twice_changes_nothing() -> None:
    play = running("a", "b")
    play.exited("b")
    play.prepared("b")
    play.started("b")
    digest = play.machine.digest()
    assert play.tell(WorkersStarted(**play.current("b"))).commands == ()
    assert play.machine.digest() == digest
