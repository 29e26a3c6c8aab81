"""The verdict on ranks that make no step: what is a hang, after how long, and whose fault it is."""

from __future__ import annotations

from typing import Any

import pytest

from aimaster.core.events import HangKind
from aimaster.core.hang import Blind, Hang, HangConfig, Pace, judge, limits
from aimaster.core.sights import Activity, RankReport, Sight, Wait, WorkerPhase

FAST = Pace(samples=100, usual_s=0.2, quantile_s=0.2, longest_gap_s=0.3, ever_stepped=True)
CONFIG = HangConfig()


def rank(number: int, still_s: float = 100.0, **more: Any) -> RankReport:
    """A rank that is idle and waits in a collective, unless `more` says otherwise."""
    sight = {
        "activity": Activity.IDLE,
        "idle_s": still_s,
        "wait": Wait.COLLECTIVE,
        "wait_s": still_s,
        "where": "all_reduce (distributed_c10d.py:1)",
    }
    phase = more.pop("phase", WorkerPhase.TRAINING)
    stack = more.pop("stack", "")
    return RankReport(
        rank=number, phase=phase, steps=40, sight=Sight(still_s=still_s, **{**sight, **more}), stack=stack
    )


def busy(number: int, still_s: float = 100.0, **more: Any) -> RankReport:
    """A rank that computes something else."""
    work = {"activity": Activity.ACTIVE, "idle_s": 0.0, "wait": Wait.OTHER, "where": "evaluate (train.py:9)"}
    return rank(number, still_s, **{**work, **more})


def verdict(*reports: RankReport, pace: Pace = FAST, stepped: bool = True) -> Hang | Blind | None:
    return judge(reports, config=CONFIG, pace=pace, stepped=stepped)


def hang(*reports: RankReport, **more: Any) -> Hang:
    found = verdict(*reports, **more)
    assert isinstance(found, Hang)
    return found


def test_a_stopped_rank_is_found_after_the_floor_and_blamed() -> None:
    stopped = {"activity": Activity.STOPPED, "wait": Wait.OTHER}
    assert verdict(rank(0, 2.9), rank(1, 2.9, **stopped)) is None
    found = hang(rank(0, 3.1), rank(1, 3.1, **stopped))
    assert (found.kind, found.culprits) == (HangKind.STOPPED, (1,))


def test_ranks_that_all_wait_are_a_deadlock_and_without_a_majority_nobody_is_blamed() -> None:
    found = hang(rank(0, 4.0), rank(1, 4.0, where="recv (distributed_c10d.py:2)"))
    assert (found.kind, found.culprits) == (HangKind.DEADLOCK, ())
    assert [group.ranks for group in found.groups] == ["0", "1"]


def test_of_ranks_that_all_wait_the_minority_is_blamed() -> None:
    found = hang(rank(0), rank(1), rank(2, collective="broadcast #7"), rank(3))
    assert found.culprits == (2,)
    assert [(g.ranks, g.collective) for g in found.groups] == [("0-1,3", ""), ("2", "broadcast #7")]


def test_a_peer_that_has_finished_is_blamed_by_those_that_wait_for_it() -> None:
    found = hang(rank(0, 4.0), rank(1, activity=Activity.ENDED))
    assert (found.kind, found.culprits) == (HangKind.DEADLOCK, (1,))


@pytest.mark.parametrize("wait", [Wait.LOCKED, Wait.INTERPRETER])
def test_what_waits_for_itself_is_stuck(wait: Wait) -> None:
    found = hang(rank(0, 4.0), rank(1, 4.0, wait=wait))
    assert (found.kind, found.culprits) == (HangKind.STUCK, (1,))


def test_one_look_is_no_evidence() -> None:
    assert verdict(rank(0, 4.0), rank(1, 4.0, wait=Wait.INTERPRETER, wait_s=0.0)) is None
    assert verdict(rank(0, 4.0), rank(1, 4.0, idle_s=0.2)) is None


def test_what_cannot_end_waits_for_ten_of_the_jobs_own_slow_steps() -> None:
    slow = Pace(samples=100, usual_s=2.0, quantile_s=2.0, longest_gap_s=2.0, ever_stepped=True)
    assert verdict(rank(0, 19.0), rank(1, 19.0), pace=slow) is None
    assert hang(rank(0, 20.5), rank(1, 20.5), pace=slow).limit_s == 20.0


