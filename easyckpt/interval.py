"""How often a step is saved, where that is not simply every so many steps. Pure: time is passed in.

An interval in seconds, or one that is found out, is kept by the lead saver alone, which decides each step
once for all ranks (`easyckpt.saver.ledger`). So that ranks need not ask at every step, a refusal announces
a later step before which none will be granted to anybody; until then a rank skips by itself.

**auto.** The interval that loses least: saving costs time each time, and a failure loses what was done
since the last save. With C the time that training loses per save and M the mean time between failures, the
optimum is near √(2·C·M) (Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly,
2006). C is measured, M is estimated from the failures of this job and a prior. What saving may cost at
most caps it from below, and what a failure may lose at most from above.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["AUTO_LOSS_MAX_S", "OVERHEAD_MAX", "Pacer", "best_interval_s", "mtbf_s"]

NODE_MTBF_S = 264 * 86400.0
"""Prior: one failure in so much time of one node. From 419 interruptions of 2,048 nodes in 54 days ("The
Llama 3 Herd of Models", 2024, section 3.3.4)."""

OVERHEAD_MAX = 0.01
"""Share of training time that saving may cost at most."""

AUTO_LOSS_MAX_S = 600.0
"""The longest interval of ``auto``: a person who waits for a job tolerates no more loss, however rare it
is."""

AUTO_LOSS_MIN_S = 1.0
"""The shortest: below it nothing is gained that anybody notices."""

COST_WEIGHT = 0.3
"""Of the newest measurement in the running mean of the cost."""

AHEAD = 0.5
"""Part of the way to the next save that is announced: the rest is decided later, when the speed is known
better."""

AHEAD_STEPS_MAX = 1000


def mtbf_s(*, nodes: int, failures: int, observed_s: float) -> float:
    """Mean time between failures of a job, from what was seen and a prior of one failure.

    Args:
        nodes: in the job.
        failures: seen so far.
        observed_s: for how long.
    """
    node_s = NODE_MTBF_S + nodes * max(observed_s, 0.0)
    return node_s / (1 + failures) / max(nodes, 1)


def best_interval_s(*, cost_s: float, mtbf_s: float) -> float:
    """Young's and Daly's interval, within the caps of this module.

    Args:
        cost_s: time that training loses per save.
        mtbf_s: mean time between failures.
    """
    optimum = math.sqrt(2.0 * max(cost_s, 0.0) * mtbf_s)
    return max(min(optimum, AUTO_LOSS_MAX_S), cost_s / OVERHEAD_MAX, AUTO_LOSS_MIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Granted:
    step: int
    at: float


class Pacer:
    """Says which steps are due. One for all ranks, asked in any order.

    Args:
        every_s: seconds between saves; 0 means that every step is due, unless ``auto``.
        auto: find the interval out.
        nodes: in the job.
        failures: that led to this life of the job.
    """

    def __init__(
        self, *, every_s: float = 0.0, auto: bool = False, nodes: int = 1, failures: int = 0
    ) -> None:
        self._every_s = every_s
        self._auto = auto
        self._nodes = nodes
        self._failures = failures
        self._cost_s = 0.0
        self._began_at: float | None = None
        self._last: _Granted | None = None
        self._not_before = 0

    def note_cost(self, cost_s: float) -> None:
        """A rank measured what its last save cost training; the slowest counts."""
        if cost_s > 0:
            share = 1.0 if cost_s > self._cost_s else COST_WEIGHT
            self._cost_s += share * (cost_s - self._cost_s)

    def interval_s(self, now: float) -> float:
        """Seconds between saves now; 0 if every step is due."""
        if not self._auto:
            return self._every_s
        observed_s = 0.0 if self._began_at is None else now - self._began_at
        mean_s = mtbf_s(nodes=self._nodes, failures=self._failures, observed_s=observed_s)
        return best_interval_s(cost_s=self._cost_s, mtbf_s=mean_s)

    def not_before(self, step: int, now: float) -> int:
        """The step before which nothing is due; one that is not beyond ``step`` means that it is due."""
        if self._began_at is None:
            self._began_at = now
        last = self._last
        wanted_s = self.interval_s(now)
        if last is None or step <= last.step or not wanted_s:
            return step
        if step < self._not_before:
            return self._not_before
        elapsed_s = now - last.at
        if elapsed_s >= wanted_s:
            return step
        step_s = elapsed_s / (step - last.step)
        left = (wanted_s - elapsed_s) / step_s if step_s > 0 else AHEAD_STEPS_MAX / AHEAD
        self._not_before = step + max(1, min(int(left * AHEAD), AHEAD_STEPS_MAX))
        return self._not_before

    def granted(self, step: int, now: float) -> None:
        """A step is being saved."""
        self._last = _Granted(step=step, at=now)
        self._not_before = 0

    def restored(self) -> None:
        """Training goes on elsewhere: the next step that is asked for is due."""
        self._last = None
        self._not_before = 0
