"""The fence: nothing that is being copied may change before its copy is done.

Parameters and optimizer state change within an optimizer's step, so a hook before every step of every
optimizer of this process waits for all copies on their way. DeepSpeed changes its state behind the step of
the optimizer that it wraps, in ZeRO 1, 2 and 3, so the same hook covers it. Modules and optimizers that are
being copied wait before ``load_state_dict``. Whoever changes parameters by hand calls `fence` first; who
forgets is found by the witness, and the step is given up.

The waiting thread does not sit idle: it copies pieces itself until none is left.

In a forked child nothing is on its way: the copying thread exists in the parent only.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from easyckpt import watched
from easyckpt.overlap.job import Job

__all__ = ["before_load", "enter", "fence", "install", "leave", "listen"]

EXIT_TIMEOUT_S = 60.0
"""At most so long the end of the process waits for a copy."""

_running: set[Job] = set()
_listeners: list[Callable[[float], None]] = []
_installed = threading.Lock()
_is_installed = False


def fence() -> None:
    """Wait until no copy of this process reads the training state any more.

    Call it before code that changes parameters or optimizer state in another way than by an optimizer's
    ``step``. Costs a microsecond when nothing is on its way. Any thread.
    """
    for job in tuple(_running):
        job.wait_copied()


def enter(job: Job) -> None:
    """A copy begins."""
    _running.add(job)


def leave(job: Job) -> None:
    """A copy is done, and the saver was told."""
    _running.discard(job)


def listen(listener: Callable[[float], None]) -> Callable[[], None]:
    """Have a function told the time before each optimizer step, after the fence; returns how to stop."""
    _listeners.append(listener)

    def stop() -> None:
        if listener in _listeners:
            _listeners.remove(listener)

    return stop


def install() -> None:
    """Have every optimizer step of this process wait. Once is enough."""
    global _is_installed
    with _installed:
        if _is_installed:
            return
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_before_step)
        os.register_at_fork(after_in_child=_running.clear)
        atexit.register(_at_exit)
        _is_installed = True


def _at_exit() -> None:
    """A program that ends without closing its checkpointer has its last step all the same."""
    for job in tuple(_running):
        job.wait_finished(EXIT_TIMEOUT_S)


def before_load(*_: Any) -> None:
    """Hook of modules and optimizers: their state is about to be replaced."""
    fence()


def _before_step(*_: Any) -> None:
    if _running:
        began = time.monotonic()
        fence()
        watched.held(time.monotonic() - began)
    if _listeners:
        now = time.monotonic()
        for listener in tuple(_listeners):
            listener(now)
