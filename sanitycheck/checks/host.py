"""``host.*`` and ``env.*``: the machine itself."""

from __future__ import annotations

from typing import Any

from sanitycheck.facts.capabilities import CapabilitiesFacts
from sanitycheck.facts.disk import DiskFacts, VolumeFacts
from sanitycheck.facts.host import BootFacts, CpuMemFacts
from sanitycheck.facts.kernel import KernelFacts
from sanitycheck.facts.limits import LimitsFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import (
    DISK_FREE_NONE_BYTES,
    DISK_FREE_SHARE_SMALL,
    DISK_FREE_SMALL_BYTES,
    EDAC_CORRECTED_MANY,
    INODES_FREE_SHARE_SMALL,
    LOAD_PER_CPU_HIGH,
    MEMORY_AVAILABLE_SMALL_BYTES,
    NOFILE_SMALL,
    SHM_FREE_SMALL_BYTES,
    SHM_SMALL_BYTES,
    TASKS_LEFT_PER_WORKER,
)

__all__ = ["judge_boot", "judge_capabilities", "judge_cpu_mem", "judge_disk", "judge_kernel", "judge_limits"]


def judge_capabilities(facts: CapabilitiesFacts, options: Options) -> tuple[Finding, ...]:
    """Reports; nothing here is good or bad."""
    missing = ", ".join(sorted(name for name, seen in facts.sees.items() if not seen))
    found = {
        "hostname": facts.hostname,
        "container": facts.container or "none",
        "not_seen": missing or "nothing",
    }
    return (Finding(verdict=Verdict.PASS, reason=Reason.CAPABILITIES, facts=found),)


def judge_boot(facts: BootFacts, options: Options) -> tuple[Finding, ...]:
    """Records the boot; a boot since the last look is worth a warning."""
    found = {"boot_id": facts.boot_id, "uptime_s": round(facts.uptime_s, 1)}
    if options.known.last_boot_id is not None and options.known.last_boot_id != facts.boot_id:
        return (Finding(verdict=Verdict.WARN, reason=Reason.REBOOTED, facts=found),)
    return (Finding(verdict=Verdict.PASS, reason=Reason.BOOT, facts=found),)


def judge_cpu_mem(facts: CpuMemFacts, options: Options) -> tuple[Finding, ...]:
    """Few processors and little memory slow a training, uncorrected memory errors foretell its death."""
    usable = facts.cpus if facts.cpu_quota is None else min(float(facts.cpus), facts.cpu_quota)
    found: list[Finding] = []
    if usable < options.local_workers:
        named: dict[str, Any] = {"cpus": round(usable, 2), "workers": options.local_workers}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.CPUS_FEW, facts=named))
    if facts.memory_available_bytes < MEMORY_AVAILABLE_SMALL_BYTES:
        named = {
            "available_bytes": facts.memory_available_bytes,
            "total_bytes": facts.memory_total_bytes,
            "limit_bytes": facts.memory_limit_bytes,
        }
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.MEMORY_SMALL, facts=named))
    if facts.load_1min > LOAD_PER_CPU_HIGH * facts.cpus:
        named = {"load": round(facts.load_1min, 1), "cpus": facts.cpus}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.LOAD_HIGH, facts=named))
    if facts.edac_uncorrected:
        named = {"count": facts.edac_uncorrected}
        found.append(Finding(verdict=Verdict.FAIL, reason=Reason.MEMORY_ERRORS, facts=named))
    if (facts.edac_corrected or 0) > EDAC_CORRECTED_MANY:
        named = {"count": facts.edac_corrected, "limit": EDAC_CORRECTED_MANY}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.MEMORY_ERRORS_CORRECTED, facts=named))
    if not found:
        named = {
            "cpus": round(usable, 2),
            "cpu_model": facts.cpu_model,
            "available_bytes": facts.memory_available_bytes,
            "total_bytes": facts.memory_total_bytes,
        }
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.CPU_MEM, facts=named))
    return tuple(found)


