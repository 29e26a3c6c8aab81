"""Tells whoever watches the training how long it was held; nobody may, and then nothing happens.

An agent's hook in this process is known by its module's name alone: this package imports nothing of it.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["held", "holding", "loaded"]

P = ParamSpec("P")
R = TypeVar("R")

_HOOK = "aimaster.worker.hook"


def loaded(seconds: float) -> None:
    """A checkpoint was loaded, which took so long."""
    hook = sys.modules.get(_HOOK)
    if hook is not None:
        hook.loaded(seconds)


def held(seconds: float) -> None:
    """Saving has held the training thread for so long."""
    hook = sys.modules.get(_HOOK)
    if hook is not None:
        hook.held(seconds)


def holding(call: Callable[P, R]) -> Callable[P, R]:
    """The same call, which tells how long it held its caller."""

    @functools.wraps(call)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        began_s = time.monotonic()
        try:
            return call(*args, **kwargs)
        finally:
            held(time.monotonic() - began_s)

    return told
