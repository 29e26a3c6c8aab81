"""How many bytes move how fast, said in the log when that changes and not at every save.

Slow storage, a copy that does not overlap, a state that has doubled: each is one line, once. Noise of the
machine is none.
"""

from __future__ import annotations

import logging
import threading

__all__ = ["RateLog"]

BYTES_CHANGE = 1.1
RATE_CHANGE = 2.0
"""A figure has changed if it grew or shrank by more than that factor since it was said."""


class RateLog:
    """One kind of movement. Any thread may call.

    Args:
        what: as a sentence begins: ``copied into memory``.
        log: where it is said, as information.
    """

    def __init__(self, what: str, log: logging.Logger) -> None:
        self._what = what
        self._log = log
        self._said: tuple[int, float, str] | None = None
        self._lock = threading.Lock()

    def note(self, count: int, seconds: float, *, how: str) -> None:
        """So many bytes took so long.

        Args:
            count: bytes; nothing is said of none.
            seconds: of a clock or of a processor, as ``how`` says.
            how: what else there is to know; said again when it changes.
        """
        if count <= 0 or seconds <= 0:
            return
        rate = count / seconds
        with self._lock:
            if self._said is not None and not self._is_news(count, rate, how):
                return
            self._said = (count, rate, how)
        self._log.info("%s: %.3g GB at %.2f GB/s (%s)", self._what, count / 1e9, rate / 1e9, how)

    def _is_news(self, count: int, rate: float, how: str) -> bool:
        assert self._said is not None
        count_said, rate_said, how_said = self._said
        changed = _changed(count_said, count, BYTES_CHANGE) or _changed(rate_said, rate, RATE_CHANGE)
        return changed or how != how_said


def _changed(before: float, now: float, factor: float) -> bool:
    return not before / factor <= now <= before * factor
