"""Which steps a rank does not even ask for: those between two of its interval, and those the lead announced.

Every rank comes to the same answer: an interval in steps goes by the step's number, and what the lead
announced holds for all (`easyckpt.interval`). A save that waits for a slot (``block=True``) is always
asked for, so that the last step of a training is saved whatever the interval says.
"""

from __future__ import annotations

from easyckpt.handle import SaveHandle
from easyckpt.saver.protocol import StageInfo

__all__ = ["Gate"]


class Gate:
    """See the module.

    Args:
        every_steps: interval in steps; 1 lets every step through.
    """

    def __init__(self, every_steps: int) -> None:
        self._every_steps = every_steps
        self._not_before = 0
        self.cost_s = 0.0
        """How long the last save that was granted held its caller."""

    def early(self, step: int, *, block: bool) -> SaveHandle | None:
        """The handle of a step that is not asked for; None if it is."""
        if block:
            return None
        if step % self._every_steps:
            reason = f"not due: every {self._every_steps} steps are saved"
        elif step < self._not_before:
            reason = f"not due: no step before {self._not_before} is"
        else:
            return None
        return SaveHandle(step, seat=None, info=StageInfo(step=step, stage="skipped", reason=reason))

    def told(self, handle: SaveHandle, took_s: float) -> None:
        """A step was asked for; how that went, and how long it took."""
        self._not_before = handle.not_before
        if not handle.skipped:
            self.cost_s = took_s

    def forget(self) -> None:
        """Training goes on elsewhere."""
        self._not_before = 0
