"""What the machine knows: one private mutable record, and the frozen views that everyone else reads.

Two rules keep this small. A fact stands in one place only (who is a member is `JobRecord.members`; what a
node is doing is `NodeRecord.state`), and whatever is derived from it for speed (`JobRecord.awaited`, the
running digest) is checked against the facts by `aimaster.core.invariants`.

The digest is a number that two machines share exactly when they were told the same story, so that a replayed
journal can be compared with the state it was written from. It is a sum over the job and its nodes, so that an
event about one node costs one node's worth of work even where there are ten thousand.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import Enum

from aimaster.core.commands import Reason
from aimaster.core.events import JobDeclared, RestartScope, TimerKind
from aimaster.core.policy import NO_HISTORY, Cause, History
from aimaster.ids import NO_GENERATION, Generation, Incarnation, JobId, NodeId

NO_RANK = -1
"""Rank or node rank of what has none."""

RETIRED_INCARNATIONS_MAX = 32
"""How many past lives of one node are remembered, so that a late message of theirs is known as such."""


class JobPhase(Enum):
    """Where the job stands."""

    UNDECLARED = "undeclared"  # nobody has said yet what the job is
    WAITING = "waiting"  # not enough nodes, or more may still come; no workers run
    PREPARING = "preparing"  # members stop what is old and get ready
    STARTING = "starting"  # members start their workers
    RUNNING = "running"  # workers run on every member
    ENDING = "ending"  # everyone was told to end
    ENDED = "ended"  # nobody is left


class NodeState(Enum):
    """What a node is doing, as far as the machine was told."""

    SPARE = "spare"  # healthy, outside the generation
    PREPARING = "preparing"  # told to prepare
    PREPARED = "prepared"  # has no workers and holds a port
    STARTING = "starting"  # told to start workers
    RUNNING = "running"  # its workers run
    FINISHED = "finished"  # all its workers ended well, others still run
    ASIDE = "aside"  # did not do what it was told; not used until it proves that it can
    ENDING = "ending"  # told to end
    LOST = "lost"  # given up by the failure detector
    LEFT = "left"  # said goodbye


GONE = frozenset({NodeState.LOST, NodeState.LEFT})
"""States of a node that nothing can be sent to."""

UNUSABLE = GONE | {NodeState.ASIDE, NodeState.ENDING}
"""States of a node that cannot be a member of the next generation."""

LIVE_PHASES = frozenset({JobPhase.PREPARING, JobPhase.STARTING, JobPhase.RUNNING})
"""Phases in which a generation exists whose members count on each other."""


OVER = frozenset({JobPhase.ENDING, JobPhase.ENDED})
"""Phases in which the outcome is known."""


class WaitingFor(Enum):
    """What a job that does not run is waiting for."""

    NOTHING = "nothing"
    JOB = "job"  # the first agent
    NODES = "nodes"  # fewer than the minimum
    LAST_CALL = "last_call"  # enough, but more may come
    PREPARATION = "preparation"
    WORKERS = "workers"
    GOODBYES = "goodbyes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timer:
    """A timer that runs."""

    generation: Generation
    deadline_s: float
    """On the clock that `Machine.step` is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """What a seat that is started again by itself carries from one start to the next (`RestartScope.NODE`).

    It goes with the seat when another node takes it. Where the whole job restarts, nothing here is used.
    """

    due_s: float | None = None
    """When the node must have done what it was told; None where nothing is asked of it."""
    begun: bool = False
    """Whether workers were started since it was last told to prepare."""
    attempt: int = 0
    """Number of its newest start."""
    first_step_at_s: float | None = None
    attempt_step: int | None = None
    """Newest step seen since that start."""
    committed: int | None = None
    """Newest checkpoint step that it committed, in any tier."""
    restorable: bool = False
    """Whether it ever restored or committed a step: then a start from nothing is an error."""
    expected: bool = False
    """What its workers were told of that."""
    trail: History = NO_HISTORY
    """Its progress and its newest error. Charges and restarts are counted for the job."""

    def canonical(self) -> str:
        """All of it in one line."""
        return repr(
            (
                *(self.due_s, self.begun, self.attempt, self.first_step_at_s, self.attempt_step),
                *(self.committed, self.restorable, self.expected, self.trail.canonical()),
            )
        )


