"""Tells whoever watches the training what it waits for, and how long; nobody may, and then nothing happens.

An agent's hook in this process is known by its module's name alone: this package imports nothing of it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

__all__ = ["during", "held", "holding", "loaded"]

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


@contextlib.contextmanager
def during(phase: str) -> Iterator[None]:
    """The training waits for a checkpoint, which may take long and is no hang: ``saving`` or ``loading``.

    Also a decorator. What another thread than the main one waits for does not hold the training.
    """
    hook = sys.modules.get(_HOOK)
    if hook is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = hook.phase(phase)
    try:
        yield
    finally:
        hook.phase(before)
