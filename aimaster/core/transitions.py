"""The legal moves, as data: one table for the job, one for a node, one for the suspicion about it.

A move that has no row is an error that names the state, the trigger and whom it is about, and changes
nothing. Both ways a table is read are the same table: `aimaster.core.machine` walks it, and
``docs/explain/state-machines.md`` is written from it (`aimaster.simulation.diagrams`).

Triggers are not events: an event says what was seen, a trigger what it means here. The event `WorkerExited`
is `NodeTrigger.FINISHED` for the node when it was the last of its workers to end well, and no trigger at all
when it comes from an older generation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TypeVar

from aimaster.core.state import JobPhase, NodeState


class JobTrigger(Enum):
    """What can happen to a job."""

    DECLARED = "declared"  # the first agent said what it is
    FORMED = "formed"  # members were chosen for a new generation
    PREPARED = "prepared"  # all members are prepared
    STARTED = "started"  # workers run on all members
    SHORT = "short"  # fewer usable nodes than the minimum
    END = "end"  # everyone is told to end
    EMPTY = "empty"  # nobody is left to wait for


class NodeTrigger(Enum):
    """What can happen to a node."""

    JOINED = "joined"  # a new life of the agent, or one that was given up and is back
    PREPARE = "prepare"  # it is told to prepare
    PREPARED = "prepared"  # it said so
    START = "start"  # it is told to start its workers
    STARTED = "started"  # it said so
    FINISHED = "finished"  # the last of its workers ended well
    RELEASE = "release"  # a new generation does without it, or what spoke against it is no node's fault
    SET_ASIDE = "set_aside"  # it did not do what it was told
    END = "end"  # it is told to end
    DIED = "died"  # given up by the detector
    LEFT = "left"  # it said goodbye


class Suspicion(Enum):
    """What the failure detector thinks of a node that is not given up."""

    TRUSTED = "trusted"
    SUSPECT = "suspect"


class SuspicionTrigger(Enum):
    """What can happen to the trust in a node."""

    SILENT = "silent"
    HEARD = "heard"


S = TypeVar("S", bound=Enum)
T = TypeVar("T", bound=Enum)


def _rows(trigger: T, targets: Mapping[S, S]) -> Iterator[tuple[tuple[S, T], S]]:
    return (((state, trigger), target) for state, target in targets.items())


def _all_to(states: tuple[S, ...], target: S) -> dict[S, S]:
    return dict.fromkeys(states, target)


_J = JobPhase
_N = NodeState

_JOB_LIVE = (_J.WAITING, _J.PREPARING, _J.STARTING, _J.RUNNING)

JOB_MOVES: Mapping[tuple[JobPhase, JobTrigger], JobPhase] = dict(
    [
        *_rows(JobTrigger.DECLARED, {_J.UNDECLARED: _J.WAITING}),
        *_rows(JobTrigger.FORMED, _all_to(_JOB_LIVE, _J.PREPARING)),
        *_rows(JobTrigger.PREPARED, {_J.PREPARING: _J.STARTING}),
        *_rows(JobTrigger.STARTED, {_J.STARTING: _J.RUNNING}),
        *_rows(JobTrigger.SHORT, _all_to((_J.PREPARING, _J.STARTING, _J.RUNNING), _J.WAITING)),
        *_rows(JobTrigger.END, _all_to(_JOB_LIVE, _J.ENDING)),
        *_rows(JobTrigger.EMPTY, {_J.ENDING: _J.ENDED}),
    ]
)

_MEMBER = (_N.PREPARING, _N.PREPARED, _N.STARTING, _N.RUNNING, _N.FINISHED)
_HERE = (_N.SPARE, *_MEMBER, _N.ASIDE)

NODE_MOVES: Mapping[tuple[NodeState, NodeTrigger], NodeState] = dict(
    [
        *_rows(NodeTrigger.JOINED, _all_to((*_HERE, _N.ENDING, _N.LOST, _N.LEFT), _N.SPARE)),
        *_rows(NodeTrigger.PREPARE, _all_to((_N.SPARE, *_MEMBER), _N.PREPARING)),
        *_rows(NodeTrigger.PREPARED, {_N.PREPARING: _N.PREPARED, _N.ASIDE: _N.SPARE, _N.SPARE: _N.SPARE}),
        *_rows(NodeTrigger.START, {_N.PREPARED: _N.STARTING}),
        *_rows(NodeTrigger.STARTED, {_N.STARTING: _N.RUNNING, _N.FINISHED: _N.FINISHED}),
        *_rows(NodeTrigger.FINISHED, {_N.STARTING: _N.FINISHED, _N.RUNNING: _N.FINISHED}),
        *_rows(NodeTrigger.RELEASE, _all_to((*_MEMBER, _N.ASIDE), _N.SPARE)),
        *_rows(NodeTrigger.SET_ASIDE, _all_to(_HERE, _N.ASIDE)),
        *_rows(NodeTrigger.END, _all_to((*_HERE, _N.ENDING), _N.ENDING)),
        *_rows(NodeTrigger.DIED, _all_to((*_HERE, _N.ENDING), _N.LOST)),
        *_rows(NodeTrigger.LEFT, _all_to((*_HERE, _N.ENDING), _N.LEFT)),
    ]
)

SUSPICION_MOVES: Mapping[tuple[Suspicion, SuspicionTrigger], Suspicion] = dict(
    [
        *_rows(SuspicionTrigger.SILENT, _all_to(tuple(Suspicion), Suspicion.SUSPECT)),
        *_rows(SuspicionTrigger.HEARD, _all_to(tuple(Suspicion), Suspicion.TRUSTED)),
    ]
)


class IllegalEvent(Exception):
    """Something was said that cannot be true here. The state is as it was before.

    It is the mistake of whoever said it, or of this program; the shell records it and goes on.
    """

    def __init__(self, state: Enum, trigger: str, subject: str, detail: str = "") -> None:
        self.state = state
        self.trigger = trigger
        self.subject = subject
        self.detail = detail
        super().__init__(
            f"{subject} is {state.value}, where {trigger!r} is not possible"
            + (f": {detail}" if detail else "")
        )


def move_job(phase: JobPhase, trigger: JobTrigger) -> JobPhase:
    """The phase that follows.

    Raises:
        IllegalEvent: if the table has no such row.
    """
    target = JOB_MOVES.get((phase, trigger))
    if target is None:
        raise IllegalEvent(phase, trigger.value, "the job")
    return target


def move_node(state: NodeState, trigger: NodeTrigger, *, node: str) -> NodeState:
    """The node state that follows.

    Raises:
        IllegalEvent: if the table has no such row.
    """
    target = NODE_MOVES.get((state, trigger))
    if target is None:
        raise IllegalEvent(state, trigger.value, f"node {node}")
    return target


def move_suspicion(suspect: bool, trigger: SuspicionTrigger) -> bool:
    """Whether the node is suspect afterwards."""
    before = Suspicion.SUSPECT if suspect else Suspicion.TRUSTED
    return SUSPICION_MOVES[before, trigger] is Suspicion.SUSPECT
