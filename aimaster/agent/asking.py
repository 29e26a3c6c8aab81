"""Asks a rank's flight recorder which collective it waits in; the other side is `aimaster.worker.recorder`.

Never waits: the question is the opening of a pipe that somebody reads or nobody does, the answer a file that
is there at a later look or not.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from aimaster.worker.recorder import ANSWER_NAME, ASK_NAME

ANSWER_BYTES_MAX = 64 * 1024


def ask(folder: Path, pid: int) -> None:
    """Ask, and forget an earlier answer; a rank without a recorder is not disturbed."""
    with contextlib.suppress(OSError):
        os.unlink(folder / ANSWER_NAME.format(pid=pid))
    with contextlib.suppress(OSError):  # ENOENT: it has none; ENXIO: it is busy with an earlier question
        os.close(os.open(folder / ASK_NAME.format(pid=pid), os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))


def answer(folder: Path, pid: int) -> str:
    """What the rank waits in: ``all_reduce #41``, else the last that it ended; empty without an answer."""
    path = folder / ANSWER_NAME.format(pid=pid)
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(ANSWER_BYTES_MAX))
        open_ones = [f"{one['op']} #{one['seq']}" for one in told if not one["ended"]]
        ended = [f"{one['op']} #{one['seq']}" for one in told if one["ended"]]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if open_ones:
        return ", ".join(open_ones)
    return f"after {ended[-1]}" if ended else ""


def forget(folder: Path, pid: int) -> None:
    """Remove what an ended process has left."""
    for name in (ASK_NAME, ANSWER_NAME, f"{ANSWER_NAME}.draft"):
        with contextlib.suppress(OSError):
            os.unlink(folder / name.format(pid=pid))
