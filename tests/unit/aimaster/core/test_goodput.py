"""Where the time of a job goes: each stretch to one phase, and all of them to the wall time."""

from __future__ import annotations

import itertools

import pytest

from aimaster.core.events import (
    CaughtUp,
    FirstStepDone,
    HangKind,
    StepCommitted,
    Tier,
    TimerKind,
    WorkersHung,
)
from aimaster.core.goodput import Goodput, Phase, Span, Spent
from aimaster.ids import NodeId
from tests.unit.aimaster.core.play import Play


def spans_of(play: Play) -> tuple[list[Span], Spent]:
    """The settled stretches, and where the time went; what must hold of any job is checked."""
    kept: list[Span] = []
    goodput = Goodput(kept.append)
    for event, decision, at_s in play.seen:
        goodput.take(event, decision, at_s)
        spent = goodput.spent(at_s)
        assert sum(spent.phases.values()) == pytest.approx(spent.wall_s)
        assert all(seconds >= 0 for seconds in spent.phases.values())
    for one, other in itertools.pairwise(kept):
        assert one.end_s <= other.begin_s + 1e-9
    return kept, goodput.spent(play.now)


def of(play: Play) -> dict[Phase, float]:
    """Only the phases that took any time."""
    return {phase: seconds for phase, seconds in spans_of(play)[1].phases.items() if seconds > 1e-9}


def first_step(play: Play, node: str, step: int, *, load_s: float = 0.0, warm_up_s: float = 0.0) -> None:
    play.tell(FirstStepDone(**play.current(node), step=step, load_s=load_s, warm_up_s=warm_up_s))


def committed(play: Play, node: str, step: int, *, stalled_s: float = 0.0) -> None:
    play.tell(StepCommitted(**play.current(node), step=step, durable=False, stalled_s=stalled_s))


def after(play: Play, seconds: float) -> None:
    """The next event comes so much later."""
    play.now += seconds - 0.1


def at_work() -> Play:
    """Two nodes that make steps; the last event was 2 s ago."""
    play = Play()
    play.run("a", "b")
    after(play, 3.0)
    first_step(play, "a", 1)
    first_step(play, "b", 1)
    after(play, 2.0)
    return play


def test_a_job_that_is_well_trains() -> None:
    play = at_work()
    committed(play, "a", 5, stalled_s=0.5)
    found = of(play)
    assert found[Phase.TRAINING] == pytest.approx(2.1 - 0.5)
    assert found[Phase.STALL] == pytest.approx(0.5)
    assert found[Phase.WARM_UP] == pytest.approx(3.0), "nothing was loaded"
    assert set(found) == {Phase.RENDEZVOUS, Phase.WARM_UP, Phase.TRAINING, Phase.STALL}
    share = spans_of(play)[1].goodput
    assert share is not None
    assert share == pytest.approx(1.6 / (play.now - 0.1))


def test_a_killed_worker_costs_stop_rendezvous_load_and_warm_up() -> None:
    play = at_work()
    committed(play, "a", 5)
    after(play, 1.0)
    play.exited("b", step=8)
    before = of(play)
    after(play, 0.7)
    play.prepared("a", "b")
    play.started("a", "b")
    play.restored("a", 8, Tier.MEMORY)
    after(play, 2.0)
    first_step(play, "a", 9, load_s=0.6, warm_up_s=0.9)
    found = of(play)
    gained = {phase: seconds - before.get(phase, 0.0) for phase, seconds in found.items()}
    assert gained[Phase.STOP] == pytest.approx(0.7 + 0.1)
    assert gained[Phase.LOAD] == pytest.approx(0.6)
    assert gained[Phase.WARM_UP] == pytest.approx(0.9)
    assert gained[Phase.RENDEZVOUS] == pytest.approx(0.2 + 0.1 + 2.0 - 1.5)
    assert Phase.RECOMPUTE not in found, "nothing was lost"
    assert Phase.DETECT not in found


def test_time_before_a_hang_was_noticed_is_no_training() -> None:
    play = at_work()
    after(play, 7.0)
    play.tell(
        WorkersHung(
            generation=play.view().generation, kind=HangKind.DEADLOCK, node=NodeId("a"), culprits=(),
            stalled_s=4.0, limit_s=3.0, step=3,
        )
    )  # fmt: skip
    found = of(play)
    assert found[Phase.DETECT] == pytest.approx(4.0)
    assert found[Phase.TRAINING] == pytest.approx(0.1 + 1.9 + 6.9 + 0.1 - 4.0)


