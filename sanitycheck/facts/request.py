"""What a probe is asked, and how it says where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from sanitycheck.options import Options
from sanitycheck.result import Level

__all__ = ["Request"]


def _nowhere(phase: str) -> None:
    """A request made by hand has nobody to tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One probe's orders.

    Attributes:
        check: Id of the check.
        level: Level of the run, or of the check where that lies deeper.
        deadline_s: Time the probe has, counted from its start.
        options: The run's options.
        tell: Call with a short phrase before anything that may hang; a probe that is ended at its deadline
            is then reported with the phrase it got to.
    """

    check: str
    level: Level = Level.QUICK
    deadline_s: float = 30.0
    options: Options = field(default_factory=Options)
    tell: Callable[[str], None] = _nowhere

    @property
    def thorough(self) -> bool:
        """False at the level *instant*: look, but measure nothing."""
        return self.level is not Level.INSTANT

    @property
    def long(self) -> bool:
        """Whether there is time for large sizes and long measurements."""
        return self.level.includes(Level.STANDARD)
