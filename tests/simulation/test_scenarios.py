"""Single faults in a small world: what is done, how soon, and what it costs. All seconds are virtual."""

from __future__ import annotations

from typing import Any

import pytest

from aimaster.core.policy import Budget, Policy
from aimaster.journal.incidents import IncidentKind
from aimaster.simulation.faults import Fault, FaultKind
from aimaster.simulation.run import Result, simulate
from aimaster.simulation.training import TrainingOptions
from aimaster.simulation.world import Options


def world(*faults: tuple[FaultKind, int, float], lasts_s: float = 1.0, **more: Any) -> Result:
    """Two members and a spare; each fault as kind, node and time."""
    options = Options(
        seed=1,
        training=TrainingOptions(steps=100, step_s=0.5, commit_every=1),
        faults=tuple(Fault(kind=k, at_s=at, node=node, lasts_s=lasts_s) for k, node, at in faults),
        **more,
    )
    return simulate(1, options)


def test_undisturbed() -> None:
    result = world()
    assert (result.exit_code, result.attempts, result.generations, result.incidents) == (0, 1, 1, ())


def test_a_killed_worker_costs_a_second_or_two() -> None:
    result = world((FaultKind.KILL_WORKER, 0, 20.0), agents=2)
    (incident,) = result.incidents
    assert incident.kind is IncidentKind.WORKER_KILLED
    assert incident.recovered_s is not None
    assert incident.recovered_s < 3.0
    assert result.attempts == 2


@pytest.mark.parametrize("node", [0, 1, 2])
def test_a_lost_node_is_replaced_within_seconds_and_named_as_the_cause(node: int) -> None:
    result = world((FaultKind.KILL_NODE, node, 20.0))
    assert result.exit_code == 0
    if result.attempts == 1:
        assert result.incidents == ()  # it was the spare
        return
    (incident,) = result.incidents
    assert (incident.kind, incident.node) == (IncidentKind.NODE_LOST, f"n{node}")
    assert incident.recovered_s is not None
    assert incident.recovered_s < 12.0
    assert result.attempts == 2


def test_a_short_silence_is_forgiven() -> None:
    result = world((FaultKind.STICK_LINK, 0, 20.0), lasts_s=4.0)
    assert (result.exit_code, result.generations) == (0, 1)


def test_a_master_that_dies_is_not_noticed_by_training() -> None:
    faults = [(FaultKind.CRASH_MASTER, 0, at) for at in (3.0, 10.0, 20.0, 30.0)]
    result = world(*faults, agents=2)
    assert (result.exit_code, result.attempts, result.master_lives) == (0, 1, 5)


def test_a_master_that_stalls_declares_nobody_dead() -> None:
    result = world((FaultKind.STALL_MASTER, 0, 20.0), lasts_s=20.0, agents=2)
    assert (result.exit_code, result.generations) == (0, 1)


def test_one_hundred_agents_for_two_seats() -> None:
    result = world((FaultKind.KILL_NODE, 0, 20.0), agents=100, min_nodes=1)
    assert result.exit_code == 0


def test_a_bug_is_tried_twice_and_once_from_an_older_checkpoint() -> None:
    options = Options(seed=1, training=TrainingOptions(steps=100, bug_at_step=30, commit_every=0))
    result = simulate(1, options)
    assert (result.exit_code, result.attempts) == (20, 2)
    options = Options(seed=1, training=TrainingOptions(steps=100, bug_at_step=30))
    result = simulate(1, options)
    assert (result.exit_code, result.attempts) == (20, 3)


@pytest.mark.parametrize(
    ("commit_every", "attempts", "below", "resumed"),
    [
        pytest.param(5, 3, 21, 20, id="seldom"),
        pytest.param(1, 4, 23, 22, id="each step, so that each attempt gets one step further"),
    ],
)
def test_a_checkpoint_that_breaks_whoever_resumes_from_it_is_set_aside(
    commit_every: int, attempts: int, below: int, resumed: int
) -> None:
    training = TrainingOptions(steps=60, spoilt_at_step=30, commit_every=commit_every)
    result = simulate(1, Options(seed=1, training=training))
    assert (result.exit_code, result.attempts) == (0, attempts)
    *before, last = result.incidents
    assert [incident.facts.get("below") for incident in before] == [None] * len(before)
    assert (last.facts.get("below"), last.resumed_step) == (below, resumed)


def test_without_setting_aside_it_would_end_the_job() -> None:
    training = TrainingOptions(steps=60, spoilt_at_step=30)
    result = simulate(1, Options(seed=1, training=training, policy=Policy(set_aside_max=0)))
    assert (result.exit_code, result.attempts) == (20, 2)


@pytest.mark.parametrize("hundreds", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_a_thousand_nodes_lose_a_rack(hundreds: int) -> None:
    """Forty of a thousand within half a second, with twenty spares: one misfortune, one restart."""
    lost = tuple(
        Fault(kind=FaultKind.KILL_NODE, at_s=15.0 + number / 100, node=number, lasts_s=1.0)
        for number in range(4 * hundreds)
    )
    options = Options(
        seed=1,
        min_nodes=90 * hundreds,
        max_nodes=100 * hundreds,
        agents=102 * hundreds,
        training=TrainingOptions(steps=20, step_s=1.0),
        faults=lost,
        horizon_s=20.0,
        inside_every=500,
    )
    result = simulate(1, options)
    assert result.exit_code == 0
    assert len(result.incidents) == 1
    assert result.attempts == 2


def test_a_fault_that_all_nodes_show_takes_none_of_them_away() -> None:
    """Each refuses more often than a node may; without all four nodes nothing would go on."""
    faults = [(FaultKind.FAIL_PREPARE, node, 20.0) for node in range(4)]
    policy = Policy(node_failures=Budget(limit=40), node_strikes_max=1)
    world_of_four = {"agents": 4, "max_nodes": 4, "min_nodes": 4, "policy": policy}
    result = world(*faults, (FaultKind.KILL_WORKER, 0, 25.0), lasts_s=5.0, **world_of_four)
    (incident,) = result.incidents
    assert incident.recovered_s is not None
    assert incident.recovered_s < 25.0  # they come back without a new life of any agent
    assert incident.facts["same_fault"] in (3, 4)
    assert (result.exit_code, result.attempts) == (0, 2)
