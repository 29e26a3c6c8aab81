"""Several children of one probe, so that a costly import is paid once.

Only for probes: a probe is a fresh, exec'ed process with one thread, where a fork is safe as long as no
library has started threads. Never call this from a process that does other things.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Callable
from typing import Any

from sanitycheck.errors import CannotLookError
from sanitycheck.lifeline import die_with_parent

__all__ = ["ChildFailedError", "run_forked"]

ANSWER_BYTES_MAX = 64 << 10


class ChildFailedError(CannotLookError):
    """A child of the probe died or did not answer. Becomes ``unknown``; ``hung`` tells the two apart."""

    kind = "child_failed"

    def __init__(self, message: str, *, hung: bool = False) -> None:
        super().__init__(message)
        self.hung = hung


def _child(work: Callable[[int], dict[str, Any]], index: int, answer_fd: int) -> None:
    """Body of a child; never returns."""
    code = 1
    try:
        answer = json.dumps(work(index))
        os.write(answer_fd, answer.encode())
        code = 0
    finally:
        os._exit(code)


def run_forked(
    work: Callable[[int], dict[str, Any]], *, count: int, deadline_s: float
) -> list[dict[str, Any] | None]:
    """Run ``work(index)`` in ``count`` forked children and return their answers in order.

    Args:
        work: Returns what JSON can carry, in at most 64 KiB.
        count: How many children.
        deadline_s: For all together; those without an answer by then are ended and give None.
    """
    end = time.monotonic() + deadline_s
    pids: list[int] = []
    pipes: list[int] = []
    for index in range(count):
        read_fd, write_fd = os.pipe()
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            for fd in (*pipes, read_fd):
                os.close(fd)
            _child(work, index, write_fd)
        os.close(write_fd)
        pids.append(pid)
        pipes.append(read_fd)
    answers = [_answer(fd, end=end) for fd in pipes]
    for fd in pipes:
        os.close(fd)
    for pid in pids:
        _end(pid)
    return answers


def _answer(fd: int, *, end: float) -> dict[str, Any] | None:
    data = b""
    while len(data) < ANSWER_BYTES_MAX:
        ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return None
        part = os.read(fd, ANSWER_BYTES_MAX)
        if not part:
            break
        data += part
    return json.loads(data) if data else None


def _end(pid: int) -> None:
    """Reap a child, ending it first if it still runs; one that is stuck in the kernel is left to init."""
    done, _ = os.waitpid(pid, os.WNOHANG)
    if done == 0:
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG)[0] == 0:
            select.select([], [], [], 0.01)
