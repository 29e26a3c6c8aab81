"""A large job that trains for a while: what would this policy have done to it?

The same core, network and faults as in the small worlds, watched by the same checkers, but with the policy
that is asked about, and with figures at the end instead of a bare "it held". After the time is over, faults
stop, and the job has to be running or ended well within a bounded time: a job that is stuck is a `Violation`
that says what it waits for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from aimaster.core.commands import Reason
from aimaster.core.detector import DetectorConfig
from aimaster.core.events import NodeDied, StepCommitted
from aimaster.core.policy import Policy
from aimaster.core.sentences import sentence
from aimaster.core.state import NodeState
from aimaster.ids import NodeId
from aimaster.journal.base import Entry
from aimaster.journal.incidents import Incident, incidents
from aimaster.journal.replay import replay
from aimaster.simulation.checkers import Violation
from aimaster.simulation.clock import WALL_START_S
from aimaster.simulation.faults import OF_THE_MASTER, Fault, FaultKind, Strike
from aimaster.simulation.scenario import draw_by_mtbf
from aimaster.simulation.training import TrainingOptions
from aimaster.simulation.world import LIVENESS_S, Options, World

__all__ = ["Fleet", "Outcome", "train"]

STEPS_NEVER_REACHED = 10**9
TRACE_LINES_MAX = 5000
INSIDE_SHARE = 4
"""The invariants cost time by the number of nodes: they are looked at once for so many parts of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """What is simulated."""

    nodes: int
    minutes: float
    seed: int = 0
    spares: int = 0
    min_nodes: int | None = None
    """None: half of the nodes."""
    workers: int = 8
    step_s: float = 5.0
    first_step_s: float | None = None
    """See `TrainingOptions`."""
    commit_every: int = 1
    """Steps from one checkpoint that survives a lost node to the next."""
    policy: Policy = field(default_factory=Policy)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    faults: tuple[Fault, ...] = ()
    mtbf_s: float | None = None
    """If set, faults are drawn in addition: `aimaster.simulation.scenario.draw_by_mtbf`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a fleet."""

    seed: int
    nodes: int
    minutes: float
    exit_code: int | None
    """None: it still ran."""
    steps: int
    """Training steps that stand at the end; those that were done again count once."""
    goodput: float
    """Share of the time that went into those steps."""
    lost_node_hours: float
    faults: int
    """How many struck a node on which workers ran, or the master."""
    incidents: tuple[Incident, ...]
    detection_s: tuple[float, ...]
    """From each fault that led to an incident to its first sign."""
    recovery_s: tuple[float, ...]
    """From the first sign to the first new step."""
    drained_healthy: tuple[NodeId, ...]
    """Nodes that were given up or set aside although no fault had struck them."""
    core_steps: int
    digest: str
    trace: tuple[str, ...]
    """The decisions, a line each, without the steps that all went well; the first `TRACE_LINES_MAX`."""