@dataclass(slots=True, kw_only=True)
class NodeRecord:
    """One node. Belongs to the machine; nobody else may hold one."""

    id: NodeId
    incarnation: Incarnation
    address: str
    workers: int
    saver_address: str
    wanted_node_rank: int | None
    order: int
    """Place in the order of first arrival."""
    state: NodeState = NodeState.SPARE
    suspect: bool = False
    retired: tuple[Incarnation, ...] = ()
    generation: Generation = NO_GENERATION
    """The newest generation that it was told to prepare for."""
    port: int = 0
    node_rank: int = NO_RANK
    first_rank: int = NO_RANK
    finished: set[int] = field(default_factory=set)
    """Local ranks that ended well in this generation."""
    strikes: int = 0
    """How often it failed to do what it was told since its workers last started."""
    failed_generation: Generation = NO_GENERATION
    """The generation of its newest failure: the same report may come twice after a restart of the master."""
    fault: str = ""
    """A mark of its newest failure, equal for equal faults of all nodes; see `aimaster.core.commoncause`."""
    fault_at_s: float = 0.0
    end_code: int | None = None
    """The exit code that it was told to end with."""
    unit: Unit | None = None
    """Only where its workers may be started again alone, and once they were started."""
    print_: int = 0
    """Its share in the running digest."""

    def canonical(self) -> str:
        """All of it in one line, equal for equal records on every machine and Python."""
        return repr(
            (
                *(self.id, self.incarnation, self.address, self.workers, self.saver_address),
                *(self.wanted_node_rank, self.order, self.state.value, self.suspect, self.retired),
                *(self.generation, self.port, self.node_rank, self.first_rank),
                *(tuple(sorted(self.finished)), self.strikes, self.failed_generation, self.end_code),
                # Without a unit or a fault nothing is added: the journals of such jobs keep their digests.
                *((self.unit.canonical(),) if self.unit is not None else ()),
                *((self.fault, self.fault_at_s) if self.fault else ()),
            )
        )


@dataclass(slots=True, kw_only=True)
class JobRecord:
    """The job. Belongs to the machine; nobody else may hold one."""

    declared: JobDeclared | None = None
    phase: JobPhase = JobPhase.UNDECLARED
    generation: Generation = NO_GENERATION
    seen_generation: Generation = NO_GENERATION
    """The newest that any agent has ever named: a master that lost its journal must not go below it."""
    starts: int = 0
    """How often workers were started."""
    members: tuple[NodeId, ...] = ()
    """Nodes of the generation by node rank; empty while waiting."""
    seats: dict[NodeId, int] = field(default_factory=dict)
    """Node ranks of the newest generation whose workers were started, its lost nodes included: there lie the
    pieces of the newest checkpoint in memory."""
    world_size: int = 0
    awaited: set[NodeId] = field(default_factory=set)
    """Members that have not yet said that they are prepared, or that their workers run."""
    unfinished: int = 0
    """Members whose workers have not all ended well."""
    timers: dict[TimerKind, Timer] = field(default_factory=dict)
    arrivals: int = 0
    history: History = NO_HISTORY
    """What was charged so far; see `aimaster.core.policy`."""
    uncharged: History | None = None
    """The history before the newest charge, until workers start again: a lost node may yet explain it."""
    blamed: frozenset[NodeId] = frozenset()
    """Members of the generation that the newest charge ended."""
    memory_step: int | None = None
    durable_step: int | None = None
    restored: bool = False
    resumed_step: int | None = None
    """Checkpoint step that this attempt began from."""
    progress_expected: bool = False
    """What the members of this generation were told: whether an earlier attempt had something to restore."""
    first_step_at_s: float | None = None
    attempt_step: int | None = None
    """Newest step seen in this attempt."""
    exit_code: int | None = None
    end_reason: Reason | None = None
    sentence: str = ""

    def bulk(self) -> tuple[object, ...]:
        """What is large and seldom changes: each is replaced as a whole, never changed in place."""
        return (self.members, self.seats, self.history, self.uncharged, self.blamed)

    def bulk_canonical(self) -> str:
        """The bulk in one line."""
        uncharged = self.uncharged.canonical() if self.uncharged else None
        seats, blamed = sorted(self.seats.items()), sorted(self.blamed)
        return repr((self.members, seats, self.history.canonical(), uncharged, blamed))

    def canonical(self) -> str:
        """All but the bulk in one line, equal for equal records on every machine and Python.

        Without `awaited`, which says again what the states of the members say.
        """
        timers = sorted((kind.value, t.generation, t.deadline_s) for kind, t in self.timers.items())
        reason = self.end_reason.value if self.end_reason else None
        rows: tuple[tuple[object, ...], ...] = (
            (_declared_line(self.declared), self.phase.value, self.generation, self.seen_generation),
            (self.starts, self.world_size, self.unfinished, timers, self.arrivals),
            (self.memory_step, self.durable_step, self.restored, self.progress_expected),
            (self.first_step_at_s, self.attempt_step, self.exit_code, reason, self.resumed_step),
        )
        return repr(rows)


