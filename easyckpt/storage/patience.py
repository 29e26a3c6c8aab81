"""Asking a remote store again: a bounded number of times, with pauses that grow and are drawn at random.

All retries happen here, none in a client library, so that their number and their longest total are the ones
below. They bridge hiccups. What lasts longer is the saver's business: it keeps the step in memory, says that
nothing new is durable, and tries again later.

The pauses are "full jitter" (M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015): a
thousand savers that were refused together do not come back together.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from easyckpt.storage.trouble import RemoteTrouble, Trouble

__all__ = ["Patience", "RetryLimits"]

T = TypeVar("T")

_LOG = logging.getLogger("easyckpt.storage")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryLimits:
    """How patient to be with one request."""

    attempts: int = 6
    first_pause_s: float = 0.2
    pause_max_s: float = 8.0
    total_s: float = 60.0
    """No new attempt begins after this."""
    request_s: float = 60.0
    """One request, of at most some 16 MiB: slower than 300 KB/s counts as no answer."""

    def pause_s(self, failed: int, *, draw: float) -> float:
        """How long to wait after the ``failed``-th failure, for a number drawn from 0 to 1."""
        return draw * min(self.pause_max_s, self.first_pause_s * 2.0 ** (failed - 1))


class Patience:
    """Runs requests, and again where that makes sense. Any thread may call.

    Args:
        limits: how often and how long.
        clock: monotonic seconds.
        sleep: waits.
        rng: draws the pauses.
    """

    def __init__(
        self,
        limits: RetryLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        rng: random.Random | None = None,
    ) -> None:
        self.limits = limits if limits is not None else RetryLimits()
        self._clock = clock
        self._sleep = sleep
        self._rng = rng if rng is not None else random.Random()

    def run(self, request: Callable[[], T], *, done: Callable[[Trouble], T | None] | None = None) -> T:
        """The request's result.

        Args:
            request: makes it.
            done: asked when it is refused: an earlier attempt, ours or one of the client library's own,
                may have reached the store, and only its answer was lost. Gives the result if so, else None.

        Raises:
            RemoteTrouble: no passing one, or patience is over.
        """
        began = self._clock()
        failed = 0
        while True:
            try:
                return request()
            except Exception as error:  # noqa: BLE001 - client libraries raise what they like; all of it is judged
                trouble = error if isinstance(error, RemoteTrouble) else RemoteTrouble(error)
                cause = error
            if done is not None:
                result = done(trouble.kind)
                if result is not None:
                    return result
            failed += 1
            pause = self.limits.pause_s(failed, draw=self._rng.random())
            over = failed >= self.limits.attempts or self._clock() - began + pause > self.limits.total_s
            if trouble.kind is not Trouble.PASSING or over:
                raise trouble from cause
            _LOG.debug("asked again in %.1f s: %s", pause, trouble)
            self._sleep(pause)
