"""What `save` returns: how far that save is, and how to wait for it.

A handle holds no connection. It asks the saver on a short one of its own, so that any thread may wait while
the training thread goes on saving.
"""

from __future__ import annotations

import logging
import time
from typing import Literal

from easyckpt import watched
from easyckpt.errors import Misuse, SaveAbandoned, SaverUnavailable, SaveSkipped, SaveTimeout
from easyckpt.link import Seat, query
from easyckpt.saver.protocol import StageInfo

__all__ = ["SaveHandle", "StageName"]

StageName = Literal["memory", "replicated", "durable"]

QUESTION_S = 60.0
"""Longest single question; a longer wait asks again."""

_LOG = logging.getLogger("easyckpt")
_STAGES = ("memory", "replicated", "durable")
_FINAL = ("skipped", "abandoned", "durable", "failed")


class SaveHandle:
    """One save on its way: ``staging → memory → replicated → durable``, or ``skipped``, ``abandoned``,
    ``failed``.

    ``memory`` is reached when every rank's copy is complete, ``replicated`` when each has a copy on another
    node (on one node: when it is durable), ``durable`` when the checkpoint is visible on storage.
    """

    def __init__(self, step: int, *, seat: Seat | None, info: StageInfo) -> None:
        self.step = step
        self._seat = seat
        self._info = info

    def __repr__(self) -> str:
        reason = f", {self._info.reason!r}" if self._info.reason else ""
        return f"SaveHandle(step={self.step}, {self._info.stage!r}{reason})"

    @property
    def stage(self) -> str:
        """How far the step is now. Asks the saver; the last answer if that is gone."""
        if self._info.stage not in _FINAL and self._seat is not None:
            try:
                self._info = query(self._seat, self.step, stage="", timeout_s=0.0)
            except SaverUnavailable as error:
                _LOG.debug("step %d: %s", self.step, error)
        return self._info.stage

    @property
    def not_before(self) -> int:
        """Of a step that was not due: no earlier one than this will be; 0 if nothing is known."""
        return self._info.not_before

    @property
    def skipped(self) -> bool:
        """Whether the save never began."""
        return self._info.stage == "skipped"

    @property
    def reason(self) -> str:
        """Why it was skipped or given up, or what holds it up; empty if nothing does."""
        return self._info.reason

    @watched.during("saving")
    def wait(self, stage: StageName = "durable", timeout: float | None = None) -> None:
        """Wait until the step got to a stage. On a step that is only in memory, ``durable`` has it persisted.

        Args:
            stage: ``memory``, ``replicated`` or ``durable``.
            timeout: seconds; None is as long as it takes.

        Raises:
            SaveSkipped: the save never began.
            SaveAbandoned: it was given up.
            SaveTimeout: the time is over; the save goes on.
            SaverUnavailable: the saver is gone.
        """
        if stage not in _STAGES:
            raise Misuse(f"no stage {stage!r}", hint=f"one of {', '.join(_STAGES)}")
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._raise_if_over(stage)
            if self._info.stage in _STAGES and _STAGES.index(self._info.stage) >= _STAGES.index(stage):
                return
            left = QUESTION_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                why = f": {self._info.reason}" if self._info.reason else ""
                raise SaveTimeout(
                    f"it is at {self._info.stage!r} after {timeout:g} s{why}", where=self._where
                )
            assert self._seat is not None
            self._info = query(self._seat, self.step, stage=stage, timeout_s=min(left, QUESTION_S))

    @property
    def _where(self) -> str:
        return f"step {self.step}"

    def _raise_if_over(self, stage: str) -> None:
        if self._info.stage == "skipped":
            raise SaveSkipped(f"skipped: {self._info.reason}", where=self._where)
        if self._info.stage == "abandoned":
            raise SaveAbandoned(f"given up before it was {stage}: {self._info.reason}", where=self._where)
        if self._info.stage == "failed":
            raise SaverUnavailable(self._info.reason, where=self._where)
