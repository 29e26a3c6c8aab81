"""Virtual time: a heap of what is due, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

WALL_START_S = 1_700_000_000.0
"""What the virtual wall clock says at the start of every run."""


@dataclass(slots=True)
class Due:
    """Something that is to happen. May be cancelled."""

    action: Callable[[], None] | None

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Timeline:
    """A `aimaster.clock.Clock` that costs nothing. Things due at the same time happen in order of asking."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, int, Due]] = []
        self._asked = 0

    def monotonic(self) -> float:
        """Virtual seconds since the start."""
        return self.now_s

    def wall(self) -> float:
        """Virtual seconds since the epoch."""
        return WALL_START_S + self.now_s

    def at(self, at_s: float, action: Callable[[], None]) -> Due:
        """Ask for something at a time; what lies in the past happens next."""
        self._asked += 1
        due = Due(action)
        heapq.heappush(self._due, (max(at_s, self.now_s), self._asked, due))
        return due

    def after(self, delay_s: float, action: Callable[[], None]) -> Due:
        """Ask for something in so many seconds."""
        return self.at(self.now_s + delay_s, action)

    def run(self, until_s: float, *, stop: Callable[[], bool] = lambda: False) -> None:
        """Let time pass until then, until nothing is due, or until `stop` says so."""
        while self._due and self._due[0][0] <= until_s and not stop():
            at_s, _, due = heapq.heappop(self._due)
            if due.action is not None:
                self.now_s = at_s
                due.action()
        if not stop():
            self.now_s = max(self.now_s, until_s)
