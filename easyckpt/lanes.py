"""Long work on bytes, cut into parts that run beside each other in a bounded number of threads.

Hashing, `pwrite` and `preadv` leave the interpreter lock, so that threads are enough: while one part waits
for the device, another one is hashed. A caller's threads end with the call: nothing outlives it, a fork finds
none, and storage that hangs holds only its own caller.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

__all__ = ["cores", "run_lanes"]

LANES_MIN = 2
"""One part is with the device while the next one is hashed, even on one core."""

LANES_MAX = 8
"""More parts in flight than that brought nothing on any device that was tried."""


def cores() -> int:
    """Processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def run_lanes(tasks: Sequence[Callable[[], object]], *, lanes: int | None = None) -> None:
    """Do all tasks, several at a time; return when every one has ended.

    Args:
        tasks: in the order in which they begin.
        lanes: how many at a time; None takes what the cores here give.

    Raises:
        BaseException: what the first of them in order raised. Those that had not begun are left out then.
    """
    width = lanes if lanes is not None else max(LANES_MIN, min(LANES_MAX, cores() // 2))
    width = min(width, len(tasks))
    if width <= 1:
        for task in tasks:
            task()
        return
    with ThreadPoolExecutor(width, thread_name_prefix="lane") as pool:
        running = [pool.submit(task) for task in tasks]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            for future in running:
                future.cancel()
    try:
        for future in running:
            if not future.cancelled():
                future.result()
    finally:
        # An error's traceback leads back to this frame: such a ring would keep views of slots alive.
        del future, running
