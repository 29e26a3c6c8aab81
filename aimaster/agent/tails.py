"""The last lines of a worker's output: always kept, bounded, for the report of its end."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

LINES_MAX = 200
LINE_BYTES_MAX = 4096
FILE_TAIL_BYTES = 64 * 1024


class Tail:
    """The last lines of one stream. A line that redraws itself (``\\r``) counts as its newest state."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=LINES_MAX)
        self._open = b""

    def feed(self, data: bytes) -> None:
        """Take in output as it comes, cut anywhere."""
        *whole, rest = (self._open + data).split(b"\n")
        self._lines.extend(_shown(line) for line in whole[-LINES_MAX:])
        self._open = rest if len(rest) <= 2 * LINE_BYTES_MAX else _shown(rest)

    def text(self) -> str:
        """What is kept, as text; the last line may be unfinished."""
        lines = [*self._lines, _shown(self._open)] if self._open else list(self._lines)
        return "\n".join(line.decode("utf-8", "replace") for line in lines)


def file_tail(path: Path) -> str:
    """The last lines of a file that a worker writes itself; empty if it cannot be read."""
    tail = Tail()
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - FILE_TAIL_BYTES))
            tail.feed(file.read(FILE_TAIL_BYTES))
    except OSError:
        return ""
    return tail.text()


def _shown(line: bytes) -> bytes:
    line = line.rstrip(b"\r")
    return line[line.rfind(b"\r") + 1 :][-LINE_BYTES_MAX:]
