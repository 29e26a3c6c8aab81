"""Limits of the process and of shared memory: ``host.limits``."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from sanitycheck.facts.proc import cgroup_limits, read_text
from sanitycheck.facts.request import Request
from sanitycheck.thresholds import GIB

__all__ = ["LimitsFacts", "collect", "tasks_left"]

INFINIBAND = Path("/sys/class/infiniband")
SHM = "/dev/shm"


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsFacts:
    """Limits as this process has them; None means no limit.

    Attributes:
        rdma_devices: How many RDMA devices the kernel shows: locked memory matters only with them.
        shm_bytes: Size of /dev/shm; None where there is none.
        tasks_left: Processes and threads that may still be made here.
    """

    nofile_soft: int | None = 1048576
    nofile_hard: int | None = 1048576
    memlock_soft_bytes: int | None = None
    memlock_hard_bytes: int | None = None
    rdma_devices: int = 0
    shm_bytes: int | None = 64 * GIB
    shm_free_bytes: int | None = 64 * GIB
    tasks_left: int | None = None


def _limit(value: int) -> int | None:
    return None if value == resource.RLIM_INFINITY else value


def tasks_left(groups: tuple[tuple[str, ...], ...]) -> int | None:
    """Room in the tightest control group, from (``pids.max``, ``pids.current``) pairs."""
    rooms = [int(top) - int(now) for top, now in groups if top.isdigit() and now.isdigit()]
    return max(0, min(rooms)) if rooms else None


def collect(request: Request) -> LimitsFacts:
    """Ask for the resource limits and look at /dev/shm."""
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shm_bytes = shm_free_bytes = None
    if os.path.isdir(SHM):
        shm = os.statvfs(SHM)
        shm_bytes, shm_free_bytes = shm.f_blocks * shm.f_frsize, shm.f_bavail * shm.f_frsize
    kernel_tasks = (read_text("/proc/sys/kernel/threads-max") or "").strip()
    running = (read_text("/proc/loadavg") or "").split()
    groups = cgroup_limits("pids", "pids.max", "pids.current")
    if len(running) > 3 and "/" in running[3]:
        groups += ((kernel_tasks, running[3].split("/")[1]),)
    return LimitsFacts(
        nofile_soft=_limit(nofile[0]),
        nofile_hard=_limit(nofile[1]),
        memlock_soft_bytes=_limit(memlock[0]),
        memlock_hard_bytes=_limit(memlock[1]),
        rdma_devices=len(list(INFINIBAND.iterdir())) if INFINIBAND.is_dir() else 0,
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        tasks_left=tasks_left(groups),
    )
