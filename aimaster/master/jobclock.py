"""The clock that the core is stepped with: seconds of the job's life, going on over restarts of the master.

Budgets have windows and timers have deadlines, so a restarted master must neither start at zero nor stand
still while it was away. The time away is taken from the wall clock, and a wall clock that was set back counts
as no time at all, because the job's clock never goes back.
"""

from __future__ import annotations

from aimaster.clock import Clock


class JobClock:
    """Seconds since the job began.

    Args:
        clock: The machine's.
        resumed_at_s: What this clock said last, by the journal; 0 for a new job.
        resumed_wall_s: Wall time of that moment; None for a new job.
    """

    def __init__(
        self, clock: Clock, *, resumed_at_s: float = 0.0, resumed_wall_s: float | None = None
    ) -> None:
        away_s = 0.0 if resumed_wall_s is None else max(0.0, clock.wall() - resumed_wall_s)
        self._clock = clock
        self._offset_s = resumed_at_s + away_s - clock.monotonic()
        self.away_s = away_s
        """How long nobody led the job."""

    def now(self) -> float:
        """Seconds of the job."""
        return self._clock.monotonic() + self._offset_s

    def wall(self) -> float:
        """Seconds since the epoch, for people."""
        return self._clock.wall()
