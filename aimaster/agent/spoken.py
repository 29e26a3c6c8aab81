"""What the agent says to people: single lines on stderr, so that stdout belongs to the workers.

A line is written in one call, so that two processes on one terminal do not mix their words. A terminal that
is gone is no reason to end a training: the words are lost, the work goes on.
"""

from __future__ import annotations

import contextlib
import os

NAME = "aimaster"


def say(text: str) -> None:
    """Write `text`, each line behind our name, to stderr. Never raises."""
    lines = "".join(f"{NAME}: {line}\n" for line in text.splitlines() or [""])
    with contextlib.suppress(OSError):
        os.write(2, lines.encode("utf-8", "replace"))
