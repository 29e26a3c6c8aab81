"""Waiting with a bound, without losing a cancellation.

`asyncio.wait_for` returns normally, and the cancellation is gone, when both arrive in the same turn of the
loop (cpython#86296, mended in 3.12); a task that loops over it can then never be cancelled. `asyncio.timeout`
has no such fault and is not in Python 3.10.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


async def within(timeout_s: float, awaitable: Awaitable[T]) -> T:
    """The result, if it comes in time; what was waited for is cancelled otherwise.

    Raises:
        asyncio.TimeoutError: it did not come in time.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if task.done():
            return task.result()
        raise asyncio.TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif not task.cancelled():
            task.exception()  # taken, also where the wait was cancelled in the moment in which it failed
