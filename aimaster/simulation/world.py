"""A job in virtual time: master, nodes, network and training, made from options and one source of randomness.

What is done with it is up to those who make one: `aimaster.simulation.run` lets random faults strike a small
one to its end, `aimaster.simulation.fleet` lets a large one train for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from aimaster.core.detector import DetectorConfig
from aimaster.core.events import JobDeclared, RestartScope
from aimaster.core.policy import Policy, Timeouts
from aimaster.core.state import JobPhase, NodeState
from aimaster.ids import JobId
from aimaster.simulation.checkers import Checkers
from aimaster.simulation.clock import Timeline
from aimaster.simulation.faults import Fault, Striker
from aimaster.simulation.master import SimMaster
from aimaster.simulation.network import Link, NetworkOptions
from aimaster.simulation.nodes import SimNode
from aimaster.simulation.training import Training, TrainingOptions

LIVENESS_S = 1_800.0
"""Virtual time within which a job must end once faults have stopped."""

HASTY = Policy(timeouts=Timeouts(last_call_s=10.0, prepare_s=20.0, start_s=20.0, drain_s=15.0))
"""Times shorter than the defaults, so that a run sees every time-out and still ends soon."""


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
    policy: Policy = HASTY
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    faults: tuple[Fault, ...] = ()
    horizon_s: float = 60.0
    """When faults stop."""
    inside_every: int = 1
    """At which steps the invariants are looked at; 1 is every one."""


class World:
    """One job. Nothing happens before `start`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.random = Random(options.seed + 1)
        self.timeline = Timeline()
        self.checkers = Checkers(options.policy, inside_every=options.inside_every)
        self.training = Training(self.timeline, self.random, options.training)
        self.master = SimMaster(
            self.timeline,
            JobDeclared(
                job=JobId("sim"),
                min_nodes=options.min_nodes,
                max_nodes=options.max_nodes,
                max_restarts=options.max_restarts,
                scope=RestartScope.NODE if options.training.alone else RestartScope.JOB,
            ),
            policy=options.policy,
            config=options.detector,
            witness=self.checkers,
        )
        self.nodes: list[SimNode] = []
        for _ in range(options.agents):
            self.add_node()

    def add_node(self) -> SimNode:
        """One more machine; it is off."""
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

    def start(self, faults: Sequence[Fault]) -> Striker:
        """Boot the master and the nodes, each at a moment of its own, and plan the faults."""
        self.master.boot()
        for node in self.nodes:
            self.timeline.at(self.random.uniform(0.0, 5.0), lambda n=node: n.boot(self.master))  # type: ignore[misc]
        striker = Striker(self.timeline, self.master, self.nodes, add_node=self.add_node, random=self.random)
        striker.plan(faults)
        return striker

    def heal(self) -> None:
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

    def pending(self) -> str:
        """What the job waits for, and how it came to that."""
        view = self.master.machine.view(self.timeline.now_s)
        states = {node.node: node.state.value for node in view.nodes}
        alive = [node.id for node in self.nodes if node.alive]
        tail = "\n".join(self.checkers.trace[-40:])
        waits = f"{view.phase.value} waits for {view.waiting_for.value} {view.awaited}"
        return f"{waits}, {states}, alive {alive}\n{tail}"
