"""Keeping a probe from outliving the one who asked."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel end this process when its parent ends (prctl(2), Linux only; elsewhere nothing
    happens).

    The signal fires when the parent's *thread* that made us ends, so a caller keeps that thread until we are
    done.

    Args:
        parent: Who the parent should be. If it is gone already, this process ends at once.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
