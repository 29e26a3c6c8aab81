"""What the core wants done: imperatives for the shell, and the reason for them.

Commands to a node are idempotent by generation: an agent that sees one twice does it once, and obeys the
highest generation it has seen. So the master may send them again after a cut or a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from aimaster.core.events import Suspicion, TimerKind
from aimaster.ids import Generation, NodeId

ENDED_GENERATION = "ended_generation"
"""The fact that a decision carries exactly if it ended a generation (`aimaster.core.generation.broken`)."""


class Reason(Enum):
    """Why a decision was taken. Sentences are rendered from it and from the decision's facts."""

    NOTHING_TO_DO = "nothing_to_do"
    STALE = "stale"  # of an older generation or incarnation: nothing changes
    JOB_DECLARED = "job_declared"
    JOB_REQUEUED = "job_requeued"  # the same job as that of an earlier journal
    WAITING_FOR_NODES = "waiting_for_nodes"
    NODE_IS_SPARE = "node_is_spare"
    ENOUGH_NODES = "enough_nodes"
    NODE_REFUSED = "node_refused"
    NODE_PREPARED = "node_prepared"
    NODE_STARTED = "node_started"
    GENERATION_PREPARED = "generation_prepared"
    WORKERS_RUNNING = "workers_running"
    PROGRESS = "progress"
    WORKER_FAILED = "worker_failed"
    WORKERS_HUNG = "workers_hung"
    EXIT_HUNG = "exit_hung"
    RANK_SLOW = "rank_slow"
    RANK_SLOW_NO_MORE = "rank_slow_no_more"
    NODE_SUSPECT = "node_suspect"
    NODE_HEARD_AGAIN = "node_heard_again"
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    NODE_RESTARTED = "node_restarted"
    NODE_FAILED = "node_failed"
    NODE_CHECKED = "node_checked"
    PREPARE_TIMED_OUT = "prepare_timed_out"
    START_TIMED_OUT = "start_timed_out"
    BUDGET_SPENT = "budget_spent"
    NO_PROGRESS = "no_progress"
    SAME_ERROR_TWICE = "same_error_twice"
    NO_HEALTHY_NODES = "no_healthy_nodes"
    STOP_REQUESTED = "stop_requested"
    WORKER_FINISHED = "worker_finished"
    JOB_FINISHED = "job_finished"
    RESENT = "resent"  # an agent came back; what it has missed is sent again


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Base of all commands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepare(Command):
    """Stop what runs, prove it gone, get ready for this generation, answer `NodePrepared`."""

    node: NodeId
    generation: Generation
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers(Command):
    """Start the node's workers of this generation, answer `WorkersStarted`.

    Its size does not grow with the number of nodes: each saver registers with the lead saver, which knows
    all.
    """

    node: NodeId
    generation: Generation
    attempt: int
    """How often workers were started for this job so far, from 0 (torch's restart count)."""
    node_rank: int
    nodes: int
    first_rank: int
    """Rank of the node's local rank 0."""
    world_size: int
    master_addr: str
    master_port: int
    saver_lead: str
    """``host:port`` of the saver on node rank 0, which leads checkpoints of this generation; may be empty."""
    progress_expected: bool
    """Whether an earlier attempt reached a committed step: then a start from nothing is an error."""
    restore_below: int | None = None
    """Checkpoints from this step on are set aside: resume from the newest older one, else the oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckNode(Command):
    """Look at what the suspicion is about without disturbing what runs, answer `NodeChecked`.

    A node that is to prepare afterwards does not say so before it has looked.
    """

    node: NodeId
    generation: Generation
    why: Suspicion


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNode(Command):
    """Stop what runs and leave with this exit code. For spares at the end, and for everyone."""

    node: NodeId
    exit_code: int
    reason: Reason
    sentence: str = ""
    """What the agent prints last, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer(Command):
    """Tell the core `TimerFired` after so many seconds; replaces a running timer of that kind."""

    timer: TimerKind
    generation: Generation
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelTimer(Command):
    """Forget the timer of that kind, if any."""

    timer: TimerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishJob(Command):
    """The job is over: close the journal and end the master once every agent has gone or is lost."""

    exit_code: int
    reason: Reason


Facts = Mapping[str, int | float | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one event led to."""

    commands: tuple[Command, ...]
    reason: Reason
    facts: Facts = field(default_factory=dict)