def judge_limits(facts: LimitsFacts, options: Options) -> tuple[Finding, ...]:
    """Each low limit is named with what it breaks; none of them stops a training that does not need it."""
    found: list[Finding] = []
    if facts.nofile_soft is not None and facts.nofile_soft < NOFILE_SMALL:
        named: dict[str, Any] = {"soft": facts.nofile_soft, "hard": facts.nofile_hard, "wanted": NOFILE_SMALL}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.NOFILE_LOW, facts=named))
    if facts.rdma_devices and facts.memlock_soft_bytes is not None:
        named = {"soft_bytes": facts.memlock_soft_bytes, "rdma_devices": facts.rdma_devices}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.MEMLOCK_LOW, facts=named))
    if facts.shm_bytes is None:
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.SHM_MISSING, subject="/dev/shm"))
    elif facts.shm_bytes < SHM_SMALL_BYTES:
        named = {"size_bytes": facts.shm_bytes, "wanted_bytes": SHM_SMALL_BYTES}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.SHM_SMALL, subject="/dev/shm", facts=named))
    if facts.shm_bytes is not None and (facts.shm_free_bytes or 0) < SHM_FREE_SMALL_BYTES:
        named = {"free_bytes": facts.shm_free_bytes, "size_bytes": facts.shm_bytes}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.SHM_FULL, subject="/dev/shm", facts=named))
    wanted = TASKS_LEFT_PER_WORKER * options.local_workers
    if facts.tasks_left is not None and facts.tasks_left < wanted:
        named = {"left": facts.tasks_left, "wanted": wanted}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.TASKS_FEW, facts=named))
    if not found:
        named = {"nofile": facts.nofile_soft, "shm_bytes": facts.shm_bytes, "tasks_left": facts.tasks_left}
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.LIMITS, facts=named))
    return tuple(found)


def judge_disk(facts: DiskFacts, options: Options) -> tuple[Finding, ...]:
    """No folder for temporary files stops every launcher; all else is trouble to come."""
    found: list[Finding] = []
    if not facts.temp_found:
        found.append(Finding(verdict=Verdict.FAIL, reason=Reason.NO_TEMP_FOLDER, blocking=True))
    for volume in facts.volumes:
        found.extend(_judge_volume(volume))
    if not found:
        least = min(facts.volumes, key=lambda volume: volume.bytes_free, default=VolumeFacts())
        named: dict[str, Any] = {
            "path": least.path,
            "free_bytes": least.bytes_free,
            "volumes": len(facts.volumes),
        }
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.DISK, facts=named))
    return tuple(found)


def _judge_volume(volume: VolumeFacts) -> list[Finding]:
    found: list[Finding] = []
    where = {"path": volume.path, "used_for": volume.used_for}
    if volume.turned_read_only:
        found.append(
            Finding(verdict=Verdict.FAIL, reason=Reason.TURNED_READ_ONLY, subject=volume.path, facts=where)
        )
    elif volume.read_only and volume.used_for in ("temp", "checkpoints"):
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.READ_ONLY, subject=volume.path, facts=where))
    if volume.errors_count:
        named: dict[str, Any] = {**where, "count": volume.errors_count}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.FS_ERRORS, subject=volume.path, facts=named))
    if volume.read_only or volume.bytes_total == 0:
        return found  # an image or a pseudo file system: full by design
    named = {**where, "free_bytes": volume.bytes_free, "total_bytes": volume.bytes_total}
    share = volume.bytes_free / volume.bytes_total
    if volume.bytes_free < DISK_FREE_NONE_BYTES and share < DISK_FREE_SHARE_SMALL:
        found.append(Finding(verdict=Verdict.FAIL, reason=Reason.DISK_FULL, subject=volume.path, facts=named))
    elif volume.bytes_free < DISK_FREE_SMALL_BYTES and share < DISK_FREE_SHARE_SMALL:
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.DISK_LOW, subject=volume.path, facts=named))
    if volume.inodes and volume.inodes_free / volume.inodes < INODES_FREE_SHARE_SMALL:
        named = {**where, "free": volume.inodes_free, "total": volume.inodes}
        found.append(
            Finding(verdict=Verdict.WARN, reason=Reason.INODES_LOW, subject=volume.path, facts=named)
        )
    return found


_KERNEL_VERDICTS = {
    "machine_check": Verdict.FAIL,
    "machine_check_corrected": Verdict.WARN,
    "oom_kill": Verdict.WARN,
    "io_error": Verdict.WARN,
    "file_system": Verdict.WARN,
    "network_file_system": Verdict.WARN,
    "hung_task": Verdict.WARN,
}


def judge_kernel(facts: KernelFacts, options: Options) -> tuple[Finding, ...]:
    """The log may tell of other tenants of the machine, so that it never refuses a node."""
    found = [
        Finding(
            verdict=_KERNEL_VERDICTS.get(trouble.kind, Verdict.WARN),
            reason=Reason(f"kernel_{trouble.kind}"),
            facts={
                "count": trouble.count,
                "newest_age_s": round(trouble.newest_age_s, 1),
                "newest": trouble.newest,
            },
        )
        for trouble in facts.troubles
    ]
    if not found:
        named: dict[str, Any] = {"records": facts.records, "window_s": facts.window_s}
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.KERNEL, facts=named))
    return tuple(found)
