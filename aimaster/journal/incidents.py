"""Incidents: what went wrong and how it was overcome, derived from a journal and from nothing else.

An incident opens with the event that ended a generation and closes with the first step of a later attempt.
Until workers start again, whatever else fails belongs to it. If a lost node turns out to be among that, the
loss was the cause: its partners' workers fail within milliseconds, while a silence takes seconds to be sure
of.

A pure function over entries, so that status, `aimaster explain` and a checker that trusts nobody agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum

from aimaster.core.commands import ENDED_GENERATION, Facts, Reason, StartWorkers
from aimaster.core.events import (
    FirstStepDone,
    NodeChecked,
    NodeDied,
    NodeEvent,
    NodeFailed,
    NodeJoined,
    NodeLeft,
    Restored,
    Suspicion,
    TimerFired,
    WorkerExited,
    WorkersHung,
)
from aimaster.ids import Generation, NodeId
from aimaster.journal.base import Entry

ALSO_FAILED_MAX = 64
"""How many further failures an incident names."""

SAME_FAULT = "same_fault"
"""On how many nodes a fault was seen, where that is too many for a chance."""


class IncidentKind(Enum):
    """What went wrong."""

    WORKER_KILLED = "worker_killed"  # by a signal
    WORKER_FAILED = "worker_failed"  # by its own exit code
    WORKER_HUNG = "worker_hung"  # no rank steps any more; its rank is the first culprit, if there is one
    NODE_LOST = "node_lost"
    NODE_LEFT = "node_left"
    NODE_RESTARTED = "node_restarted"
    NODE_FAILED = "node_failed"  # could not, or not in time, do what it was told


_NODE_GONE = frozenset({IncidentKind.NODE_LOST, IncidentKind.NODE_LEFT, IncidentKind.NODE_RESTARTED})
_TIER_ORDER = ("memory", "peer", "disk")


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoFailed:
    """A failure that belongs to an incident without being its cause."""

    kind: IncidentKind
    node: NodeId
    rank: int | None
    at_s: float
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """One thing that went wrong."""

    id: int
    """From 1, in the order in which they began."""
    kind: IncidentKind
    node: NodeId
    rank: int | None
    """None: the whole node."""
    generation: Generation
    """The generation that it ended."""
    detected_at_s: float
    """When the first sign of it was seen, on the job's clock."""
    detected_wall_s: float
    identified_s: float
    """From the first sign until the cause was known; 0 where the first sign was the cause."""
    last_step: int | None = None
    """Newest step that the failing rank was seen to finish."""
    exit_code: int | None = None
    signal: int | None = None
    error: str = ""
    reason: Reason
    """Of the decision; one that ends the job says why it was not tried again."""
    ended_job: bool = False
    attempt: int | None = None
    """The attempt that followed."""
    restarted_s: float | None = None
    """From detection until workers were told to start again."""
    resumed_step: int | None = None
    restored_from: str = ""
    """``memory``, ``peer`` or ``disk``: the furthest that any rank had to reach; else empty."""
    first_step: int | None = None
    recovered_s: float | None = None
    """From detection to the first step of a later attempt; None while it lasts."""
    also_failed: tuple[AlsoFailed, ...] = ()
    checked: tuple[NodeChecked, ...] = ()
    """What the looks at suspected nodes found, the newest of each node."""
    hang: WorkersHung | None = None
    """What the witnesses said, where that is what happened."""
    facts: Facts = field(default_factory=dict)
    """Of the decision."""


@dataclass(slots=True)
class _Story:
    """The incidents so far, and the one whose recovery is under way."""

    incidents: list[Incident] = field(default_factory=list)
    starting: bool = False
    """Workers were told to start since the newest incident began."""
    members: frozenset[NodeId] = frozenset()
    """Nodes that last ran workers."""
    ended: frozenset[NodeId] = frozenset()
    """Members of the generation that the newest incident ended."""

    @property
    def newest(self) -> Incident | None:
        """The newest incident, if it is not over."""
        if not self.incidents or self.incidents[-1].recovered_s is not None:
            return None
        return self.incidents[-1]

    def update(self, **changes: object) -> None:
        """Change the newest incident."""
        self.incidents[-1] = replace(self.incidents[-1], **changes)  # type: ignore[arg-type]


def incidents(entries: Iterable[Entry]) -> tuple[Incident, ...]:
    """All incidents of a journal, oldest first.

    Args:
        entries: a whole journal, in order.
    """
    story = _Story()
    for entry in entries:
        _take(story, entry)
    return tuple(story.incidents)


def _take(story: _Story, entry: Entry) -> None:
    record = entry.record
    event, facts = record.event, record.decision.facts
    if ENDED_GENERATION in facts:
        _failure(story, entry)
    elif isinstance(event, WorkerExited) and not event.ok and record.decision.reason is Reason.STALE:
        _also(story, entry)
    elif isinstance(event, NodeDied) and record.decision.reason is Reason.NODE_LOST:
        _death_explains(story, entry)
    elif isinstance(event, NodeChecked):
        _checked(story, event)
    if SAME_FAULT in facts and story.newest is not None:
        story.update(facts={**story.newest.facts, SAME_FAULT: facts[SAME_FAULT]})
    starts = [c for c in record.decision.commands if isinstance(c, StartWorkers)]
    if starts and record.decision.reason is Reason.GENERATION_PREPARED:
        story.members = frozenset(c.node for c in starts)
        story.starting = True
        newest = story.newest
        if newest is not None:
            restarted_s = record.at_s - newest.detected_at_s
            story.update(
                attempt=starts[0].attempt, restarted_s=restarted_s, resumed_step=None, restored_from=""
            )
    newest = story.newest
    if newest is None or not story.starting or record.decision.reason is Reason.STALE:
        return
    if isinstance(event, Restored):
        tiers = [t for t in (newest.restored_from, event.tier.value) if t]
        story.update(resumed_step=event.step, restored_from=max(tiers, key=_TIER_ORDER.index))
    elif isinstance(event, FirstStepDone):
        _recovered(story, event, record.at_s)


