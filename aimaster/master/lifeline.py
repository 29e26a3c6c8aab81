"""A master that an agent has started ends with it, however the agent ends (prctl(2), PR_SET_PDEATHSIG).

SIGKILL is safe, since everything that counts is in the journal. The signal fires when the *thread* that made
this process ends, so an agent starts its master from a thread that lives as long as itself.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> bool:
    """Ask the kernel to end this process when its parent ends.

    Args:
        parent: The parent's pid, read before anything else was done.

    Returns:
        False if the parent has ended already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent
