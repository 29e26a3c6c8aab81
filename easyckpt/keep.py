"""Which steps retention keeps: small objects that are told what is there and name what stays.

``|`` joins them: a step stays if any of them keeps it. Whatever a policy says, the newest step that reads
back well is never removed (`easyckpt.retention`), and neither is a step that a person has pinned
(`easyckpt pin`).

Retention runs in the saver process, so a policy travels there as text (`policy_to_text`): the ones of this
module, and nothing that would have to be unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from easyckpt.errors import Misuse
from easyckpt.manifest import Manifest
from easyckpt.paths import StepName

__all__ = [
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepPinned",
    "KeepPolicy",
    "policy_from_text",
    "policy_to_text",
]


POLICIES_MAX = 32
"""In one `KeepAny`."""


class KeepPolicy(Protocol):
    """Which of the steps that are there have to stay."""

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """Names of those to keep.

        Args:
            steps: all visible ones, newest first.
        """
        ...


class _Joined:
    """``a | b``: what either keeps."""

    __slots__ = ()

    def __or__(self, other: KeepPolicy) -> KeepAny:
        return KeepAny((*_parts(self), *_parts(other)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAll(_Joined):
    """Keep everything."""

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps)


@dataclass(frozen=True, slots=True)
class KeepLatest(_Joined):
    """Keep the newest ``count`` steps."""

    count: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("at least the newest step is kept")

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps[: self.count])


@dataclass(frozen=True, slots=True)
class KeepEvery(_Joined):
    """Keep steps that ``interval`` divides."""

    interval: int

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError("an interval is at least one step")

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps if step.step % self.interval == 0)


@dataclass(frozen=True, slots=True)
class KeepPinned(_Joined):
    """Keep the steps with these numbers."""

    steps: frozenset[int]

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset(step.name for step in steps if step.step in self.steps)


@dataclass(frozen=True, slots=True)
class KeepBest(_Joined):
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
class KeepAny(_Joined):
    """Keep what any of these keeps."""

    policies: tuple[KeepPolicy, ...]

    def keeps(self, steps: Sequence[Manifest]) -> frozenset[StepName]:
        """See `KeepPolicy`."""
        return frozenset().union(*(policy.keeps(steps) for policy in self.policies))


def _parts(policy: KeepPolicy) -> tuple[KeepPolicy, ...]:
    return policy.policies if isinstance(policy, KeepAny) else (policy,)


def policy_to_text(policy: KeepPolicy) -> str:
    """The policy as a line of JSON, for another process.

    Raises:
        Misuse: it is none of this module's.
    """
    return json.dumps([_to_plain(part) for part in _parts(policy)], allow_nan=False)


def _to_plain(policy: KeepPolicy) -> list[object]:
    if isinstance(policy, KeepLatest):
        return ["latest", policy.count]
    if isinstance(policy, KeepEvery):
        return ["every", policy.interval]
    if isinstance(policy, KeepPinned):
        return ["pinned", sorted(policy.steps)]
    if isinstance(policy, KeepBest):
        return ["best", policy.metric, policy.count, policy.largest]
    if isinstance(policy, KeepAll):
        return ["all"]
    raise Misuse(
        f"keep={policy!r} is not possible: retention runs in another process",
        hint="join policies of easyckpt.keep, for example KeepLatest(2) | KeepEvery(1000)",
    )


def policy_from_text(text: str) -> KeepPolicy:
    """What `policy_to_text` was given.

    Raises:
        Misuse: it is no such text.
    """
    try:
        parts = tuple(_from_plain(*item) for item in json.loads(text))
        if not 0 < len(parts) <= POLICIES_MAX:
            raise ValueError(f"{len(parts)} policies")
    except (ValueError, TypeError) as error:
        raise Misuse(f"this names no policy of what to keep: {error}", where=ascii(text[:200])) from error
    return parts[0] if len(parts) == 1 else KeepAny(parts)


def _from_plain(kind: str, *values: object) -> KeepPolicy:
    makers: dict[str, Callable[..., KeepPolicy]] = {
        "all": KeepAll,
        "latest": KeepLatest,
        "every": KeepEvery,
        "pinned": lambda steps: KeepPinned(frozenset(map(int, steps))),
        "best": lambda metric, count, largest: KeepBest(str(metric), int(count), largest=bool(largest)),
    }
    if kind not in makers:
        raise ValueError(f"no policy {kind!r}")
    return makers[kind](*values)