def _declared_line(declared: JobDeclared | None) -> tuple[object, ...] | None:
    if declared is None:
        return None
    line = (declared.job, declared.min_nodes, declared.max_nodes, declared.max_restarts)
    # As above: a job without a declared scope keeps the digests of its journal.
    return line if declared.scope is RestartScope.JOB else (*line, declared.scope.value)


_MODULUS = 2**128


def fingerprint(text: str) -> int:
    """A number below 2**128 that tells texts apart; the same on every machine, unlike `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big")


class State:
    """The job, its nodes, and the running digest over both."""

    def __init__(self) -> None:
        self.job = JobRecord()
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.usable: dict[NodeId, NodeRecord] = {}
        """Nodes that can be members of the next generation; kept so that a burst of arrivals stays cheap."""
        self.present: set[NodeId] = set()
        """Nodes that are not gone; kept so that a burst of goodbyes stays cheap."""
        self._bulk: tuple[object, ...] = ()
        self._bulk_print = 0
        self._sum = 0
        self._touched: dict[NodeId, NodeRecord] = {}

    def touch(self, node: NodeRecord) -> None:
        """Say that a node's record is about to change or has changed. Needed for every change."""
        self._touched[node.id] = node
        if node.state in UNUSABLE:
            self.usable.pop(node.id, None)
        else:
            self.usable[node.id] = node
        if node.state in GONE:
            self.present.discard(node.id)
        else:
            self.present.add(node.id)

    def digest(self) -> str:
        """32 hexadecimal digits; equal for equal states."""
        for node in self._touched.values():
            new = fingerprint(node.canonical())
            self._sum = (self._sum - node.print_ + new) % _MODULUS
            node.print_ = new
        self._touched.clear()
        bulk = self.job.bulk()
        if len(bulk) != len(self._bulk) or any(a is not b for a, b in zip(bulk, self._bulk, strict=True)):
            self._bulk, self._bulk_print = bulk, fingerprint(self.job.bulk_canonical())
        job = fingerprint(self.job.canonical()) + self._bulk_print
        return f"{(self._sum + job) % _MODULUS:032x}"

    def digest_from_scratch(self) -> str:
        """The same number without anything remembered; for checkers."""
        total = sum(fingerprint(node.canonical()) for node in self.nodes.values())
        job = fingerprint(self.job.canonical()) + fingerprint(self.job.bulk_canonical())
        return f"{(total + job) % _MODULUS:032x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node, for readers."""

    node: NodeId
    incarnation: Incarnation
    state: NodeState
    suspect: bool
    address: str
    saver_address: str
    workers: int
    node_rank: int
    """`NO_RANK` outside the generation."""
    first_rank: int
    generation: Generation
    finished: int
    """How many of its workers ended well."""
    strikes: int

    @property
    def gone(self) -> bool:
        """Whether nothing can be sent to it."""
        return self.state in GONE


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetView:
    """How much of one budget is used."""

    cause: Cause
    used: int
    limit: int
    window_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """The whole job at one moment, for readers. Made on request; costs time by the number of nodes."""

    job: JobId | None
    phase: JobPhase
    generation: Generation
    attempt: int
    """Number of the newest start of workers, from 0; -1 before the first."""
    min_nodes: int
    max_nodes: int
    max_restarts: int | None
    restarts: int
    world_size: int
    members: tuple[NodeId, ...]
    nodes: tuple[NodeView, ...]
    memory_step: int | None
    durable_step: int | None
    budgets: tuple[BudgetView, ...]
    timers: tuple[tuple[TimerKind, Timer], ...]
    waiting_for: WaitingFor
    awaited: tuple[NodeId, ...]
    """The nodes that it waits for, where they are known."""
    exit_code: int | None
    end_reason: Reason | None
    sentence: str
    """Why it ended, for people; empty before."""

    def node(self, node: NodeId) -> NodeView | None:
        """The node of that name, if it was ever seen."""
        return next((view for view in self.nodes if view.node == node), None)
