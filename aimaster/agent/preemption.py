"""The end of a node that a scheduler wants back: the newest step becomes durable within the grace time.

What memory holds is written at once, while the workers are being stopped: they get SIGTERM, may save once
more, and are killed when half of the time is over. Then what they saved meanwhile is written, as far as time
allows. A step that is not durable when the machine goes is lost; the one before it is not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["stop_and_persist"]

WORKERS_SHARE = 0.5
"""Of the grace time, at most, until workers that do not end are killed."""
MARGIN_S = 1.0
"""Left for goodbyes, before the scheduler's SIGKILL."""


async def stop_and_persist(
    grace_s: float,
    *,
    stop: Callable[[float], Awaitable[object]],
    persist: Callable[[float], Awaitable[int | None]],
) -> int | None:
    """Stop the workers and make the newest step durable.

    Args:
        grace_s: From now until the machine may be gone.
        stop: Stops the workers, with so many seconds until they are killed.
        persist: Makes durable what memory holds, within so many seconds; the newest durable step.

    Returns:
        The newest durable step; None if there is none, or none became so in time.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + max(grace_s - MARGIN_S, grace_s / 2)
    at_once = asyncio.ensure_future(persist(deadline - loop.time()))
    await stop(grace_s * WORKERS_SHARE)
    first = await at_once
    left_s = deadline - loop.time()
    second = await persist(left_s) if left_s > 0 else None
    return first if second is None else second
