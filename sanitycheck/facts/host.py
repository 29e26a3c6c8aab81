"""Processors, memory and boot: ``host.cpu_mem`` and ``host.boot``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sanitycheck.errors import ToolMissingError
from sanitycheck.facts.proc import cgroup_limits, parse_key_values, read_text
from sanitycheck.facts.request import Request
from sanitycheck.thresholds import GIB

__all__ = ["BootFacts", "CpuMemFacts", "collect_boot", "collect_cpu_mem", "cpu_model", "parse_cpu_quota"]

EDAC = Path("/sys/devices/system/edac/mc")
_NO_LIMIT = 1 << 60
"""Version 1 groups write a huge number for "no limit"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMemFacts:
    """Processors and memory as this process may use them.

    Attributes:
        cpus: Processors in the affinity mask.
        cpu_quota: Processors the control group grants; None without a quota.
        memory_available_bytes: What can be had now, by kernel and control group.
        edac_corrected: Memory errors corrected since the driver loaded; None where the node does not count.
        edac_uncorrected: As above, not corrected.
    """

    cpus: int = 8
    cpu_quota: float | None = None
    cpu_model: str = ""
    load_1min: float = 0.0
    memory_total_bytes: int = 64 * GIB
    memory_available_bytes: int = 32 * GIB
    memory_limit_bytes: int | None = None
    edac_corrected: int | None = None
    edac_uncorrected: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BootFacts:
    """Which boot of the machine this is."""

    boot_id: str = "00000000-0000-0000-0000-000000000000"
    uptime_s: float = 86400.0


def parse_cpu_quota(text: str) -> float | None:
    """``cpu.max`` of a control group (``max 100000`` or ``150000 100000``) as a number of processors."""
    parts = text.split()
    if len(parts) == 2 and parts[0].lstrip("-").isdigit() and parts[1].isdigit() and int(parts[1]) > 0:
        quota = int(parts[0])
        return quota / int(parts[1]) if quota > 0 else None
    return None


def _cpu_quota() -> float | None:
    quotas = [parse_cpu_quota(text) for (text,) in cgroup_limits("cpu", "cpu.max")]
    quotas += [
        parse_cpu_quota(f"{quota} {period}")
        for quota, period in cgroup_limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _memory_rooms() -> Iterable[tuple[int, int]]:
    """(limit, used) of each control group around us that has a limit; what can be reclaimed is not used."""
    for names in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"),
    ):
        for limit, used, stat in cgroup_limits("memory", *names):
            if limit.isdigit() and used.isdigit() and int(limit) < _NO_LIMIT:
                stats = dict(line.split(" ", 1) for line in stat.splitlines() if " " in line)
                cache = int(stats.get("total_inactive_file", stats.get("inactive_file", "0")))
                yield int(limit), max(0, int(used) - cache)


def _edac(name: str) -> int | None:
    counts = [read_text(path) for path in EDAC.glob(f"mc*/{name}")]
    numbers = [int(text) for text in counts if text is not None and text.strip().isdigit()]
    return sum(numbers) if numbers else None


def cpu_model() -> str:
    """The processor's name; empty where the kernel does not tell."""
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Processor", "cpu model"):
            return value.strip()
    return ""


def collect_cpu_mem(request: Request) -> CpuMemFacts:
    """Read ``/proc``, ``/sys`` and the control groups."""
    memory = parse_key_values(read_text("/proc/meminfo") or "")
    if "MemTotal" not in memory:
        raise ToolMissingError("/proc/meminfo cannot be read")
    rooms = list(_memory_rooms())
    available = min(
        (
            memory.get("MemAvailable", memory.get("MemFree", 0)),
            *(max(0, limit - used) for limit, used in rooms),
        )
    )
    return CpuMemFacts(
        cpus=len(os.sched_getaffinity(0)),
        cpu_quota=_cpu_quota(),
        cpu_model=cpu_model(),
        load_1min=os.getloadavg()[0],
        memory_total_bytes=memory["MemTotal"],
        memory_available_bytes=available,
        memory_limit_bytes=min((limit for limit, _ in rooms), default=None),
        edac_corrected=_edac("ce_count"),
        edac_uncorrected=_edac("ue_count"),
    )


def collect_boot(request: Request) -> BootFacts:
    """Read the boot id and the time since boot."""
    boot_id = read_text("/proc/sys/kernel/random/boot_id")
    if not boot_id:
        raise ToolMissingError("/proc/sys/kernel/random/boot_id cannot be read")
    return BootFacts(boot_id=boot_id.strip(), uptime_s=time.clock_gettime(time.CLOCK_BOOTTIME))
