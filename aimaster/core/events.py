"""What the core is told: facts in the past tense, frozen and validated when made.

Every event here is journalled before it is acted on, so that a replay of the journal gives the same state.
Heartbeats are not events: they go to the detector and to the progress table, which turn them into
`NodeSuspected`, `NodeRecovered` and `NodeDied`. A job of 10,000 nodes therefore writes nothing while it is
well.

An event about a node carries the incarnation of the agent that said it, and an event about workers the
generation they belong to. The machine ignores what is older than what it knows, and says so in its decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from aimaster.core.sights import Activity, Wait
from aimaster.ids import NO_GENERATION, Generation, Incarnation, JobId, NodeId

ERROR_TEXT_CHARS_MAX = 4096
"""Longest error text an event may hold; the agent folds longer ones before it sends them."""
FINDINGS_MAX = 16
"""Most findings that an event of a checked node may hold."""


def _check_seconds(**fields: float) -> None:
    for name, value in fields.items():
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, got {value}")


class AgentPhase(Enum):
    """What an agent is doing, as it says itself when it joins or comes back."""

    IDLE = "idle"
    PREPARED = "prepared"
    RUNNING = "running"
    ENDED = "ended"


class StopKind(Enum):
    """Who asked for the end."""

    INTERRUPT = "interrupt"  # Ctrl-C: exit code 130
    PREEMPTION = "preemption"  # SIGTERM, SIGUSR1/2, a scheduler's notice: exit code 10


class RestartScope(Enum):
    """The smallest unit that may be started again alone, as the job declares it."""

    JOB = "job"  # process groups span the job: all workers, or none
    NODE = "node"  # no process group crosses nodes: one node's workers


class Tier(Enum):
    """Where a restored step came from, nearest first."""

    MEMORY = "memory"
    PEER = "peer"
    DISK = "disk"


class Suspicion(Enum):
    """Why a node is looked at more closely."""

    FAILURE = "failure"  # a failure whose cause may lie in the node
    HANG = "hang"  # its rank keeps the others waiting for good
    SLOW = "slow"  # its rank keeps the others waiting in every step
    SILENCE = "silence"  # its beats were missing, and it is heard again


class TimerKind(Enum):
    """Timers that the core asks for; at most one of each kind runs."""

    LAST_CALL = "last_call"  # more nodes than the minimum may still come
    PREPARE = "prepare"  # members must report that they are prepared
    START = "start"  # members must report that workers run
    DRAIN = "drain"  # members must have ended
    UNIT = "unit"  # a node that starts again beside others that go on must be prepared, or have started
    REPLACEMENT = "replacement"  # how long to wait for a node when below the minimum


class HangKind(Enum):
    """How a job hangs; see `aimaster.core.hang`."""

    STOPPED = "stopped"
    STUCK = "stuck"
    DEADLOCK = "deadlock"
    BUSY = "busy"
    EXIT = "exit"  # some ranks have finished and the others do nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDeclared(Event):
    """The first agent said what the job is. First event of every journal."""

    job: JobId
    min_nodes: int
    max_nodes: int
    max_restarts: int | None
    """Cap on restarts of the whole job; None leaves it to the budget."""
    scope: RestartScope = RestartScope.JOB

    def __post_init__(self) -> None:
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ValueError(f"need 1 <= min_nodes <= max_nodes, got {self.min_nodes}:{self.max_nodes}")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError(f"max_restarts must not be negative, got {self.max_restarts}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEvent(Event):
    """Base of the events about one node."""

    node: NodeId
    incarnation: Incarnation
    seq: int = 0
    """Number that the agent gave this fact, from 1 per incarnation; 0 for what the master itself found out.

    It is journalled with the event, so that a restarted master knows which facts it has taken in already.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined(NodeEvent):
    """An agent opened a session: new, restarted (other incarnation) or back after a cut (same one)."""

    address: str
    """Host name or IP address at which other nodes reach this one's workers and saver."""
    workers: int
    """Training processes that this node starts (``--nproc-per-node``; 1 for a command)."""
    saver_address: str = ""
    """``host:port`` of the node's checkpoint saver; empty when there is none."""
    wanted_node_rank: int | None = None
    """``--node-rank`` of a static rendezvous; None lets the core choose."""
    phase: AgentPhase = AgentPhase.IDLE
    generation: Generation = NO_GENERATION
    """The generation that the agent's workers belong to, if it has any."""

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"a node needs at least one worker, got {self.workers}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLeft(NodeEvent):
    """An agent said goodbye; it will not come back by itself."""

    exit_code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSuspected(NodeEvent):
    """No heartbeat for longer than usual."""

    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecovered(NodeEvent):
    """A suspected node was heard again."""

    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDied(NodeEvent):
    """Silent for so long that it is given up."""

    silent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePrepared(NodeEvent):
    """Old workers are proved gone; the node can start the generation."""

    generation: Generation
    rendezvous_port: int
    """A port that the agent holds for the workers' store, in case rank 0 is placed here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFailed(NodeEvent):
    """The node could not do what it was told: an unkillable worker, no port, no saver."""

    generation: Generation
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChecked(NodeEvent):
    """A node on which a suspicion fell was checked."""

    generation: Generation
    why: Suspicion
    looked: int
    """How many checks could look; what could not is no finding."""
    findings: tuple[str, ...] = ()
    """What failed or warned, worst first, one line each, at most `FINDINGS_MAX`."""
    blocking: bool = False
    """Whether training would fail or be wrong there."""

    def __post_init__(self) -> None:
        if self.looked < 0 or len(self.findings) > FINDINGS_MAX:
            raise ValueError(f"{len(self.findings)} findings of {self.looked} checks")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStarted(NodeEvent):
    """All workers of the node were forked."""

    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited(NodeEvent):
    """One worker ended, well (exit_code 0) or not.

    When several workers fail together, each is reported; the machine acts on the first that counts.
    """

    generation: Generation
    local_rank: int
    rank: int
    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None
    step: int | None
    """Last step that the rank was seen to finish in this attempt; None without a step hook."""
    error: str = ""
    """Exception line and last frames, or the last output lines, at most `ERROR_TEXT_CHARS_MAX`."""
    error_digest: str = ""
    """Equal for two failures with the same traceback; empty where there was none."""
    stalled_s: float = 0.0
    """How long saving has held the training in this attempt."""

    def __post_init__(self) -> None:
        _check_seconds(stalled_s=self.stalled_s)
        if (self.exit_code is None) == (self.signal is None):
            raise ValueError("exactly one of exit_code and signal must be given")
        if len(self.error) > ERROR_TEXT_CHARS_MAX:
            raise ValueError(f"error text of {len(self.error)} characters, at most {ERROR_TEXT_CHARS_MAX}")

    @property
    def ok(self) -> bool:
        """Whether the worker finished its script."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StackGroup:
    """Ranks that looked alike when a hang was found."""

    ranks: str
    """As ranges: ``0-3,7``."""
    activity: Activity
    wait: Wait
    where: str
    collective: str
    stack: str
    """Innermost frame first; empty where none could be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersHung(Event):
    """No rank steps any more, and the witnesses say why. Found out by the master itself."""

    generation: Generation
    kind: HangKind
    node: NodeId
    """Of the first culprit; of the first member where nobody is blamed."""
    culprits: tuple[int, ...]
    """Ranks; empty where nobody can be blamed."""
    stalled_s: float
    limit_s: float
    step: int | None
    """Newest step that any rank was seen to finish."""
    groups: tuple[StackGroup, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlow(Event):
    """The others wait for these ranks, or do so no more. Found out by the master itself."""

    generation: Generation
    node: NodeId
    ranks: tuple[int, ...]
    """One rank, or those of a node that are slow together."""
    awake: float
    """Share of the time that their main threads ran or wanted to."""
    running: float
    """Share of the time that they ran: what is missing to `awake`, they waited for a processor."""
    others_awake: float
    """Median over the others."""
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored(NodeEvent):
    """A rank loaded a checkpoint."""

    generation: Generation
    rank: int
    step: int
    tier: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStepDone(NodeEvent):
    """A node's workers all finished a first step in this generation: the attempt is under way."""

    generation: Generation
    step: int
    load_s: float = 0.0
    """How long they loaded a checkpoint."""
    warm_up_s: float = 0.0
    """From there to the first step; 0 where nothing was loaded."""

    def __post_init__(self) -> None:
        _check_seconds(load_s=self.load_s, warm_up_s=self.warm_up_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(NodeEvent):
    """A checkpoint step became visible in a tier that outlives the workers, on every rank."""

    generation: Generation
    step: int
    durable: bool
    """Whether its manifest is on storage; else it is held in the savers' memory."""
    stalled_s: float = 0.0
    """How long saving has held the training in this attempt."""

    def __post_init__(self) -> None:
        _check_seconds(stalled_s=self.stalled_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CaughtUp(Event):
    """The steps that an earlier attempt had finished are done again. Found out by the master itself."""

    generation: Generation
    step: int
    """Newest that any rank was seen to finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(NodeEvent):
    """A person or a scheduler asked this node's agent to end the job."""

    kind: StopKind
    signal: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(Event):
    """A timer that the core had asked for ran out."""

    timer: TimerKind
    generation: Generation
