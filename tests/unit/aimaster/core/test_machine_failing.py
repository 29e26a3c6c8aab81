"""Workers that fail, nodes that go or do not do what they are told, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from aimaster.core.commands import CheckNode, Prepare, Reason
from aimaster.core.events import (
    HangKind,
    NodePrepared,
    NodeSuspected,
    RankSlow,
    StepCommitted,
    StopKind,
    Tier,
    TimerKind,
    WorkerExited,
    WorkersHung,
)
from aimaster.core.policy import EXIT_BUDGET, EXIT_USER_ERROR, Budget, Cause, Policy, Timeouts
from aimaster.core.sentences import sentence
from aimaster.core.state import JobPhase, NodeState
from aimaster.ids import Generation, NodeId
from tests.unit.aimaster.core.play import Play, of, told_to_end, told_to_prepare, told_to_start


def used(play: Play, cause: Cause) -> int:
    return next(budget.used for budget in play.view().budgets if budget.cause is cause)


def state_of(play: Play, node: str) -> NodeState:
    seen = play.view().node(NodeId(node))
    assert seen is not None
    return seen.state


def test_a_killed_worker_restarts_all_and_counts_once() -> None:
    play = Play((2, 2))
    play.run("a", "b", workers=2)
    play.committed("a", 7)
    late = WorkerExited(
        **play.current("b"), local_rank=0, rank=2, exit_code=1, signal=None, step=7, error="reset by peer"
    )
    decision = play.exited("a", local_rank=1, step=7)
    assert decision.reason is Reason.WORKER_FAILED
    assert decision.facts["signal"] == 9
    assert decision.facts["rank"] == 1
    assert told_to_prepare(decision) == ["a", "b"]
    before = play.machine.digest()
    assert play.tell(late).reason is Reason.STALE
    assert play.machine.digest() == before
    play.prepared("a")
    started = told_to_start(play.prepared("b"))
    assert {c.attempt for c in started.values()} == {1}
    assert all(c.progress_expected for c in started.values())
    assert used(play, Cause.WORKER_FAILED) == 1


def test_the_job_finishes_when_every_rank_has() -> None:
    play = Play((2, 2))
    play.run("a", "b", workers=2)
    play.join("spare")
    assert play.exited("a", local_rank=0, code=0).reason is Reason.WORKER_FINISHED
    play.exited("a", local_rank=1, code=0)
    play.exited("b", local_rank=1, code=0)
    decision = play.exited("b", local_rank=0, code=0)
    assert told_to_end(decision) == {"a": 0, "b": 0, "spare": 0}
    assert play.view().exit_code == 0
    play.left("a")
    play.left("spare")
    assert play.view().phase is JobPhase.ENDING
    play.left("b")
    assert play.view().phase is JobPhase.ENDED


def test_a_node_that_has_finished_may_go_without_harm() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.exited("a", code=0)
    assert play.died("a").commands == ()
    assert play.view().phase is JobPhase.RUNNING
    assert play.exited("b", code=0).reason is Reason.JOB_FINISHED


def test_a_spare_takes_the_place_of_a_lost_node() -> None:
    play = Play((3, 3))
    play.run("a", "b", "c")
    play.join("d")
    assert told_to_prepare(play.died("b")) == ["a", "c", "d"]
    assert play.view().members == ("a", "d", "c")


def test_without_a_spare_the_job_shrinks_and_high_ranks_move_down() -> None:
    play = Play((1, 3))
    play.run("a", "b", "c")
    decision = play.died("a")
    assert told_to_prepare(decision) == ["b", "c"]
    assert play.view().members == ("c", "b")


def test_below_the_minimum_survivors_stop_and_wait_and_waiting_costs_nothing() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    decision = play.died("b")
    assert told_to_prepare(decision) == ["a"]
    assert play.view().phase is JobPhase.WAITING
    play.prepared("a")
    play.now += 500.0
    spent = [budget.used for budget in play.view().budgets]
    play.join("x")
    play.restart()
    assert [budget.used for budget in play.view().budgets] == spent == [0, 0, 1, 0]
    assert play.view().members == ("a", "x")


def test_below_the_minimum_for_too_long_ends_with_22() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.died("b")
    decision = play.timer(TimerKind.REPLACEMENT)
    assert told_to_end(decision) == {"a": 22}


def test_a_lost_node_explains_the_failures_of_its_partners() -> None:
    """A survivor's worker fails within milliseconds; that its partner is gone is known seconds later."""
    play = Play((2, 2))
    play.run("a", "b")
    play.join("c")
    play.exited("a", code=1, error_digest="reset")
    assert used(play, Cause.WORKER_FAILED) == 1
    play.prepared("a")
    decision = play.died("b")
    assert told_to_prepare(decision) == ["a", "c"]
    assert (used(play, Cause.WORKER_FAILED), used(play, Cause.NODE_LOST)) == (0, 1)
    assert play.view().restarts == 1
    play.restart()
    # The partner's traceback was a consequence: the same one again is not "the same error twice".
    play.exited("a", code=1, error_digest="reset")
    assert play.view().exit_code is None