@pytest.mark.parametrize(
    "work",
    [
        pytest.param({}, id="computes"),
        pytest.param({"activity": Activity.IDLE, "idle_s": 50.0}, id="sleeps or waits for a socket"),
        pytest.param({"wait": Wait.UNKNOWN, "where": ""}, id="no stack can be read"),
    ],
)
def test_honest_work_has_its_own_limit_and_is_blamed_only_beyond_it(work: dict[str, Any]) -> None:
    assert verdict(rank(0, 59.0), busy(1, 59.0, **work)) is None
    found = hang(rank(0, 60.5), busy(1, 60.5, **work))
    assert (found.kind, found.culprits, found.limit_s) == (HangKind.BUSY, (1,), 60.0)


def test_a_gap_that_the_job_came_back_from_raises_the_limit() -> None:
    known = Pace(samples=100, usual_s=0.2, quantile_s=0.2, longest_gap_s=50.0, ever_stepped=True)
    assert verdict(rank(0, 149.0), busy(1, 149.0), pace=known) is None
    assert hang(rank(0, 151.0), busy(1, 151.0), pace=known).limit_s == 150.0


@pytest.mark.parametrize(
    "work", [{"activity": Activity.MOVING}, {"phase": WorkerPhase.SAVING}, {"phase": WorkerPhase.LOADING}]
)
def test_a_rank_that_saves_or_moves_bytes_has_the_limit_of_a_start(work: dict[str, Any]) -> None:
    assert verdict(rank(0, 1799.0), busy(1, 1799.0, **work)) is None
    assert hang(rank(0, 1801.0), busy(1, 1801.0, **work)).kind is HangKind.BUSY


def test_where_everyone_works_nobody_is_blamed() -> None:
    assert hang(busy(0), busy(1)).culprits == ()


def test_before_the_first_step_there_is_time() -> None:
    first = {"pace": Pace(ever_stepped=True), "stepped": False}
    assert verdict(busy(0, 1700.0), busy(1, 1700.0), **first) is None
    assert hang(busy(0, 1801.0), busy(1, 1801.0), **first).kind is HangKind.BUSY
    assert verdict(rank(0, 29.0), rank(1, 29.0), **first) is None
    assert hang(rank(0, 30.5), rank(1, 30.5), **first).kind is HangKind.DEADLOCK


def test_a_script_without_optimizer_is_never_too_slow() -> None:
    never = {"pace": Pace(), "stepped": False}
    assert verdict(rank(0, 1e6), busy(1, 1e6), **never) is None
    assert limits(CONFIG, Pace(), stepped=False).busy_s is None


@pytest.mark.parametrize("seen", [{"activity": Activity.TRACED}, {"wait": Wait.DEBUGGER}])
def test_under_a_debugger_nobody_is_judged(seen: dict[str, Any]) -> None:
    found = verdict(rank(0, 1e5), rank(1, 1e5, **seen))
    assert isinstance(found, Blind)
    assert "rank 1" in found.why


def test_the_last_rank_may_work_on_for_as_long_as_it_does_something() -> None:
    ended = rank(0, activity=Activity.ENDED)
    assert verdict(ended, busy(1, 5000.0)) is None
    assert verdict(ended, busy(1, 5000.0, activity=Activity.IDLE, idle_s=599.0)) is None
    found = hang(ended, busy(1, 5000.0, activity=Activity.IDLE, idle_s=601.0))
    assert (found.kind, found.culprits) == (HangKind.EXIT, (1,))


def test_no_ranks_and_only_ended_ranks_are_no_hang() -> None:
    assert verdict() is None
    assert verdict(rank(0, activity=Activity.ENDED)) is None


@pytest.mark.parametrize(
    "broken",
    [{"floor_s": 0.0}, {"busy_s": 1.0}, {"start_s": 10.0}, {"factor": 0.5}, {"exit_s": float("nan")}],
)
def test_limits_are_validated(broken: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        HangConfig(**broken)  # type: ignore[arg-type]