def _checked(story: _Story, event: NodeChecked) -> None:
    """A look that was taken since the newest incident, because of a failure or a hang, belongs to it."""
    if not story.incidents or event.why not in (Suspicion.FAILURE, Suspicion.HANG):
        return
    others = tuple(one for one in story.incidents[-1].checked if one.node != event.node)
    if len(others) < ALSO_FAILED_MAX:
        story.update(checked=(*others, event))


def _recovered(story: _Story, event: FirstStepDone, at_s: float) -> None:
    """A first step closes every incident that is still open: one that failed on the way was one more."""
    for index, incident in enumerate(story.incidents):
        if incident.recovered_s is None:
            recovered_s = at_s - incident.detected_at_s
            story.incidents[index] = replace(incident, first_step=event.step, recovered_s=recovered_s)


def _failure(story: _Story, entry: Entry) -> None:
    record = entry.record
    kind, node, _ = _what(entry)
    newest = story.newest
    ends = "exit_code" in record.decision.facts
    if newest is None or story.starting:
        story.starting = False
        story.ended = story.members
        story.incidents.append(_new(len(story.incidents) + 1, entry))
        return
    if kind in _NODE_GONE and newest.kind not in _NODE_GONE and node in story.ended:
        _was_the_cause(story, kind, entry)
    else:
        _also(story, entry)
    if ends:
        story.update(reason=record.decision.reason, ended_job=True)


def _death_explains(story: _Story, entry: Entry) -> None:
    """A node without a seat died. If it was in the generation that ended last, that is why it ended.

    Its partners' workers fail at once and may be at work again, with a spare, before the silence is sure.
    """
    node = _what(entry)[1]
    newest = story.incidents[-1] if story.incidents else None
    if newest is not None and newest.kind not in _NODE_GONE and node in story.ended - story.members:
        _was_the_cause(story, IncidentKind.NODE_LOST, entry)


def _was_the_cause(story: _Story, kind: IncidentKind, entry: Entry) -> None:
    """The newest incident was the echo of this one."""
    newest, record = story.incidents[-1], entry.record
    _add(
        story,
        AlsoFailed(
            kind=newest.kind,
            node=newest.node,
            rank=newest.rank,
            at_s=newest.detected_at_s,
            exit_code=newest.exit_code,
            signal=newest.signal,
            error=newest.error,
        ),
    )
    story.update(
        kind=kind,
        node=_what(entry)[1],
        rank=None,
        identified_s=record.at_s - newest.detected_at_s,
        reason=record.decision.reason,
        exit_code=None,
        signal=None,
        error="",
    )


def _new(number: int, entry: Entry) -> Incident:
    record = entry.record
    event, facts = record.event, record.decision.facts
    kind, node, rank = _what(entry)
    worker = event if isinstance(event, WorkerExited) else None
    return Incident(
        id=number,
        kind=kind,
        node=node,
        rank=rank,
        generation=Generation(int(facts[ENDED_GENERATION])),
        detected_at_s=record.at_s,
        detected_wall_s=record.wall_s,
        identified_s=0.0,
        last_step=_last_step(entry),
        exit_code=worker.exit_code if worker else None,
        signal=worker.signal if worker else None,
        error=worker.error if worker else event.what if isinstance(event, NodeFailed) else "",
        reason=record.decision.reason,
        ended_job="exit_code" in facts,
        hang=event if isinstance(event, WorkersHung) else None,
        facts=dict(facts),
    )


def _last_step(entry: Entry) -> int | None:
    step = entry.record.decision.facts.get("last_step")
    return int(step) if step is not None else None


def _what(entry: Entry) -> tuple[IncidentKind, NodeId, int | None]:
    event = entry.record.event
    if isinstance(event, WorkerExited):
        kind = IncidentKind.WORKER_FAILED if event.signal is None else IncidentKind.WORKER_KILLED
        return kind, event.node, event.rank
    if isinstance(event, WorkersHung):
        return IncidentKind.WORKER_HUNG, event.node, event.culprits[0] if event.culprits else None
    if isinstance(event, NodeDied):
        return IncidentKind.NODE_LOST, event.node, None
    if isinstance(event, NodeLeft):
        return IncidentKind.NODE_LEFT, event.node, None
    if isinstance(event, NodeJoined):
        return IncidentKind.NODE_RESTARTED, event.node, None
    if isinstance(event, NodeEvent):
        return IncidentKind.NODE_FAILED, event.node, None
    assert isinstance(event, TimerFired)
    return IncidentKind.NODE_FAILED, NodeId(str(entry.record.decision.facts.get("node", ""))), None


def _also(story: _Story, entry: Entry) -> None:
    """A failure that belongs to the newest incident without being its cause."""
    kind, node, rank = _what(entry)
    event = entry.record.event
    worker = event if isinstance(event, WorkerExited) else None
    _add(
        story,
        AlsoFailed(
            kind=kind,
            node=node,
            rank=rank,
            at_s=entry.record.at_s,
            exit_code=worker.exit_code if worker else None,
            signal=worker.signal if worker else None,
            error=worker.error if worker else "",
        ),
    )


def _add(story: _Story, more: AlsoFailed) -> None:
    newest = story.newest
    if newest is not None and len(newest.also_failed) < ALSO_FAILED_MAX:
        story.update(also_failed=(*newest.also_failed, more))
