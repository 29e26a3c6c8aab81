"""What the user sees of a bug of ours: what it was, and the file to send."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from aimaster.agent.rundir import default_state_dir
from aimaster.ids import JobId
from aimaster.rpc.version import software

__all__ = ["report"]

REPORTS_KEPT_MAX = 20
FOLDER = "aimaster-crashes"


def report(error: BaseException, *, debug: bool) -> None:
    """Write the traceback to a file and say where; to stderr if asked, or if no file can be written."""
    text = "".join(traceback.format_exception(error))
    path = None if debug else _write(text)
    if path is None:
        sys.stderr.write(text)
    sys.stderr.write(f"aimaster: this is a bug of aimaster ({type(error).__name__}: {error})\n")
    if path is not None:
        sys.stderr.write(f"  please report it with {path}\n")


def _write(text: str) -> Path | None:
    folder = default_state_dir(os.environ, JobId("any")).parent.with_name(FOLDER)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in sorted(folder.glob("*.txt"))[: -REPORTS_KEPT_MAX + 1]:
            old.unlink(missing_ok=True)
        path = folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.txt"
        path.write_text(f"{software()}\nPython {sys.version}\n\n{text}")
    except OSError:
        return None
    return path
