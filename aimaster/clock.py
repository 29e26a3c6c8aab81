"""The one place of this package that reads time.

Two kinds of time, never mixed: monotonic seconds for durations and deadlines, wall seconds since the epoch
for people. Whoever needs time takes a `Clock`; the simulator passes one of its own, so that an hour costs
nothing. The core takes neither: it is given ``now``.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a shell gets its time from. Any thread may call it."""

    def monotonic(self) -> float:
        """Seconds that never go back; their zero means nothing."""

    def wall(self) -> float:
        """Seconds since the epoch, for people and for what outlives a boot."""


class SystemClock:
    """The machine's own time."""

    def monotonic(self) -> float:
        """Seconds since some fixed moment of this boot."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds since the epoch."""
        return time.time()
