"""What a check is: an entry of the catalogue, which ties a way to look to a way to judge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Level, Verdict

__all__ = ["Check", "Lane"]


class Lane(str, Enum):
    """What a probe loads: probes of one lane wait for each other, so that a measurement has the node to
    itself."""

    LIGHT = "light"
    CPU = "cpu"
    DEVICE = "device"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check.

    Attributes:
        id: ``family.name``.
        about: What it looks at and why it matters, for ``explain`` and the reference.
        rule: When it passes, warns and fails, with the numbers.
        source: Where rule and numbers come from.
        collect: Runs in the probe, found there by module and name.
        facts: The class ``collect`` returns.
        judge: Pure; at least one finding.
        reasons: What ``judge`` may say, for ``explain``.
        deadline_s: Of the probe, at the level *quick*.
        long_deadline_s: Of the probe at *standard* and *deep*, where it may measure more; 0: the same.
        threads: How many threads BLAS may use in the probe; 0: as many as there are processors.
        if_hung: Verdict when the probe had its whole deadline and gave nothing. *fail* where a hang is what
            the check looks for, *unknown* where a slow machine is the likelier cause.
        if_crashed: Likewise for a probe that died of SIGSEGV, SIGILL, SIGBUS, SIGFPE or SIGABRT.
    """

    id: str
    level: Level
    scope: str
    title: str
    about: str
    rule: str = ""
    source: str = ""
    collect: Callable[..., Any]
    facts: type
    judge: Callable[[Any, Options], tuple[Finding, ...]]
    reasons: tuple[Reason, ...]
    lane: Lane = Lane.LIGHT
    deadline_s: float = 10.0
    long_deadline_s: float = 0.0
    threads: int = 1
    if_hung: Verdict = Verdict.UNKNOWN
    if_crashed: Verdict = Verdict.UNKNOWN

    def deadline_at(self, level: Level) -> float:
        """Seconds the probe has in a run of this level."""
        long = level.includes(Level.STANDARD) or self.level.includes(Level.STANDARD)
        return self.long_deadline_s or self.deadline_s if long else self.deadline_s

    @property
    def module(self) -> str:
        """Module that the probe imports."""
        return self.collect.__module__

    @property
    def function(self) -> str:
        """Name of ``collect`` in it."""
        return self.collect.__name__
