"""What came back from a probe, before any judgement. A drill makes these by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["Answered", "Cannot", "Crashed", "Hung", "NotRun", "Outcome"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The probe gave facts (an instance of the check's facts class)."""

    facts: Any
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cannot:
    """The probe said that it could not look; ``kind`` as in :class:`sanitycheck.errors.CannotLookError`."""

    kind: str
    message: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Hung:
    """The probe did not answer.

    Attributes:
        phase: What it was doing, in its own words.
        full_time: It had its whole deadline; False when the run's own time ended first.
        unkillable: It did not even end when killed: it is stuck in the kernel.
    """

    phase: str = ""
    after_s: float = 0.0
    full_time: bool = True
    unkillable: bool = False
    pid: int = 0

    @property
    def duration_s(self) -> float:
        """Time spent on it."""
        return self.after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Crashed:
    """The probe ended without an answer.

    Attributes:
        signal: Name of the signal that ended it, empty if it ended by itself.
        code: Its exit code; None when somebody else took the status.
        message: What it said last.
    """

    signal: str = ""
    code: int | None = None
    phase: str = ""
    message: str = ""
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NotRun:
    """The probe was not started; ``why`` is ``time``, ``cancelled`` or ``drill``."""

    why: str
    duration_s: float = 0.0


Outcome = Answered | Cannot | Crashed | Hung | NotRun
