"""Torch's process groups as `aimaster.worker.again` needs them: aborted from outside, recognised, let go.

The only file here that uses private names of torch (`_world.pg_names`, tried with 2.13); where they are
missing nothing is aborted, and a rank comes out of its collective by the sockets that its peers close.

Gloo's `abort` does not wake a rank that waits already (tried with 2.13). What wakes it is a peer that is gone
or has let go of its own group: its sockets close. Each rank that comes out lets go at once, so that the next
one comes out, and so on; a rank that is at work between two collectives comes out in its next one.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import Any

ECHO_WORDS = (
    "gloo",
    "NCCL",
    "ProcessGroup",
    "process group",
    "Connection closed by peer",
    "Connection reset",
)
"""In the text of what a rank raises when its peers are gone."""


def abort() -> None:
    """Abort every process group of this process, from any thread. What waits in NCCL comes out of it."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(c10d, "_world", None)
    for group in tuple(getattr(world, "pg_names", ())):
        # A group that is being destroyed, or of a backend that cannot: the peers' ends wake this rank.
        with contextlib.suppress(RuntimeError, ValueError, AttributeError):
            group.abort()


def let_go() -> None:
    """Destroy every process group, in the thread that used them: its sockets close, and peers come out."""
    dist: Any = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        # Some part of it may be gone already; what is left goes with the objects.
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()
    gc.collect()


def is_echo(error: BaseException) -> bool:
    """Whether an exception is what a rank sees of another one's end, and no failure of its own."""
    dist: Any = sys.modules.get("torch.distributed")
    kinds = [getattr(dist, name, None) for name in ("DistError", "DistBackendError", "DistNetworkError")]
    if isinstance(error, tuple(kind for kind in kinds if isinstance(kind, type))):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in ECHO_WORDS)
