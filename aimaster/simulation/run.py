"""One run from one seed: draw, let faults strike, stop them, and see the job to its end.

    result = simulate(7)

A broken promise raises `Violation` with the seed, the options and the last steps; the same seed gives the
same run on every machine and Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from aimaster.core.events import WorkerExited, WorkersHung
from aimaster.core.policy import (
    EXIT_BUDGET,
    EXIT_USER_ERROR,
)
from aimaster.journal.incidents import Incident, incidents
from aimaster.journal.replay import replay
from aimaster.simulation.checkers import Violation
from aimaster.simulation.faults import SPLITTING, draw
from aimaster.simulation.training import TrainingOptions
from aimaster.simulation.world import LIVENESS_S, Options, World


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended."""

    exit_code: int
    ended_at_s: float
    steps: int
    generations: int
    attempts: int
    master_lives: int
    incidents: tuple[Incident, ...]
    digest: str
    trace: tuple[str, ...]


def options_for(seed: int) -> Options:
    """Draw what a run is like from its seed."""
    random = Random(seed)
    max_nodes = random.randint(1, 6)
    agents = max_nodes + random.choice((0, 0, 1, 2))
    steps = random.choice((40, 120))
    return Options(
        seed=seed,
        min_nodes=random.randint(1, max_nodes),
        max_nodes=max_nodes,
        agents=agents,
        workers=random.choice((1, 1, 2, 8)),
        max_restarts=random.choice((None, None, None, 0, 1, 5)),
        training=TrainingOptions(
            steps=steps,
            commit_every=random.choice((0, 1, 5)),
            bug_at_step=random.choice((None, None, None, None, steps // 2)),
        ),
        faults=draw(random, nodes=agents, horizon_s=60.0, most=random.choice((1, 4, 12))),
    )


def simulate(seed: int, options: Options | None = None) -> Result:
    """Run one seed.

    Raises:
        Violation: if anything happened that must not happen, or nothing that must.
    """
    world = World(options if options is not None else options_for(seed))
    try:
        return _run(world)
    except Exception as error:
        if isinstance(error, Violation):
            raise Violation(f"{world.options}\n{error}") from error
        tail = "\n".join(world.checkers.trace[-40:])
        raise Violation(f"{world.options}\n{type(error).__name__}: {error}\n{tail}") from error


def _run(world: World) -> Result:
    world.start(world.options.faults)
    world.timeline.run(world.options.horizon_s, stop=world.over)
    world.heal()
    world.timeline.run(world.options.horizon_s + LIVENESS_S, stop=world.over)
    if not world.over():
        raise Violation(f"not over after {LIVENESS_S} s without faults; {world.pending()}")
    return _result(world)


def _result(world: World) -> Result:
    machine = world.master.machine
    view = machine.view(world.timeline.now_s)
    if replay(world.master.journal).digest() != machine.digest():
        raise Violation("the whole journal leads to another state")
    _check_outcome(world, view.exit_code)
    _check_one_generation_steps(world)
    return Result(
        exit_code=view.exit_code if view.exit_code is not None else -1,
        ended_at_s=world.timeline.now_s,
        steps=world.checkers.steps,
        generations=view.generation,
        attempts=view.attempt + 1,
        master_lives=world.master.lives,
        incidents=incidents(world.master.journal.entries()),
        digest=machine.digest(),
        trace=tuple(world.checkers.trace),
    )


def _check_outcome(world: World, exit_code: int | None) -> None:
    """A job ends with the code that what happened to it deserves."""
    failed = sum(
        1
        for entry in world.master.journal.entries()
        if (isinstance(entry.record.event, WorkerExited) and not entry.record.event.ok)
        or isinstance(entry.record.event, WorkersHung)
    )
    training = world.options.training
    breaks = training.bug_at_step is not None or training.spoilt_at_step is not None
    capped = world.options.max_restarts is not None
    deserved = {
        0: world.training.finished,
        EXIT_USER_ERROR: breaks or world.options.max_restarts == 0,
        EXIT_BUDGET: capped or failed >= 3,
    }
    if exit_code is None or not deserved.get(exit_code, False):
        raise Violation(f"exit code {exit_code} is not deserved\n" + "\n".join(world.checkers.trace[-40:]))
    if exit_code == 0 and training.bug_at_step is not None:
        raise Violation("finished in spite of a bug")


def _check_one_generation_steps(world: World) -> None:
    """No two generations step at the same time, unless somebody could not be told to stop."""
    if world.options.training.alone or any(fault.kind in SPLITTING for fault in world.options.faults):
        return
    generations = [generation for _, generation in world.training.stepping]
    if generations != sorted(generations):
        raise Violation("an old generation went on stepping")
