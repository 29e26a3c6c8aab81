"""Budgets and brakes, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from aimaster.core.commands import Reason
from aimaster.core.policy import (
    NO_HISTORY,
    Budget,
    Cause,
    Failure,
    History,
    Judgement,
    Policy,
    Timeouts,
    judge,
)


def fail(history: History, *, policy: Policy | None = None, cap: int | None = None, **more: Any) -> Judgement:
    fields = {"cause": Cause.WORKER_FAILED, "attempted": True, "at_s": 0.0, **more}
    return judge(policy or Policy(), history, failure=Failure(**fields), max_nodes=4, max_restarts=cap)


def series(*failures: dict[str, Any], policy: Policy | None = None, cap: int | None = None) -> Judgement:
    """The judgement of the last; all before must have gone on."""
    history = NO_HISTORY
    for failure in failures:
        judgement = fail(history, policy=policy, cap=cap, **failure)
        if failure is not failures[-1]:
            assert judgement.exit_code is None
        history = judgement.history
    return judgement


def verdict(judgement: Judgement) -> tuple[int | None, Reason | None]:
    return judgement.exit_code, judgement.reason


def test_a_rolling_window_forgets() -> None:
    policy = Policy(worker_failures=Budget(limit=2, window_s=100.0))
    steps = [{"at_s": float(at), "committed": at} for at in (0, 10, 20)]
    assert verdict(series(*steps, policy=policy)) == (21, Reason.BUDGET_SPENT)
    steps[2]["at_s"] = 101.0
    assert verdict(series(*steps, policy=policy)) == (None, None)


def test_budgets_are_separate() -> None:
    policy = Policy(worker_failures=Budget(limit=1), node_losses=Budget(limit=1))
    assert verdict(series({}, {"cause": Cause.NODE_LOST}, policy=policy)) == (None, None)


def test_a_history_stays_small() -> None:
    policy = Policy(worker_failures=Budget(limit=5, window_s=10.0))
    history = NO_HISTORY
    for at in range(1000):
        history = fail(history, policy=policy, at_s=float(at) / 1000, committed=at).history
    assert len(history.charges) <= 7


def test_progress_by_committed_step_resets_the_brake() -> None:
    none = {"committed": 10}
    assert verdict(series(none, none, none, none)) == (21, Reason.NO_PROGRESS)
    assert verdict(series(none, none, none, {"committed": 11}, none, none)) == (None, None)


def test_without_checkpoints_more_steps_are_progress() -> None:
    assert verdict(series(*[{"attempt_step": 5}] * 4)) == (21, Reason.NO_PROGRESS)
    assert verdict(series(*[{"attempt_step": step} for step in (5, 6, 7, 8, 9)])) == (None, None)


def test_without_checkpoints_ten_minutes_of_steps_are_progress() -> None:
    assert verdict(series(*[{"attempt_step": 5, "stepped_s": 600.0}] * 6)) == (None, None)


def test_nothing_at_all_stops_after_three() -> None:
    assert verdict(series({}, {}, {})) == (21, Reason.NO_PROGRESS)


def test_lost_nodes_are_not_held_against_the_script_and_do_not_clear_it() -> None:
    lost = {"cause": Cause.NODE_LOST}
    assert verdict(series(lost, lost, lost, lost)) == (None, None)
    assert verdict(series({}, lost, {}, lost, {})) == (21, Reason.NO_PROGRESS)


def test_one_confirming_retry_for_the_same_error() -> None:
    same = {"error_digest": "d", "step": 4, "attempt_step": 4}
    assert verdict(series(same, same)) == (20, Reason.SAME_ERROR_TWICE)
    assert verdict(series(same, {**same, "step": 9, "attempt_step": 9}, same)) == (None, None)
    assert verdict(series(same, {**same, "error_digest": "e"})) == (None, None)
    lost = {"cause": Cause.NODE_LOST}
    assert verdict(series(same, lost, same)) == (20, Reason.SAME_ERROR_TWICE)


EARLY = {"error_digest": "d", "step": 32, "attempt_step": 32, "committed": 30, "resumed": 30}


def test_a_checkpoint_behind_which_the_same_error_comes_at_once_is_set_aside_once() -> None:
    first = {**EARLY, "resumed": None}
    aside = series(first, EARLY)
    assert verdict(aside) == (None, None)
    assert (aside.history.below, aside.facts["below"]) == (21, 21)
    assert verdict(series(first, EARLY, {**EARLY, "resumed": 20})) == (20, Reason.SAME_ERROR_TWICE)
    assert verdict(series(first, {**EARLY, "resumed": 20})) == (20, Reason.SAME_ERROR_TWICE)
    assert verdict(series(first, EARLY, policy=Policy(set_aside_max=0))) == (20, Reason.SAME_ERROR_TWICE)


def test_other_errors_set_it_aside_the_second_time() -> None:
    hang = {**EARLY, "cause": Cause.WORKERS_HUNG, "error_digest": ""}
    lost = {"cause": Cause.NODE_LOST, "committed": 30, "resumed": 30}
    policy = Policy(fruitless_attempts_max=9)
    first = {**hang, "resumed": None}
    assert series(first, hang, policy=policy).history.below is None
    assert series(first, hang, lost, hang, policy=policy).history.below == 21
    assert series(first, hang, {**hang, "resumed": 31}, policy=policy).history.below is None
    assert series(first, hang, {**hang, "attempt_step": 41, "step": 41}, policy=policy).history.below is None


def test_the_same_error_a_step_later_each_time_sets_it_aside() -> None:
    fails = [
        {**EARLY, "step": at + 2, "attempt_step": at + 2, "committed": at + 1, "resumed": at}
        for at in (30, 31)
    ]
    assert series(*fails).history.below == 22
    assert series(fails[0], {**fails[1], "error_digest": "e"}).history.below is None


def test_an_attempt_that_gets_away_clears_the_checkpoints_of_doubt() -> None:
    aside = ({**EARLY, "resumed": None}, EARLY)
    away = {**EARLY, "resumed": 20, "committed": 40, "error_digest": "e", "step": 45, "attempt_step": 45}
    history = series(*aside, away).history
    assert (history.below, history.doubted, history.set_aside) == (None, None, 0)
    confirmed = {**EARLY, "resumed": 20, "committed": 31}
    assert verdict(series(*aside, confirmed)) == (20, Reason.SAME_ERROR_TWICE), "also where it got further"
    history = series(*aside, {**away, "committed": 30}).history
    assert (history.below, history.set_aside) == (21, 1), "no further than before"


def test_errors_without_a_digest_are_never_the_same() -> None:
    killed = {"error_digest": "", "step": 4}
    assert verdict(series({**killed, "committed": 1}, {**killed, "committed": 2})) == (None, None)


@pytest.mark.parametrize(("cap", "restarts"), [(1, 1), (3, 3)])
def test_the_cap(cap: int, restarts: int) -> None:
    steps = [{"committed": at} for at in range(restarts + 1)]
    assert verdict(series(*steps, cap=cap)) == (21, Reason.BUDGET_SPENT)
    assert series(*steps[:-1], cap=cap).history.restarts == restarts


def test_the_cap_of_0_is_the_users_error_only_if_it_was_one() -> None:
    assert fail(NO_HISTORY, cap=0).exit_code == 20
    assert fail(NO_HISTORY, cap=0, cause=Cause.NODE_LOST).exit_code == 21


def test_preparing_again_is_no_restart() -> None:
    judgement = fail(NO_HISTORY, cap=0, cause=Cause.NODE_FAILED, attempted=False)
    assert (judgement.exit_code, judgement.history.restarts) == (None, 0)


def test_limits_grow_with_the_job() -> None:
    assert Budget(limit=10, per_node=0.1).limit_for(1000) == 110


@pytest.mark.parametrize(
    "broken", [{"limit": -1}, {"limit": 1, "window_s": 0.0}, {"limit": 1, "per_node": -1.0}]
)
def test_budgets_are_validated(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="budget"):
        Budget(**broken)


@pytest.mark.parametrize("broken", [{"prepare_s": 0.0}, {"last_call_s": -1.0}])
def test_timeouts_are_validated(broken: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must"):
        Timeouts(**broken)
