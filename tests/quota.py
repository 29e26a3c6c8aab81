"""A share of a processor for some processes, by the kernel's own bandwidth control (cgroup v1 or v2).

Unlike stopping and continuing, a quota slows a process down evenly, in slices of milliseconds, and nobody
sees it as stopped.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PERIOD_US = 20_000
QUOTA_US_MIN = 1_000
GONE_S = 10.0


def _v1() -> Path | None:
    """The mount of the v1 cpu controller."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup" and "cpu" in options.split(","):
            return Path(where)
    return None


def _v2() -> Path | None:
    """A v2 hierarchy whose root hands the cpu controller down."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, kind, *_ = line.split()
        control = Path(where) / "cgroup.subtree_control"
        if kind == "cgroup2" and control.exists() and "cpu" in control.read_text().split():
            return Path(where)
    return None


def why_not() -> str:
    """Why no quota can be set here; empty if one can."""
    if _v1() is None and _v2() is None:
        return "no cgroup hierarchy with processor quotas is mounted"
    try:
        with slowed((), share=0.5):
            return ""
    except OSError as error:
        return f"no processor quota can be set: {error}"


@contextlib.contextmanager
def slowed(pids: Iterable[int], *, share: float) -> Iterator[None]:
    """These processes, and the children that they start meanwhile, together get that share of one processor.

    Args:
        pids: of processes that the test started.
        share: of one processor; 0.5 is half of it.
    """
    base = _v1()
    quota_us = max(QUOTA_US_MIN, int(share * PERIOD_US))
    settings = {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(quota_us)}
    if base is None:
        base = _v2()
        settings = {"cpu.max": f"{quota_us} {PERIOD_US}"}
    assert base is not None, "see why_not()"
    group = base / f"test-{os.getpid()}-{secrets.token_hex(4)}"
    group.mkdir()
    try:
        for name, value in settings.items():
            (group / name).write_text(value)
        for pid in pids:
            _move(pid, group)
        yield
    finally:
        deadline = time.monotonic() + GONE_S
        while time.monotonic() < deadline:
            for pid in (group / "cgroup.procs").read_text().split():
                _move(int(pid), base)
            with contextlib.suppress(OSError):  # somebody is still leaving
                group.rmdir()
                break
            time.sleep(0.05)


def _move(pid: int, group: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        (group / "cgroup.procs").write_text(str(pid))
