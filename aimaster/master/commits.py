"""Committed steps wait a little before they are journalled, and only the newest of each kind is.

A training may commit every second for weeks, and a job that is well should write next to nothing. What a
committed step means for a decision counts when something else happens: so whatever waits is journalled right
before the next other event, and after a while in any case. Until then it is not acknowledged, so nothing is
lost with the master: the agent says it again.

The while grows with the job's age, so that the journal of a calm job grows like the logarithm of its age: a
month takes some ten thousand entries, which a master that starts again replays within seconds.
"""

from __future__ import annotations

from aimaster.core.events import StepCommitted
from aimaster.ids import NodeId

COMMIT_HOLD_S = 10.0
"""Wait of a committed step in a young job."""
COMMIT_HOLD_SHARE = 1e-3
"""Wait as a share of the job's age, where that is longer."""
COMMIT_HOLD_MAX_S = 600.0
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
        """Whether the oldest has waited long enough.

        Args:
            now: the job's age in seconds.
        """
        hold_s = min(max(COMMIT_HOLD_S, now * COMMIT_HOLD_SHARE), COMMIT_HOLD_MAX_S)
        return self._since_s is not None and now - self._since_s >= hold_s

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


AGES_KEPT_MAX = 16
"""Steps of each kind whose age is known: training may fall back to an older one."""


class CommitAges:
    """When steps became safe. Not thread-safe."""

    def __init__(self) -> None:
        self._at: dict[bool, dict[int, float]] = {False: {}, True: {}}

    def note(self, fact: StepCommitted, at_s: float) -> None:
        """It is heard of now; what was heard before keeps its time."""
        known = self._at[fact.durable]
        known.setdefault(fact.step, at_s)
        while len(known) > AGES_KEPT_MAX:
            del known[next(iter(known))]

    def age_s(self, step: int | None, *, durable: bool, now: float) -> float | None:
        """How long ago that step became safe; None where it is not known."""
        at_s = None if step is None else self._at[durable].get(step)
        return None if at_s is None else max(0.0, now - at_s)
