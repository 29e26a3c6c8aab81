"""One run from one seed: draw, let faults strike, stop them, and see the job to its end.

    result = simulate(7)

A broken promise raises `Violation` with the seed, the options and the last steps; the same seed gives the
same run on every machine and Python.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from aimaster.core.detector import DetectorConfig
from aimaster.core.events import JobDeclared, WorkerExited, WorkersHung
from aimaster.core.policy import (
    EXIT_BUDGET,
    EXIT_USER_ERROR,
    Policy,
    Timeouts,
)
from aimaster.core.state import JobPhase, NodeState
from aimaster.ids import JobId
from aimaster.journal.incidents import Incident, incidents
from aimaster.journal.replay import replay
from aimaster.simulation.checkers import Checkers, Violation
from aimaster.simulation.clock import Timeline
from aimaster.simulation.faults import SPLITTING, Fault, Striker, draw
from aimaster.simulation.master import SimMaster
from aimaster.simulation.network import Link, NetworkOptions
from aimaster.simulation.nodes import SimNode
from aimaster.simulation.training import Training, TrainingOptions

LIVENESS_S = 1_800.0
"""Virtual time within which a job must end once faults have stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What one run is like."""

    seed: int
    min_nodes: int = 2
    max_nodes: int = 2
    agents: int = 3
    """Nodes at the start; those above the maximum are spares."""
    workers: int = 1
    max_restarts: int | None = None
    training: TrainingOptions = field(default_factory=TrainingOptions)
    faults: tuple[Fault, ...] = ()
    horizon_s: float = 60.0
    """When faults stop."""
    inside_every: int = 1
    """At which steps the invariants are looked at; 1 is every one."""


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
    world = _World(options if options is not None else options_for(seed))
    try:
        return world.run()
    except Exception as error:
        if isinstance(error, Violation):
            raise Violation(f"{world.options}\n{error}") from error
        tail = "\n".join(world.checkers.trace[-40:])
        raise Violation(f"{world.options}\n{type(error).__name__}: {error}\n{tail}") from error


class _World:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.random = Random(options.seed + 1)
        self.timeline = Timeline()
        # Shorter than the defaults, so that a run sees every time-out and still ends soon.
        policy = Policy(timeouts=Timeouts(last_call_s=10.0, prepare_s=20.0, start_s=20.0, drain_s=15.0))
        self.checkers = Checkers(policy, inside_every=options.inside_every)
        self.training = Training(self.timeline, self.random, options.training)
        self.master = SimMaster(
            self.timeline,
            JobDeclared(
                job=JobId("sim"),
                min_nodes=options.min_nodes,
                max_nodes=options.max_nodes,
                max_restarts=options.max_restarts,
            ),
            policy=policy,
            config=DetectorConfig(),
            witness=self.checkers,
        )
        self.nodes: list[SimNode] = []
        for _ in range(options.agents):
            self.add_node()

    def add_node(self) -> SimNode:
        node = SimNode(
            f"n{len(self.nodes)}",
            workers=self.options.workers,
            timeline=self.timeline,
            random=self.random,
            link=Link(self.timeline, self.random, NetworkOptions()),
            training=self.training,
        )
        node.temper.prepare_s = self.random.uniform(0.05, 1.0)
        self.nodes.append(node)
        return node

    def over(self) -> bool:
        """Whether the job has ended and nobody is left to end."""
        ended = self.master.up and self.master.machine.state.job.phase is JobPhase.ENDED
        return ended and not any(node.alive for node in self.nodes)

    def run(self) -> Result:
        self.master.boot()
        for node in self.nodes:
            self.timeline.at(self.random.uniform(0.0, 5.0), lambda n=node: n.boot(self.master))  # type: ignore[misc]
        striker = Striker(self.timeline, self.master, self.nodes, add_node=self.add_node, random=self.random)
        striker.plan(self.options.faults)
        self.timeline.run(self.options.horizon_s, stop=self.over)
        self._heal()
        self.timeline.run(self.options.horizon_s + LIVENESS_S, stop=self.over)
        if not self.over():
            raise Violation(f"not over after {LIVENESS_S} s without faults; {self._pending()}")
        return self._result()

    def _heal(self) -> None:
        """Faults stop, and enough nodes are there: those that were lost or set aside start anew."""
        self.master.crash_before_effects_of.clear()
        if not self.master.up:
            self.master.boot()
        view = self.master.machine.view(0.0)
        for node in self.nodes:
            node.temper.prepare_s, node.temper.fails_to_prepare = 0.2, 0
            node.link.broken = False
            node.link.free()
            node.thaw()
            seen = view.node(node.id)
            aside = seen is not None and seen.state is NodeState.ASIDE
            if node.exit_code is None and (not node.alive or aside):
                node.die()
                node.boot(self.master)

    def _pending(self) -> str:
        view = self.master.machine.view(self.timeline.now_s)
        states = {node.node: node.state.value for node in view.nodes}
        alive = [node.id for node in self.nodes if node.alive]
        tail = "\n".join(self.checkers.trace[-40:])
        waits = f"{view.phase.value} waits for {view.waiting_for.value} {view.awaited}"
        return f"{waits}, {states}, alive {alive}\n{tail}"

    def _result(self) -> Result:
        machine = self.master.machine
        view = machine.view(self.timeline.now_s)
        if replay(self.master.journal).digest() != machine.digest():
            raise Violation("the whole journal leads to another state")
        self._check_outcome(view.exit_code)
        self._check_one_generation_steps()
        return Result(
            exit_code=view.exit_code if view.exit_code is not None else -1,
            ended_at_s=self.timeline.now_s,
            steps=self.checkers.steps,
            generations=view.generation,
            attempts=view.attempt + 1,
            master_lives=self.master.lives,
            incidents=incidents(self.master.journal.entries()),
            digest=machine.digest(),
            trace=tuple(self.checkers.trace),
        )

    def _check_outcome(self, exit_code: int | None) -> None:
        """A job ends with the code that what happened to it deserves."""
        failed = sum(
            1
            for entry in self.master.journal.entries()
            if (isinstance(entry.record.event, WorkerExited) and not entry.record.event.ok)
            or isinstance(entry.record.event, WorkersHung)
        )
        capped = self.options.max_restarts is not None
        deserved = {
            0: self.training.finished,
            EXIT_USER_ERROR: self.options.training.bug_at_step is not None or self.options.max_restarts == 0,
            EXIT_BUDGET: capped or failed >= 3,
        }
        if exit_code is None or not deserved.get(exit_code, False):
            raise Violation(f"exit code {exit_code} is not deserved\n" + "\n".join(self.checkers.trace[-40:]))
        if exit_code == 0 and self.options.training.bug_at_step is not None:
            raise Violation("finished in spite of a bug")

    def _check_one_generation_steps(self) -> None:
        """No two generations step at the same time, unless somebody could not be told to stop."""
        if any(fault.kind in SPLITTING for fault in self.options.faults):
            return
        generations = [generation for _, generation in self.training.stepping]
        if generations != sorted(generations):
            raise Violation("an old generation went on stepping")
