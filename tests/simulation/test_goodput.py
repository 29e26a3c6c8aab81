"""The account of a job's time against what the simulated training itself knows."""

from __future__ import annotations

import itertools

import pytest

from aimaster.core.goodput import Goodput, Phase, Span, Spent
from aimaster.simulation.faults import Fault, FaultKind
from aimaster.simulation.run import options_for
from aimaster.simulation.training import TrainingOptions
from aimaster.simulation.world import LIVENESS_S, Options, World

UNATTRIBUTED_MAX = 0.02
STEP_S = 0.5


def finished(options: Options) -> World:
    world = World(options)
    world.start(options.faults)
    world.timeline.run(options.horizon_s, stop=world.over)
    world.heal()
    world.timeline.run(options.horizon_s + LIVENESS_S, stop=world.over)
    return world


def account(world: World) -> tuple[Spent, list[Span]]:
    kept: list[Span] = []
    goodput = Goodput(kept.append)
    for entry in world.master.journal.entries():
        goodput.take(entry.record.event, entry.record.decision, entry.record.at_s)
    return goodput.spent(world.timeline.now_s), kept


def stepping_s(world: World) -> float:
    """Between the first and the last step of each generation, as the training itself counts."""
    total = 0.0
    for _, steps in itertools.groupby(world.training.stepping, key=lambda one: one[1]):
        times = [at_s for at_s, _ in steps]
        total += times[-1] - times[0]
    return total


def test_what_is_called_training_is_what_the_training_did() -> None:
    faults = (
        Fault(kind=FaultKind.KILL_WORKER, at_s=60.0, node=1, lasts_s=1.0),
        Fault(kind=FaultKind.KILL_NODE, at_s=140.0, node=0, lasts_s=1.0),
        Fault(kind=FaultKind.CRASH_MASTER, at_s=200.0, node=0, lasts_s=1.0),
        Fault(kind=FaultKind.KILL_WORKER, at_s=230.0, node=2, lasts_s=1.0),
    )
    training = TrainingOptions(steps=600, step_s=STEP_S, commit_every=20, first_step_s=4.0)
    options = Options(
        seed=5, min_nodes=3, max_nodes=3, agents=4, training=training, faults=faults, horizon_s=300.0
    )
    world = finished(options)
    assert world.training.finished
    spent, kept = account(world)
    assert sum(spent.phases.values()) == pytest.approx(spent.wall_s)
    assert spent.phases[Phase.UNKNOWN] == 0.0
    steps_s = spent.phases[Phase.TRAINING] + spent.phases[Phase.RECOMPUTE]
    # Up to a step in each attempt may be lost, and a partner notices within half a second.
    assert abs(steps_s - stepping_s(world)) <= UNATTRIBUTED_MAX * spent.wall_s
    assert {Phase.RENDEZVOUS, Phase.WARM_UP, Phase.DETECT, Phase.STOP} <= {span.phase for span in kept}
    assert len([span for span in kept if span.phase is Phase.WARM_UP]) == 4


@pytest.mark.parametrize("seed", range(900, 912))
def test_in_any_world_every_second_is_accounted_for_once(seed: int) -> None:
    world = finished(options_for(seed))
    spent, kept = account(world)
    assert sum(spent.phases.values()) == pytest.approx(spent.wall_s)
    assert all(one.end_s <= other.begin_s + 1e-9 for one, other in itertools.pairwise(kept))
    assert all(span.begin_s < span.end_s for span in kept)
