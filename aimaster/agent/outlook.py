"""What can and cannot be seen of workers on this node: said once at the start, and in the node's notes.

Each witness that is missing makes verdicts later or less exact, never wrong; people should know which are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from aimaster.agent import counters
from aimaster.agent.spy import Spy
from aimaster.config import RunConfig

YAMA = "/proc/sys/kernel/yama/ptrace_scope"
YAMA_ADMIN_ONLY = 2
"""From this value on only an administrator may read other processes (Documentation/admin-guide/LSM/Yama)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """The witnesses of this node."""

    seen: tuple[str, ...]
    unseen: tuple[str, ...]
    limits: str = ""
    """When workers hang, in a few words; empty where nobody looks."""

    def __str__(self) -> str:
        seen = f"watching {', '.join(self.seen) or 'nothing'}"
        unseen = f"not {', '.join(self.unseen)}" if self.unseen else ""
        return "; ".join(part for part in (seen, unseen, self.limits) if part)


def look_out(config: RunConfig, env: Mapping[str, str], spy: Spy) -> Outlook:
    """Find out what this process may read; nothing is started and nobody is touched."""
    witnesses = {
        "steps": "steps (AIMASTER_HOOK=0)" if env.get("AIMASTER_HOOK") == "0" else "",
        "processes": "",
        "threads": "" if counters.threads(os.getpid()) else "threads (no /proc/PID/task)",
        "stacks": _no_stacks(spy),
        "slow ranks": "" if counters.effort(os.getpid()) else "slow ranks (no /proc/PID/task/TID/schedstat)",
        "kernel log": "the kernel's log",  # read by the node check alone
    }
    if os.path.exists("/dev/nvidiactl"):
        witnesses["devices"] = "what devices do (a rank that waits in the driver counts as one that works)"
    if not config.hangs.enabled:
        witnesses["hangs"] = "hangs (--no-hang-detection)"
    return Outlook(
        seen=tuple(name for name, why_not in witnesses.items() if not why_not),
        unseen=tuple(why_not for why_not in witnesses.values() if why_not),
        limits=_limits(config),
    )


def _limits(config: RunConfig) -> str:
    hangs = config.hangs
    if not hangs.enabled:
        return ""
    return (
        f"a hang is {hangs.floor_s:g} s without a step where waiting cannot end, {hangs.busy_s:g} s of work"
    )


def _no_stacks(spy: Spy) -> str:
    if spy.trouble:
        return f"stacks ({spy.trouble})"
    try:
        with open(YAMA, encoding="ascii") as file:
            scope = int(file.read())
    except (OSError, ValueError):
        return ""
    if scope >= YAMA_ADMIN_ONLY and os.geteuid() != 0:
        return f"stacks (kernel.yama.ptrace_scope is {scope})"
    return ""
