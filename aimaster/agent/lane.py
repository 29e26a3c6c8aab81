"""One worker's way to the console.

A lone worker's output passes as it comes. Where several share a console their lines must not cut each other
in two: whole lines pass at once, and a line that is not finished waits a moment for its end, so that
prompts and progress bars appear all the same.
"""

from __future__ import annotations

import asyncio

from aimaster.agent.sink import Sink

PARTIAL_HOLD_S = 0.05
PREFIXED_LINE_BYTES_MAX = 16 * 1024
"""With a prefix a line waits for its end; one that is longer is cut here."""


class Lane:
    """Feeds one stream of one worker into a sink. Use in the event loop."""

    def __init__(self, sink: Sink, fd: int, *, prefix: bytes = b"", alone: bool = False) -> None:
        self._sink = sink
        self._fd = fd
        self._prefix = prefix
        self._alone = alone and not prefix
        self._open = b""
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, data: bytes) -> None:
        """Take in output as it comes, cut anywhere."""
        if self._alone:
            self._sink.write(self._fd, data)
            return
        data = self._open + data
        whole, newline, self._open = data.rpartition(b"\n")
        if newline:
            self._sink.write(self._fd, self._with_prefix(whole + newline))
        if self._prefix:
            while len(self._open) > PREFIXED_LINE_BYTES_MAX:
                piece, self._open = (
                    self._open[:PREFIXED_LINE_BYTES_MAX],
                    self._open[PREFIXED_LINE_BYTES_MAX:],
                )
                self._sink.write(self._fd, self._with_prefix(piece + b"\n"))
        elif self._open and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(PARTIAL_HOLD_S, self._pass_partial)

    def end(self) -> None:
        """The stream is over: pass what is left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._prefix and self._open:
            self._open += b"\n"
        self._pass_partial()

    def _pass_partial(self) -> None:
        self._timer = None
        if self._open:
            self._sink.write(self._fd, self._with_prefix(self._open))
            self._open = b""

    def _with_prefix(self, lines: bytes) -> bytes:
        if not self._prefix:
            return lines
        return b"".join(self._prefix + line for line in lines.splitlines(keepends=True))
