"""The few process controls of Linux that Python has no function for (prctl(2)), without a dependency."""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
NAME_BYTES_MAX = 15


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when `parent` ends; ends it now if that has happened already.

    The signal fires when the *thread* that is the parent ends, so only a thread that lives as long as its
    process may be one (the main thread is).
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(70)


def become_subreaper() -> None:
    """Let orphaned descendants of this process become its children.

    Raises:
        OSError: The kernel has no such thing.
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def set_name(name: str) -> None:
    """Name of the main thread, as ``ps -o comm`` and ``top`` show it."""
    with open("/proc/self/comm", "wb", buffering=0) as file:
        file.write(os.fsencode(name)[:NAME_BYTES_MAX])


def name() -> str:
    """Name of the main thread."""
    with open("/proc/self/comm", "rb") as file:
        return os.fsdecode(file.read().rstrip(b"\n"))


def children(pid: int) -> list[int]:
    """Pids of the children of all threads of a process; empty where the kernel does not tell."""
    found: list[int] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        pass
    return found


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
