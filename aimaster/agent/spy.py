"""Python stacks of another process, read from outside by py-spy without stopping it.

``py-spy dump --nonblocking`` reads memory; it works on a stopped process and on one whose interpreter is held
by a C call, takes some ten milliseconds, and disturbs neither. A process that runs meanwhile may yield a
stack that is torn; such a one is not believed (the same stack must be seen twice).

Where reading another process is forbidden the first refusal is remembered and said in the node's notes;
verdicts then rest on the kernel's counters alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aimaster.core.stacks import Frame
from aimaster.rpc.waiting import within

DUMP_S_MAX = 5.0
DUMP_BYTES_MAX = 8 * 1024 * 1024
FRAMES_MAX = 200
"""Frames of one thread that are kept, the innermost ones."""
REFUSALS_MAX = 3
"""After so many refusals in a row nobody is asked any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The main thread of one process, and who holds its interpreter."""

    frames: tuple[Frame, ...]
    """Innermost first."""
    holder: int | None
    """Thread id of the holder of the interpreter's lock; None where nobody holds it."""


class Spy:
    """Runs py-spy. Used on the agent's event loop alone; one dump at a time.

    Args:
        own: Told the pid of each py-spy, which is a helper of the agent and no leftover of a worker.
        disown: Told when it has ended.
    """

    def __init__(self, *, own: Callable[[int], None], disown: Callable[[int], None]) -> None:
        self._own, self._disown = own, disown
        beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
        self._program = beside if os.access(beside, os.X_OK) else shutil.which("py-spy")
        self._refused = 0
        self.trouble = "" if self._program else "py-spy is not installed"
        """Why no stacks can be read; empty where they can, as far as is known."""

    async def dump(self, pid: int) -> Dump | None:
        """The stack of a process; None where it cannot be read (now)."""
        if self.trouble or self._program is None:
            return None
        process = await asyncio.create_subprocess_exec(
            self._program, "dump", "--nonblocking", "--json", "--pid", str(pid),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, limit=DUMP_BYTES_MAX,
        )  # fmt: skip
        self._own(process.pid)
        try:
            out, err = await within(DUMP_S_MAX, process.communicate())
        except asyncio.TimeoutError:
            return None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
            self._disown(process.pid)
        if process.returncode != 0:
            self._note_refusal(err.decode("utf-8", "replace"))
            return None
        self._refused = 0
        return parse(out, pid=pid)

    def _note_refusal(self, said: str) -> None:
        if "ermission" not in said and "not permitted" not in said:
            return  # the process has just ended, or is no Python
        self._refused += 1
        if self._refused >= REFUSALS_MAX:
            self.trouble = "stacks of the workers may not be read here (ptrace is not permitted)"


def parse(out: bytes, *, pid: int) -> Dump | None:
    """What py-spy has printed; None if it is not what is expected."""
    try:
        found: Any = json.loads(out[:DUMP_BYTES_MAX])
        main = next((t for t in found if t["os_thread_id"] == pid), None)
        if main is None:
            main = next(t for t in found if t["thread_name"] == "MainThread")
        holder = next((t["os_thread_id"] for t in found if t["owns_gil"]), None)
        frames = tuple(
            Frame(name=str(f["name"]), path=str(f["filename"]), line=int(f["line"]))
            for f in main["frames"][:FRAMES_MAX]
        )
    except (ValueError, KeyError, TypeError, StopIteration):
        return None
    return Dump(frames=frames, holder=holder)
