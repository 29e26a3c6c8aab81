"""One link per node, as a stream over TCP behaves: in order within a session, any order between nodes.

A link can be *cut* (both ends notice, what was under way is lost) or *stuck* (nobody notices; what was under
way arrives when it is free again, or never if it is cut first). A session is what lies between two cuts; a
message of an earlier session never arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from aimaster.simulation.clock import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """How slow messages are."""

    delay_min_s: float = 0.0005
    delay_max_s: float = 0.02

    def __post_init__(self) -> None:
        if not 0 <= self.delay_min_s <= self.delay_max_s:
            raise ValueError(f"need 0 <= delay_min_s <= delay_max_s, got {self}")


class Link:
    """Between one node and the master."""

    def __init__(self, timeline: Timeline, random: Random, options: NetworkOptions) -> None:
        self._timeline = timeline
        self._random = random
        self._options = options
        self._session = 0
        self._newest_s = {"up": 0.0, "down": 0.0}
        self._stuck: list[tuple[int, Callable[[], None]]] | None = None
        self.broken = False
        """Whether no session can be opened."""

    def send(self, direction: str, deliver: Callable[[], None]) -> None:
        """Send one message; it arrives later, in order, or never."""
        session = self._session
        delay_s = self._random.uniform(self._options.delay_min_s, self._options.delay_max_s)
        at_s = max(self._timeline.now_s + delay_s, self._newest_s[direction])
        self._newest_s[direction] = at_s
        self._timeline.at(at_s, partial(self._arrive, session, deliver))

    def _arrive(self, session: int, deliver: Callable[[], None]) -> None:
        if session != self._session:
            return
        if self._stuck is None:
            deliver()
        else:
            self._stuck.append((session, deliver))

    def cut(self) -> None:
        """End the session: what is under way is lost."""
        self._session += 1

    def stick(self) -> None:
        """Let nothing arrive, without a sign."""
        if self._stuck is None:
            self._stuck = []

    def free(self) -> None:
        """Let everything arrive that was held back and whose session still lives."""
        held, self._stuck = self._stuck or [], None
        for session, deliver in held:
            self._timeline.after(0.0, lambda s=session, d=deliver: self._arrive(s, d))  # type: ignore[misc]