def train(fleet: Fleet) -> Outcome:
    """Let a fleet train.

    Raises:
        Violation: anything happened that must not happen, or the job is stuck.
    """
    horizon_s = fleet.minutes * 60
    agents = fleet.nodes + fleet.spares
    world = World(
        Options(
            seed=fleet.seed,
            min_nodes=fleet.min_nodes if fleet.min_nodes is not None else max(1, fleet.nodes // 2),
            max_nodes=fleet.nodes,
            agents=agents,
            workers=fleet.workers,
            training=TrainingOptions(
                steps=STEPS_NEVER_REACHED,
                step_s=fleet.step_s,
                first_step_s=fleet.first_step_s,
                commit_every=fleet.commit_every,
            ),
            policy=fleet.policy,
            detector=fleet.detector,
            horizon_s=horizon_s,
            inside_every=max(1, agents // INSIDE_SHARE),
        )
    )
    faults = fleet.faults
    if fleet.mtbf_s is not None:
        random = Random(f"faults of {fleet.seed}")
        faults += draw_by_mtbf(random, nodes=agents, horizon_s=horizon_s, mtbf_s=fleet.mtbf_s)
    striker = world.start(faults)
    world.timeline.run(horizon_s, stop=world.over)
    reached = world.training.reached
    entries = tuple(world.master.journal.entries())
    exit_code = world.master.machine.view(world.timeline.now_s).exit_code
    _must_live(world)
    return _outcome(fleet, world, entries, striker.struck, reached=reached, exit_code=exit_code)


def _must_live(world: World) -> None:
    """Without further faults, the job trains on or is over; and the journal tells all of it."""
    before = len(world.training.stepping)

    def lives() -> bool:
        return len(world.training.stepping) > before or world.over()

    world.heal()
    world.timeline.run(world.timeline.now_s + LIVENESS_S, stop=lives)
    if not lives():
        raise Violation(f"stuck for {LIVENESS_S:g} s without faults; {world.pending()}")
    if replay(world.master.journal).digest() != world.master.machine.digest():
        raise Violation("the whole journal leads to another state")


def _outcome(
    fleet: Fleet,
    world: World,
    entries: Sequence[Entry],
    struck: Sequence[Strike],
    *,
    reached: int,
    exit_code: int | None,
) -> Outcome:
    total_s = fleet.minutes * 60
    useful_s = min(total_s, reached * fleet.step_s)
    found = incidents(entries)
    hurt = [strike for strike in struck if strike.training or strike.fault.kind in OF_THE_MASTER]
    return Outcome(
        seed=fleet.seed,
        nodes=fleet.nodes,
        minutes=fleet.minutes,
        exit_code=exit_code,
        steps=reached,
        goodput=useful_s / total_s,
        lost_node_hours=fleet.nodes * (total_s - useful_s) / 3600,
        faults=len(hurt),
        incidents=found,
        detection_s=tuple(_detections(hurt, found, fleet.detector)),
        recovery_s=tuple(one.recovered_s for one in found if one.recovered_s is not None),
        drained_healthy=_drained_healthy(world, entries, struck),
        core_steps=len(entries),
        digest=world.master.machine.digest(),
        trace=tuple(islice(_trace(entries), TRACE_LINES_MAX)),
    )


def _trace(entries: Sequence[Entry]) -> Iterator[str]:
    for entry in entries:
        event, decision = entry.record.event, entry.record.decision
        if isinstance(event, StepCommitted):
            continue
        who = getattr(event, "node", "") or "-"
        said = sentence(decision.reason, decision.facts)
        yield f"{entry.record.at_s:10.2f}  {type(event).__name__:<15} {who:<6} {said}"


def _detections(
    strikes: Sequence[Strike], found: Sequence[Incident], detector: DetectorConfig
) -> list[float]:
    """For each incident, the time since the newest fault that can have led to it: one on a node that it names
    (partners of a killed worker often fail before its own agent has said so), or a hang."""
    patience_s = detector.dead_s * detector.stretch_max
    delays = []
    for incident in found:
        at_s = incident.detected_wall_s - WALL_START_S
        named = {incident.node, *(other.node for other in incident.also_failed)}
        causes = [
            strike.at_s
            for strike in strikes
            if strike.at_s <= at_s <= strike.at_s + strike.fault.lasts_s + patience_s
            and strike.fault.kind not in OF_THE_MASTER
            and (f"n{strike.fault.node}" in named or strike.fault.kind is FaultKind.HANG_WORKERS)
        ]
        if causes:
            delays.append(at_s - max(causes))
    return delays


def _drained_healthy(world: World, entries: Sequence[Entry], struck: Sequence[Strike]) -> tuple[NodeId, ...]:
    hurt = {NodeId(f"n{strike.fault.node}") for strike in struck if strike.fault.kind not in OF_THE_MASTER}
    given_up = {
        entry.record.event.node
        for entry in entries
        if isinstance(entry.record.event, NodeDied) and entry.record.decision.reason is not Reason.STALE
    }
    view = world.master.machine.view(world.timeline.now_s)
    aside = {node.node for node in view.nodes if node.state is NodeState.ASIDE}
    return tuple(sorted((given_up | aside) - hurt))
