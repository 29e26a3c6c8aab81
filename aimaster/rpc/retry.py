"""When to try again: exponential back-off with full jitter.

Full jitter (a uniform draw up to the present bound) spreads a fleet of agents whose master went away over the
whole bound, so that a restarted master is not met by all of them at once. Source: M. Brooker, "Exponential
Backoff and Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import random


class Backoff:
    """Delays before the next tries of one thing. Not thread-safe."""

    def __init__(self, rng: random.Random, *, first_s: float, longest_s: float) -> None:
        if not 0 < first_s <= longest_s:
            raise ValueError(f"need 0 < first_s <= longest_s, got {first_s}, {longest_s}")
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._bound_s = first_s

    def next_s(self) -> float:
        """Seconds to wait now; the bound doubles."""
        delay_s = self._rng.uniform(0, self._bound_s)
        self._bound_s = min(self._bound_s * 2, self._longest_s)
        return delay_s

    def reset(self) -> None:
        """It worked: start small again."""
        self._bound_s = self._first_s