def test_a_rack_that_goes_is_one_misfortune() -> None:
    names = [f"n{index}" for index in range(30)]
    play = Play((1, 40), policy=Policy(node_losses=Budget(limit=1), node_failures=Budget(limit=29)))
    for name in names:
        play.join(name)
    play.timer(TimerKind.LAST_CALL)
    play.restart()
    for name in names[1:]:
        play.died(name)
    assert play.view().exit_code is None
    assert used(play, Cause.NODE_LOST) == 1
    assert play.view().restarts == 1
    assert play.view().members == ("n0",)


def test_a_member_that_is_not_prepared_in_time_is_set_aside_and_comes_back_when_clean() -> None:
    play = Play((2, 2))
    play.join("a")
    play.join("b")
    play.join("c")
    play.prepared("a")
    told = play.view().generation
    decision = play.timer(TimerKind.PREPARE)
    assert decision.reason is Reason.PREPARE_TIMED_OUT
    assert told_to_prepare(decision) == ["a", "c"]
    assert state_of(play, "b") is NodeState.ASIDE
    late = {**play.about("b"), "generation": told, "rendezvous_port": 5}
    assert play.tell(NodePrepared(**late)).reason is Reason.NODE_IS_SPARE
    assert state_of(play, "b") is NodeState.SPARE


def test_a_node_that_fails_is_tried_again_last_and_then_set_aside() -> None:
    play = Play((1, 1))
    play.join("a")
    assert told_to_prepare(play.failed("a")) == ["a"]
    play.join("b")
    assert told_to_prepare(play.failed("a")) == ["b"]
    assert state_of(play, "a") is NodeState.ASIDE
    assert play.join("a", life="2").reason is Reason.NODE_IS_SPARE
    assert state_of(play, "a") is NodeState.SPARE


def test_a_failure_that_is_reported_twice_counts_once() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.died("b")
    play.failed("a")
    before = play.machine.digest()
    assert play.failed("a").reason is Reason.NOTHING_TO_DO
    assert play.machine.digest() == before


def test_a_suspect_is_chosen_last_but_before_the_job_shrinks() -> None:
    play = Play((1, 2))
    play.run("a", "b")
    play.tell(NodeSuspected(**play.about("b"), silent_s=3.0))
    assert told_to_prepare(play.exited("a")) == ["a", "b"]
    play.join("c")
    play.restart()
    play.committed("a", 3)
    decision = play.exited("a")
    assert play.view().members == ("a", "c")
    # The one that was left out may still run workers: it is told to stop them as well.
    assert told_to_prepare(decision) == ["a", "b", "c"]


@pytest.mark.parametrize(("kind", "code"), [(StopKind.INTERRUPT, 130), (StopKind.PREEMPTION, 10)])
def test_a_stop_ends_everyone(kind: StopKind, code: int) -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.join("spare")
    decision = play.stop("b", kind)
    assert told_to_end(decision) == {"a": code, "b": code, "spare": code}
    assert play.stop("a", kind).reason is Reason.NOTHING_TO_DO


def test_a_spare_that_is_taken_back_does_not_end_the_job() -> None:
    play = Play((1, 1))
    play.run("a")
    play.join("spare")
    assert told_to_end(play.stop("spare", StopKind.PREEMPTION)) == {"spare": 10}
    play.left("spare")
    assert play.view().phase is JobPhase.RUNNING
    assert told_to_end(play.exited("a", code=0)) == {"a": 0}


def test_max_restarts_0_ends_at_the_first_failure_with_20() -> None:
    play = Play((1, 1), max_restarts=0)
    play.run("a")
    play.join("spare")
    decision = play.exited("a", code=1, error="ValueError: no", step=3)
    assert told_to_end(decision) == {"a": 20, "spare": 0}
    assert decision.reason is Reason.BUDGET_SPENT


def test_max_restarts_caps_restarts() -> None:
    play = Play((1, 1), max_restarts=2)
    play.run("a")
    for step in (1, 2):
        play.committed("a", step)
        play.exited("a")
        play.restart()
    play.committed("a", 3)
    assert told_to_end(play.exited("a")) == {"a": 21}
    assert play.view().restarts == 2


def test_the_same_error_at_the_same_step_twice_ends_with_20() -> None:
    play = Play((1, 1))
    play.run("a")
    play.exited("a", code=1, step=5, error_digest="d")
    play.restart()
    decision = play.exited("a", code=1, step=5, error_digest="d")
    assert (decision.reason, play.view().exit_code) == (Reason.SAME_ERROR_TWICE, 20)


def test_three_attempts_that_get_no_further_end_with_21() -> None:
    play = Play((1, 1))
    play.run("a")
    play.committed("a", 10)
    for _ in range(3):
        assert play.exited("a").reason is Reason.WORKER_FAILED
        play.restart()
    decision = play.exited("a")
    assert (decision.reason, play.view().exit_code) == (Reason.NO_PROGRESS, 21)


