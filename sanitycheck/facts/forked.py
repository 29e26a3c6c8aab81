"""Several children of one probe, so that a costly import is paid once.

Only for probes: a probe is a fresh, exec'ed process with one thread, where a fork is safe as long as no
library has started threads. Never call this from a process that does other things.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from sanitycheck.errors import ChildFailedError
from sanitycheck.lifeline import die_with_parent

__all__ = ["run_forked"]

ANSWER_BYTES_MAX = 64 << 10
ERROR_CHARS_MAX = 300
END_WAIT_S = 0.5
FAULTS = (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT)

Answer = dict[str, Any]


def run_forked(work: Callable[[int], Answer], *, count: int, deadline_s: float) -> list[Answer | None]:
    """Run ``work(index)`` in ``count`` forked children and return their answers in order.

    A child that dies of a fault takes the probe with it, by the same signal, so that the engine sees it.

    Args:
        work: Returns what JSON can carry, in at most 64 KiB.
        count: How many children.
        deadline_s: For all together; those without an answer by then are ended and give None.

    Raises:
        ChildFailedError: ``work`` raised in a child.
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
    deaths = [_end(pid) for pid in pids]
    for number in deaths:
        if number in FAULTS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
    for index, answer in enumerate(answers):
        if answer is not None and "raised" in answer:
            raise ChildFailedError(f"child {index}: {answer['raised']}")
    return answers


def _child(work: Callable[[int], Answer], index: int, answer_fd: int) -> None:
    """Body of a child; never returns, whatever ``work`` does."""
    try:
        answer = json.dumps(work(index))
    finally:
        error = sys.exc_info()[1]
        if error is not None:
            answer = json.dumps({"raised": repr(error)[:ERROR_CHARS_MAX]})
        os.write(answer_fd, answer.encode())
        os._exit(0)


def _answer(fd: int, *, end: float) -> Answer | None:
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


def _end(pid: int) -> int:
    """Reap a child, ending it first if it still runs; the number of the signal it died of by itself, or 0.

    One that is stuck in the kernel is left to whoever reaps orphans.
    """
    done, status = os.waitpid(pid, os.WNOHANG)
    ended_by_us = done == 0
    ends = time.monotonic() + END_WAIT_S
    while done == 0 and time.monotonic() < ends:
        os.kill(pid, signal.SIGKILL)
        select.select([], [], [], 0.01)
        done, status = os.waitpid(pid, os.WNOHANG)
    return os.WTERMSIG(status) if done and not ended_by_us and os.WIFSIGNALED(status) else 0
