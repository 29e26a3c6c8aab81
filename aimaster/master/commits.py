"""Committed steps wait a little before they are journalled, and only the newest of each kind is.

A training may commit every second for weeks, and a job that is well should write next to nothing. What a
committed step means for a decision counts when something else happens: so whatever waits is journalled right
before the next other event, and after a while in any case. Until then it is not acknowledged, so nothing is
lost with the master: the agent says it again.
"""

from __future__ import annotations

from aimaster.core.events import StepCommitted
from aimaster.ids import NodeId

COMMIT_HOLD_S = 10.0
"""Longest wait of a committed step."""


class HeldCommits:
    """At most two per node. Not thread-safe."""

    def __init__(self) -> None:
        self._held: dict[tuple[NodeId, bool], StepCommitted] = {}
        self._since_s: float | None = None

    def hold(self, fact: StepCommitted, now: float) -> None:
        """Keep it in place of an older one."""
        key = (fact.node, fact.durable)
        self._held.pop(key, None)  # so that order of arrival is kept
        self._held[key] = fact
        if self._since_s is None:
            self._since_s = now

    def due(self, now: float) -> bool:
        """Whether the oldest has waited long enough."""
        return self._since_s is not None and now - self._since_s >= COMMIT_HOLD_S

    def newest(self, known: int | None, *, durable: bool) -> int | None:
        """The newest committed step: what is held, or what the machine knows already."""
        steps = [fact.step for fact in self._held.values() if fact.durable == durable]
        return max(steps if known is None else [*steps, known], default=None)

    def take(self) -> tuple[StepCommitted, ...]:
        """All of them, oldest first; none waits afterwards."""
        taken = tuple(self._held.values())
        self._held.clear()
        self._since_s = None
        return taken
