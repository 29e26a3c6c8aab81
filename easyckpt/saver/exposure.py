"""For how long nothing has become durable, what is said of it, and when that is too long. Pure."""

from __future__ import annotations

__all__ = ["Exposure"]

AGE_SHOWN_S = 10
"""The age of the newest durable step is told in steps of this: all members hear of each change."""


class Exposure:
    """Counts from the newest durable step, or from the first save of a training that has none."""

    def __init__(self) -> None:
        self._protected_at: float | None = None

    def begins(self, now: float) -> None:
        """Something is to be saved."""
        if self._protected_at is None:
            self._protected_at = now

    def ends(self, now: float) -> None:
        """A step has become durable, or training goes on from one."""
        self._protected_at = now

    def age_s(self, now: float) -> float:
        """Seconds without a new durable step."""
        return 0.0 if self._protected_at is None else now - self._protected_at

    def told(self, now: float, *, durable: int | None) -> str:
        """The age, in words."""
        newest = "no step is" if durable is None else f"step {durable} is the newest"
        age_s = int(self.age_s(now) // AGE_SHOWN_S * AGE_SHOWN_S)
        return f"{newest} durable, and none was added for {age_s} s"

    def refusal(self, now: float, *, limit_s: float, durable: int | None, why: str) -> str:
        """Why training must not go on without a net; empty if it may, or if there is no limit."""
        if not limit_s or self.age_s(now) <= limit_s:
            return ""
        step = "no step" if durable is None else f"no step after {durable}"
        because = f": {why}" if why else ""
        return f"{step} became durable for {self.age_s(now):.0f} s, and {limit_s:g} s are allowed{because}"
