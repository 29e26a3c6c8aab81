"""Which steps retention keeps: small objects that are told what is there and name what stays.

`KeepAny` joins them: a step stays if any policy keeps it. Whatever a policy says, the newest step that reads
back well is never removed (`easyckpt.retention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from easyckpt.manifest import Manifest
from easyckpt.paths import StepName

__all__ = ["KeepAll", "KeepAny", "KeepBest", "KeepEvery", "KeepLatest", "KeepPinned", "KeepPolicy"]


class KeepPolicy(Protocol):
    """Which of the steps that are there have to stay."""

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """Names of those to keep.

        Args:
            steps: all visible ones, newest first.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAll:
    """Keep everything."""

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps)


@dataclass(frozen=True, slots=True)
class KeepLatest:
    """Keep the newest ``count`` steps."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("at least the newest step is kept")

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps[: self.count])


@dataclass(frozen=True, slots=True)
class KeepEvery:
    """Keep steps that ``interval`` divides."""

    interval: int

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError("an interval is at least one step")

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps if step.step % self.interval == 0)


@dataclass(frozen=True, slots=True)
class KeepPinned:
    """Keep the steps with these numbers."""

    steps: frozenset[int]

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps if step.step in self.steps)


@dataclass(frozen=True, slots=True)
class KeepBest:
    """Keep the ``count`` steps with the best value of a metric; a step without it, or with NaN, is not among
    them.

    Of equal values the newer step is the better one.
    """

    metric: str
    count: int = 1
    largest: bool = False

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("keep at least one")

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        sign = -1.0 if self.largest else 1.0
        measured = []
        for step in steps:
            value = step.metrics.get(self.metric)
            if value is not None:
                measured.append((sign * value, -step.step, step.name))
        return frozenset(name for _, _, name in sorted(measured)[: self.count])


@dataclass(frozen=True, slots=True)
class KeepAny:
    """Keep what any of these keeps."""

    policies: tuple[KeepPolicy, ...]

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset().union(*(policy.keeps(steps) for policy in self.policies))
