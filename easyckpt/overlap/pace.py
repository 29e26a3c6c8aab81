"""Does copying behind the next step pay? Decided from what saves have cost. Pure.

What a save costs training is how much longer the time between two optimizer steps is with a save in it than
without. Overlapping nearly always wins: a blocking copy costs all of its time. On a machine whose memory is
the bottleneck it can cost more than it saves, since both sides then run slower. So the cost of overlapped
saves is watched; if it is well above what the copy itself takes, some saves are copied at once, and the
cheaper way stays.

Time is passed in as monotonic seconds.
"""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["Pace"]

WARM_UP_SAVES = 2
"""The first saves populate slots and say nothing about the later ones."""

TRIALS = 4
"""Saves of one kind that are held against those of the other."""

CLEAN_INTERVALS = 32
CLEAN_INTERVALS_MIN = 4

SUSPICION = 1.5
"""Overlapped saves that cost more than this times the copy's own processor time are held against blocking."""

NOISE_S = 0.005


class Pace:
    """See the module.

    Args:
        overlap: whether saves overlap; None has it chosen.
    """

    def __init__(self, overlap: bool | None = None) -> None:
        self._chosen = overlap
        self._saves = 0
        self._clean: deque[float] = deque(maxlen=CLEAN_INTERVALS)
        self._costs: dict[bool, deque[float]] = {True: deque(maxlen=TRIALS), False: deque(maxlen=TRIALS)}
        self._copies: deque[float] = deque(maxlen=TRIALS)
        self._stepped_at: float | None = None
        self._save: bool | None = None
        self.news = ""
        """A choice that was not told yet."""

    @property
    def overlaps(self) -> bool:
        """How the next save is to be copied."""
        if self._chosen is not None:
            return self._chosen
        return not self._is_trying_to_block

    @property
    def _is_trying_to_block(self) -> bool:
        overlapped = self._costs[True]
        if len(overlapped) < TRIALS or not self._copies:
            return False
        copy_s = statistics.median(self._copies)
        return statistics.median(overlapped) > SUSPICION * copy_s + NOISE_S

    def saved(self, *, overlapped: bool) -> None:
        """A save was begun now."""
        self._saves += 1
        self._save = overlapped

    def copied(self, copy_s: float) -> None:
        """A copy is done, and took so much processor time."""
        if self._saves > WARM_UP_SAVES:
            self._copies.append(copy_s)

    def stepped(self, now: float) -> None:
        """An optimizer is about to step, past the fence."""
        before, self._stepped_at = self._stepped_at, now
        save, self._save = self._save, None
        if before is None:
            return
        interval = now - before
        if save is None:
            self._clean.append(interval)
        elif self._saves > WARM_UP_SAVES and len(self._clean) >= CLEAN_INTERVALS_MIN:
            self._costs[save].append(interval - statistics.median(self._clean))
            self._choose()

    def _choose(self) -> None:
        overlapped, blocking = self._costs[True], self._costs[False]
        if self._chosen is not None or len(blocking) < TRIALS:
            return
        cost, other = statistics.median(overlapped), statistics.median(blocking)
        self._chosen = cost <= other
        way = "go on behind the next step" if self._chosen else "are made at once from now on"
        self.news = (
            f"copies {way}: a save costs {cost * 1e3:.1f} ms of training when its copy overlaps, and "
            f"{other * 1e3:.1f} ms when it does not"
        )
