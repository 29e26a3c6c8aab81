"""What people and dashboards may know of a job, on the wire and as one frozen object.

`aimaster status` prints a `JobStatus` as text or as JSON; both come from this object.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from aimaster.errors import BadMessage
from aimaster.ids import Generation, JobId, NodeId
from aimaster.rpc import limits
from aimaster.rpc.gen import contract
from aimaster.rpc.goodput import NO_TIME, GoodputStatus, goodput_from_wire, goodput_to_wire
from aimaster.rpc.limits import clip
from aimaster.rpc.messages import ProcessInfo, RankProgress
from aimaster.rpc.wire import (
    Wire,
    checked,
    checked_generation,
    checked_text,
    notes_from_wire,
    notes_to_wire,
    or_minus_one,
    or_none,
    parse,
    process_to_wire,
    processes_from_wire,
    progress_from_wire,
    progress_to_wire,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """One node."""

    node: NodeId
    state: str
    """By the names in `aimaster.core.state`."""
    node_rank: int | None
    """None outside the generation."""
    address: str
    heartbeat_age_s: float | None
    """None if this life of the master has not heard it yet."""
    connected: bool
    processes: tuple[ProcessInfo, ...]
    progress: tuple[RankProgress, ...]
    saver_address: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetStatus:
    """How much of one budget is used."""

    cause: str
    used: int
    limit: int
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentStatus:
    """One thing that went wrong, and what came of it."""

    number: int
    kind: str
    node: str
    rank: int | None
    """None: the whole node."""
    reason: str
    generation: Generation
    """That it ended."""
    at_wall_s: float
    """When it was detected, seconds since the epoch."""
    last_step: int | None
    resumed_step: int | None
    restored_from: str
    """memory, peer, disk, or empty."""
    recovered_s: float | None
    """From detection to the first new step; None while it lasts."""
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HangStatus:
    """Hang detection: the limits in force."""

    enabled: bool
    blind: str
    """Why no verdict is given at the moment; empty where nothing is in the way."""
    stopped_s: float
    stuck_s: float
    busy_s: float | None
    """None: no such limit before the job's first step."""
    exit_s: float
    step_time_s: float
    """The 0.99 quantile of the job's own step times; 0 before there are any."""