def test_a_silence_that_turns_out_to_be_a_lost_node_is_detection() -> None:
    """The partner's worker fails at once; for six seconds the lost node is asked in vain to prepare."""
    play = Play()
    play.run("a", "b")
    play.join("c")
    first_step(play, "a", 1)
    after(play, 5.0)
    play.exited("a", step=4)
    play.prepared("a")
    after(play, 5.9)
    play.died("b")
    found = of(play)
    assert found[Phase.DETECT] == pytest.approx(6.0)
    assert Phase.STOP not in found
    play.restart()
    assert of(play)[Phase.STOP] > 0


def test_too_few_nodes_are_waited_for() -> None:
    play = at_work()
    play.died("b")
    after(play, 30.0)
    play.join("c")
    play.restart()
    found = of(play)
    assert found[Phase.REPLACE] == pytest.approx(30.0)
    assert found[Phase.DETECT] > 0


def test_steps_are_done_again_until_the_master_says_otherwise() -> None:
    play = at_work()
    committed(play, "a", 10)
    play.exited("b", step=14)
    play.restart()
    play.restored("a", 10, Tier.DISK)
    first_step(play, "a", 11)
    after(play, 2.5)
    assert Phase.TRAINING in of(play)
    before = of(play)
    play.tell(CaughtUp(generation=play.view().generation, step=14))
    after(play, 1.0)
    committed(play, "a", 20)
    found = of(play)
    assert found[Phase.RECOMPUTE] == pytest.approx(2.5)
    assert found[Phase.TRAINING] - before[Phase.TRAINING] == pytest.approx(1.0)


def test_a_newer_committed_step_ends_it_as_well_and_an_older_one_does_not() -> None:
    play = at_work()
    committed(play, "a", 10)
    play.exited("b", step=14)
    play.restart()
    first_step(play, "a", 11)
    committed(play, "a", 12)
    after(play, 1.0)
    committed(play, "a", 15)
    assert of(play)[Phase.RECOMPUTE] == pytest.approx((0.1 + 1.0) * 3 / 4), "step 14 was over before step 15"


def test_without_checkpoints_nobody_knows_what_is_done_again() -> None:
    play = at_work()
    play.exited("b", step=14)
    play.restart()
    first_step(play, "a", 1)
    after(play, 1.0)
    play.exited("b", step=3)
    assert Phase.RECOMPUTE not in of(play)


def test_stalls_are_counted_from_anew_in_each_attempt() -> None:
    play = at_work()
    committed(play, "a", 5, stalled_s=0.5)
    play.exited("b", step=5, stalled_s=0.5)
    play.restart()
    first_step(play, "a", 6)
    after(play, 1.0)
    committed(play, "a", 7, stalled_s=0.25)
    assert of(play)[Phase.STALL] == pytest.approx(0.75)


def test_a_script_whose_steps_nobody_sees_is_told_as_such() -> None:
    play = Play()
    play.run("a", "b")
    after(play, 50.0)
    play.exited("a", code=0)
    play.exited("b", code=0)
    found = of(play)
    assert found[Phase.UNKNOWN] == pytest.approx(50.1)
    assert Phase.TRAINING not in found


def test_the_account_is_closed_with_the_job() -> None:
    play = at_work()
    play.exited("a", code=0)
    play.exited("b", code=0)
    after(play, 2.0)
    play.left("a")
    play.left("b")
    over_s = play.now
    found = of(play)
    assert found[Phase.STOP] == pytest.approx(2.1)
    play.now += 100.0
    assert spans_of(play)[1].wall_s == pytest.approx(over_s - 0.1)


def test_a_drain_that_runs_out_closes_it_too() -> None:
    play = at_work()
    play.exited("a", code=0)
    play.exited("b", code=0)
    play.timer(TimerKind.DRAIN)
    over_s = play.now
    play.now += 100.0
    assert spans_of(play)[1].wall_s == pytest.approx(over_s - 0.1)