def test_what_was_restored_is_what_memory_holds_and_progress_stays_expected() -> None:
    play = Play((1, 1))
    play.run("a")
    play.committed("a", 10)
    play.committed("a", 5, durable=True)
    play.exited("a")
    play.restart()
    play.restored("a", 5, Tier.DISK)
    assert (play.view().memory_step, play.view().durable_step) == (5, 5)
    play.exited("a")
    assert all(c.progress_expected for c in told_to_start(play.prepared("a")).values())


def test_a_durable_step_counts_whatever_became_of_its_generation_but_one_in_memory_does_not() -> None:
    play = Play((1, 1))
    play.run("a")
    play.exited("a")
    old = {**play.about("a"), "generation": Generation(1), "step": 9}
    assert play.tell(StepCommitted(**old, durable=False)).reason is Reason.STALE
    assert play.view().memory_step is None
    play.tell(StepCommitted(**old, durable=True))
    assert play.view().durable_step == 9


def test_workers_that_do_not_start_in_time_cost_their_node_its_seat() -> None:
    play = Play((2, 2))
    play.join("a")
    play.join("b")
    play.join("c")
    play.prepared("a", "b")
    play.started("a")
    decision = play.timer(TimerKind.START)
    assert decision.reason is Reason.START_TIMED_OUT
    assert told_to_prepare(decision) == ["a", "c"]


def test_whoever_does_not_say_goodbye_is_not_waited_for_for_ever() -> None:
    play = Play((1, 1))
    play.run("a")
    play.exited("a", code=0)
    play.timer(TimerKind.DRAIN)
    assert play.view().phase is JobPhase.ENDED
    # It may still come, and is told again.
    assert told_to_end(play.join("a")) == {"a": 0}


def test_latecomers_are_told_that_it_is_over() -> None:
    play = Play((1, 1))
    play.run("a")
    play.exited("a", code=0)
    assert told_to_end(play.join("b")) == {"b": 0}


def test_a_restarted_master_arms_its_timers_with_what_is_left() -> None:
    play = Play((1, 1), policy=Policy(timeouts=Timeouts(prepare_s=100.0)))
    play.join("a")
    (timer,) = play.machine.outstanding(play.now + 40.0)
    assert timer == replace(of(play.seen[-1][1], type(timer))[0], after_s=pytest.approx(60.0))


def test_the_newest_generation_is_the_only_one_that_is_prepared() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.join("c")
    play.join("d")
    generations = [{c.generation for c in of(play.died(node), Prepare)} for node in ("a", "b")]
    assert generations == [{2}, {3}]


def hung(play: Play, kind: HangKind = HangKind.STOPPED, **more: Any) -> WorkersHung:
    """No rank of the generation steps any more."""
    fields = {"node": NodeId("b"), "culprits": (1,), "stalled_s": 4.0, "limit_s": 3.0, "step": 40}
    return WorkersHung(generation=play.view().generation, kind=kind, **{**fields, **more})


def test_a_hang_ends_the_generation_and_is_charged_to_its_own_budget() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    decision = play.tell(hung(play))
    assert decision.reason is Reason.WORKERS_HUNG
    assert told_to_prepare(decision) == ["a", "b"]
    assert {b.cause: b.used for b in play.view().budgets}[Cause.WORKERS_HUNG] == 1
    assert play.tell(hung(play)).reason is Reason.STALE  # nothing runs while nodes prepare


def test_hangs_that_get_no_further_end_the_job() -> None:
    play = Play((1, 1))
    play.run("a")
    for _ in range(3):  # the first attempt made steps, as none before it had
        play.tell(hung(play, node=NodeId("a")))
        play.restart()
    decision = play.tell(hung(play, node=NodeId("a")))
    assert told_to_end(decision) == {"a": EXIT_BUDGET}
    assert "hang" in play.view().sentence


def test_a_script_that_hangs_at_its_exit_is_not_started_again() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.exited("a", code=0)
    decision = play.tell(hung(play, HangKind.EXIT))
    assert decision.reason is Reason.EXIT_HUNG
    assert set(told_to_end(decision).values()) == {EXIT_USER_ERROR}
    assert "all other ranks have finished" in play.view().sentence


def test_a_slow_rank_is_said_and_its_node_looked_at() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    before = play.machine.digest()
    slow = RankSlow(
        generation=play.view().generation, node=NodeId("b"), ranks=(1,),
        awake=0.9, running=0.6, others_awake=0.5,
    )  # fmt: skip
    said = [
        play.tell(event)
        for event in (slow, replace(slow, over=True), replace(slow, generation=Generation(9)))
    ]
    assert [decision.reason for decision in said] == [
        Reason.RANK_SLOW,
        Reason.RANK_SLOW_NO_MORE,
        Reason.STALE,
    ]
    assert [[type(one) for one in decision.commands] for decision in said] == [[CheckNode], [], []]
    assert play.machine.digest() == before
    assert sentence(Reason.RANK_SLOW, said[0].facts) == (
        "the others wait for rank 1 on b: busy 0.9 of the time, 0.3 of it waiting for a processor"
        " (others 0.5)"
    )