NOBODY_LOOKS = HangStatus(
    enabled=False, blind="", stopped_s=0.0, stuck_s=0.0, busy_s=None, exit_s=0.0, step_time_s=0.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStatus:
    """For whom the other ranks wait, in shares of the time; see `aimaster.core.slowrank`."""

    node: NodeId
    ranks: tuple[int, ...]
    awake: float
    """Their main threads ran or wanted to."""
    running: float
    others_awake: float
    """Median over the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """One job at one moment."""

    job: JobId
    phase: str
    generation: Generation
    attempt: int
    """How often workers were started again; 0 also before the first start."""
    world_size: int
    nodes: tuple[NodeStatus, ...]
    master: ProcessInfo
    master_node: str
    """Node whose agent owns the master; empty for a master on its own."""
    memory_step: int | None
    durable_step: int | None
    budgets: tuple[BudgetStatus, ...]
    incidents: tuple[IncidentStatus, ...]
    """Newest last, a bounded number."""
    waiting_for: str
    """What the job waits for; empty when it does not."""
    epoch: int
    """Lives of the master so far."""
    software: str
    hang: HangStatus = NOBODY_LOOKS
    slow: SlowStatus | None = None
    goodput: GoodputStatus = NO_TIME
    memory_age_s: float | None = None
    """Since the newest step in memory became safe there; None where it is not known."""
    durable_age_s: float | None = None


def encode_status(status: JobStatus) -> bytes:
    """Bytes of a status reply."""
    wire = contract.StatusReply(
        job_id=status.job,
        phase=status.phase,
        generation=status.generation,
        attempt=status.attempt,
        world_size=status.world_size,
        nodes=[_node_to_wire(node) for node in status.nodes],
        master=process_to_wire(status.master),
        master_node=status.master_node,
        memory_step=or_minus_one(status.memory_step),
        durable_step=or_minus_one(status.durable_step),
        budgets=[
            contract.BudgetStatus(cause=one.cause, used=one.used, limit=one.limit, window_s=one.window_s)
            for one in status.budgets
        ],
        incidents=[_incident_to_wire(incident) for incident in status.incidents],
        waiting_for=clip(status.waiting_for),
        epoch=status.epoch,
        software=status.software,
        hang=_hang_to_wire(status.hang),
        slow=None if status.slow is None else _slow_to_wire(status.slow),
        goodput=goodput_to_wire(status.goodput),
        memory_age_s=_or_minus_one(status.memory_age_s),
        durable_age_s=_or_minus_one(status.durable_age_s),
    )
    data: bytes = wire.SerializeToString()
    return data


def decode_status(data: bytes) -> JobStatus:
    """Inverse of `encode_status`.

    Raises:
        BadMessage: if the bytes are not a status reply.
    """
    wire = parse(contract.StatusReply, data)
    (master,) = processes_from_wire((wire.master,))
    return JobStatus(
        job=JobId(checked_text("job_id", wire.job_id)),
        phase=checked_text("phase", wire.phase),
        generation=checked_generation("generation", wire.generation),
        attempt=wire.attempt,
        world_size=wire.world_size,
        nodes=tuple(_node_from_wire(node) for node in wire.nodes),
        master=master,
        master_node=checked_text("master_node", wire.master_node),
        memory_step=or_none("memory_step", wire.memory_step, high=limits.INT63_MAX),
        durable_step=or_none("durable_step", wire.durable_step, high=limits.INT63_MAX),
        budgets=tuple(
            BudgetStatus(
                cause=checked_text("budget.cause", one.cause),
                used=one.used,
                limit=one.limit,
                window_s=_finite("budget.window_s", one.window_s),
            )
            for one in wire.budgets
        ),
        incidents=tuple(_incident_from_wire(incident) for incident in wire.incidents),
        waiting_for=checked_text("waiting_for", wire.waiting_for),
        epoch=checked("epoch", wire.epoch, high=limits.INT63_MAX),
        software=checked_text("software", wire.software),
        hang=_hang_from_wire(wire.hang),
        slow=_slow_from_wire(wire.slow) if wire.HasField("slow") else None,
        goodput=goodput_from_wire(wire.goodput),
        memory_age_s=_finite_or_none("memory_age_s", wire.memory_age_s),
        durable_age_s=_finite_or_none("durable_age_s", wire.durable_age_s),
    )


def encode_status_request(job: JobId | None) -> bytes:
    """Bytes of a request; None takes whatever job is led there."""
    data: bytes = contract.StatusRequest(job_id=job or "").SerializeToString()
    return data


def decode_status_request(data: bytes) -> str:
    """The job that is asked for; empty for any."""
    return checked_text("job_id", parse(contract.StatusRequest, data).job_id)


def _node_to_wire(node: NodeStatus) -> Wire:
    return contract.NodeStatus(
        node_id=node.node,
        state=node.state,
        node_rank=or_minus_one(node.node_rank),
        address=node.address,
        heartbeat_age_s=_or_minus_one(node.heartbeat_age_s),
        connected=node.connected,
        processes=[process_to_wire(process) for process in node.processes],
        progress=[progress_to_wire(progress) for progress in node.progress],
        saver_address=node.saver_address,
        notes=notes_to_wire(node.notes),
    )


def _node_from_wire(wire: Wire) -> NodeStatus:
    return NodeStatus(
        node=NodeId(checked_text("node.node_id", wire.node_id)),
        state=checked_text("node.state", wire.state),
        node_rank=or_none("node.node_rank", wire.node_rank, high=limits.NODES_MAX),
        address=checked_text("node.address", wire.address),
        heartbeat_age_s=_finite_or_none("node.heartbeat_age_s", wire.heartbeat_age_s),
        connected=wire.connected,
        processes=processes_from_wire(wire.processes),
        progress=progress_from_wire(wire.progress),
        saver_address=checked_text("node.saver_address", wire.saver_address),
        notes=notes_from_wire(wire.notes),
    )


def _incident_to_wire(incident: IncidentStatus) -> Wire:
    return contract.Incident(
        id=incident.number,
        kind=incident.kind,
        node_id=incident.node,
        rank=or_minus_one(incident.rank),
        reason=incident.reason,
        generation=incident.generation,
        at_wall_s=incident.at_wall_s,
        last_step=or_minus_one(incident.last_step),
        resumed_step=or_minus_one(incident.resumed_step),
        restored_from=incident.restored_from,
        recovered_s=_or_minus_one(incident.recovered_s),
        error=clip(incident.error),
    )


def _incident_from_wire(wire: Wire) -> IncidentStatus:
    return IncidentStatus(
        number=wire.id,
        kind=checked_text("incident.kind", wire.kind),
        node=checked_text("incident.node_id", wire.node_id),
        rank=or_none("incident.rank", wire.rank, high=limits.INT32_MAX),
        reason=checked_text("incident.reason", wire.reason),
        generation=checked_generation("incident.generation", wire.generation),
        at_wall_s=_finite("incident.at_wall_s", wire.at_wall_s),
        last_step=or_none("incident.last_step", wire.last_step, high=limits.INT63_MAX),
        resumed_step=or_none("incident.resumed_step", wire.resumed_step, high=limits.INT63_MAX),
        restored_from=checked_text("incident.restored_from", wire.restored_from),
        recovered_s=_finite_or_none("incident.recovered_s", wire.recovered_s),
        error=checked_text("incident.error", wire.error),
    )


def _hang_to_wire(hang: HangStatus) -> Wire:
    return contract.HangStatus(
        enabled=hang.enabled,
        blind=clip(hang.blind),
        stopped_s=hang.stopped_s,
        stuck_s=hang.stuck_s,
        busy_s=hang.busy_s or 0.0,
        exit_s=hang.exit_s,
        step_time_s=hang.step_time_s,
    )


def _slow_to_wire(slow: SlowStatus) -> Wire:
    return contract.SlowStatus(
        node_id=slow.node,
        ranks=slow.ranks,
        awake=slow.awake,
        running=slow.running,
        others_awake=slow.others_awake,
    )


def _slow_from_wire(wire: Wire) -> SlowStatus:
    return SlowStatus(
        node=NodeId(checked_text("slow.node_id", wire.node_id)),
        ranks=tuple(wire.ranks),
        awake=_finite("slow.awake", wire.awake),
        running=_finite("slow.running", wire.running),
        others_awake=_finite("slow.others_awake", wire.others_awake),
    )


def _hang_from_wire(wire: Wire) -> HangStatus:
    return HangStatus(
        enabled=wire.enabled,
        blind=checked_text("hang.blind", wire.blind),
        stopped_s=_finite("hang.stopped_s", wire.stopped_s),
        stuck_s=_finite("hang.stuck_s", wire.stuck_s),
        busy_s=_finite("hang.busy_s", wire.busy_s) or None,
        exit_s=_finite("hang.exit_s", wire.exit_s),
        step_time_s=_finite("hang.step_time_s", wire.step_time_s),
    )


def _or_minus_one(seconds: float | None) -> float:
    return -1.0 if seconds is None else seconds


def _finite_or_none(name: str, value: float) -> float | None:
    return _finite(name, value) if value >= 0 or math.isnan(value) else None


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise BadMessage(f"field {name} must be finite, got {value}")
    return value
