"""What agents and master say to each other besides the core's events and commands, as frozen dataclasses.

An agent says `Hello` first and is answered `Welcome` or `Refused`. Then it sends `Heartbeat`s, and facts,
which are the core's own `NodeEvent`s; the master sends acknowledgements and the core's own `Command`s. Every
message travels with a `Header`. Values are checked when an object is made; a `ValueError` says what is wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from aimaster.core.events import AgentPhase, RestartScope
from aimaster.core.sights import Effort, Sight, WorkerPhase
from aimaster.ids import NO_GENERATION, Generation, Incarnation, JobId, NodeId
from aimaster.rpc import limits


class Role(Enum):
    """What a process of ours is."""

    AGENT = "agent"
    MASTER = "master"
    SAVER = "saver"
    TEMPLATE = "template"
    WORKER = "worker"


class RefusalKind(Enum):
    """Why a master does not take an agent in. All of them are for good."""

    PROTOCOL = "protocol"  # no common protocol version
    JOB = "job"  # this master serves another job
    MISMATCH = "mismatch"  # same job, declared differently
    ENDED = "ended"  # the job is over
    NODE_ID = "node_id"  # another live agent has this node id


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who an agent is, for as long as it lives."""

    job: JobId
    node: NodeId
    incarnation: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Travels with every message, both ways."""

    job: JobId
    node: NodeId
    """The agent's node, also on what the master sends."""
    incarnation: Incarnation
    """Of the sender."""
    generation: Generation = NO_GENERATION
    """Newest that the sender knows."""
    seq: int = 0
    """Of facts and commands, from 1, per incarnation of the sender."""
    ack: int = 0
    """Highest number of the other side that the sender has taken in."""
    epoch: int = 0
    """Of the master's lease; agents obey the highest that they have seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessInfo:
    """One process on a node."""

    role: Role
    pid: int
    rank: int | None = None
    """Global rank of a worker; None for all others."""

    def __post_init__(self) -> None:
        _check_range("pid", self.pid, 1, limits.INT32_MAX)
        if self.rank is not None:
            _check_range("rank", self.rank, 0, limits.INT32_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProgress:
    """How far one worker has come in this attempt."""

    local_rank: int
    rank: int | None
    phase: WorkerPhase
    steps: int
    """Since the start of the attempt."""
    saved_step: int | None
    """The training's own step where easyckpt is used."""
    age_s: float
    """Since the worker last wrote, by the node's monotonic clock."""
    sight: Sight | None = None
    """None where nobody looks."""
    effort: Effort | None = None
    """None where the kernel does not tell."""

    def __post_init__(self) -> None:
        _check_range("local_rank", self.local_rank, 0, limits.RANKS_PER_NODE_MAX - 1)
        _check_range("steps", self.steps, 0, limits.INT63_MAX)
        if self.rank is not None:
            _check_range("rank", self.rank, 0, limits.INT32_MAX)
        if self.saved_step is not None:
            _check_range("saved_step", self.saved_step, 0, limits.INT63_MAX)
        if not (math.isfinite(self.age_s) and self.age_s >= 0):
            raise ValueError(f"age_s must be finite and not negative, got {self.age_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What an agent says first in every session."""

    protocol_min: int = limits.PROTOCOL_MIN
    protocol_max: int = limits.PROTOCOL_MAX
    software: str
    address: str
    """At which other nodes reach this one."""
    workers: int
    saver_address: str = ""
    wanted_node_rank: int | None = None
    phase: AgentPhase = AgentPhase.IDLE
    generation: Generation = NO_GENERATION
    """That the agent's workers belong to, if it has any."""
    min_nodes: int
    max_nodes: int
    max_restarts: int | None = None
    scope: RestartScope = RestartScope.JOB
    processes: tuple[ProcessInfo, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes <= limits.NODES_MAX:
            raise ValueError(f"need 1 <= min_nodes <= max_nodes, got {self.min_nodes}:{self.max_nodes}")
        _check_range("workers", self.workers, 1, limits.RANKS_PER_NODE_MAX)
        _check_length("processes", self.processes, limits.PROCESSES_PER_NODE_MAX)
        _check_length("notes", self.notes, limits.NOTES_MAX)
        if self.max_restarts is not None:
            _check_range("max_restarts", self.max_restarts, 0, limits.INT32_MAX)
        if self.wanted_node_rank is not None:
            _check_range("wanted_node_rank", self.wanted_node_rank, 0, limits.NODES_MAX - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The master takes the agent in."""

    protocol: int
    heartbeat_interval_s: float
    agent_orphan_timeout_s: float
    software: str

    def __post_init__(self) -> None:
        for name in ("heartbeat_interval_s", "agent_orphan_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be finite and more than 0, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The master does not take the agent in, and will not."""

    kind: RefusalKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """That an agent lives, and how far its workers are."""

    phase: AgentPhase
    progress: tuple[RankProgress, ...] = ()
    processes: tuple[ProcessInfo, ...] | None = None
    """None on the wire means: as last said. The agent's own callback always gives them."""
    notes: tuple[str, ...] = ()
    """As `processes`: counts only where those are given."""
    stacks: tuple[str, ...] = ()
    """Distinct stacks that the sights point into."""
    generation: Generation = NO_GENERATION
    """That the progress belongs to."""
    clock_s: float = 0.0
    """The agent's observed clock."""
    world_size: int = 0
    """As another launcher told the ranks; 0 where it is the generation's own."""
    base_step: int = 0
    """The training's own step at the start of the attempt."""

    def __post_init__(self) -> None:
        _check_length("progress", self.progress, limits.RANKS_PER_NODE_MAX)
        _check_length("stacks", self.stacks, limits.STACKS_MAX)
        _check_length("processes", self.processes or (), limits.PROCESSES_PER_NODE_MAX)
        _check_length("notes", self.notes, limits.NOTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """The master heard a heartbeat or took in a fact; what it says is in the header."""


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} must be from {low} to {high}, got {value}")


def _check_length(name: str, values: tuple[object, ...], length_max: int) -> None:
    if len(values) > length_max:
        raise ValueError(f"at most {length_max} {name}, got {len(values)}")
