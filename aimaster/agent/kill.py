"""Signals to exactly one process, never to a later one that has its number."""

from __future__ import annotations

import contextlib
import os
import signal

from aimaster.worker.progress import start_time


def send_exactly(pid: int, pid_start: int, number: int) -> None:
    """Send a signal to the process with this number that began at this time, if it is still there."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except OSError:  # a kernel before 5.3, or a sandbox without it
        fd = -1
    try:
        if start_time(pid) == pid_start:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if fd >= 0:
                    signal.pidfd_send_signal(fd, number)
                else:
                    os.kill(pid, number)
    finally:
        if fd >= 0:
            os.close(fd)
