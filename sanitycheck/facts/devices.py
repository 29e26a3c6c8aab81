"""The state of NVIDIA devices, one question per check: ``gpu.recovery_action``, ``gpu.ecc``, ``gpu.remap``,
``gpu.throttle``, ``gpu.mig``, ``gpu.processes``.

Each facts class holds one record per device; its defaults are those of a healthy device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Any, TypeVar

from sanitycheck.facts.nvml import Device, Session, start_nvml, text_of
from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request

__all__ = [
    "EccDevice",
    "EccFacts",
    "MigDevice",
    "MigFacts",
    "Process",
    "ProcessDevice",
    "ProcessFacts",
    "RecoveryDevice",
    "RecoveryFacts",
    "RemapDevice",
    "RemapFacts",
    "ThrottleDevice",
    "ThrottleFacts",
    "collect_ecc",
    "collect_mig",
    "collect_processes",
    "collect_recovery",
    "collect_remap",
    "collect_throttle",
]

F = TypeVar("F")
PROCESSES_MAX = 64
ANCESTORS_MAX = 64
_THROTTLES = {
    0x0004: "sw_power_cap",
    0x0008: "hw_slowdown",
    0x0020: "sw_thermal_slowdown",
    0x0040: "hw_thermal_slowdown",
    0x0080: "hw_power_brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that slow a device down (NVML API reference)."""
_COMPUTE_MODES = {0: "default", 1: "exclusive_thread", 2: "prohibited", 3: "exclusive_process"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDevice(Device):
    """``action`` is the name of NVML's recovery action; ``CODE_n`` for a number this binding cannot name."""

    action: str = "NONE"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryFacts:
    """What the driver wants done with each device."""

    init_error: str = ""
    devices: tuple[RecoveryDevice, ...] = (RecoveryDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class EccDevice(Device):
    """Error counts; None where this device does not count.

    Attributes:
        volatile_uncorrected: Since the driver was loaded or the device reset.
        sram_uncorrected: Over the life of the board, in on-chip memory (parity and SEC-DED).
        sram_threshold_exceeded: The driver's own opinion of that count.
    """

    enabled: bool | None = True
    volatile_uncorrected: int | None = 0
    volatile_corrected: int | None = 0
    sram_uncorrected: int | None = 0
    sram_threshold_exceeded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EccFacts:
    """Memory errors of each device."""

    init_error: str = ""
    devices: tuple[EccDevice, ...] = (EccDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemapDevice(Device):
    """Row remapping of a device's memory."""

    remapped_uncorrected: int = 0
    remapped_corrected: int = 0
    pending: bool = False
    failed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RemapFacts:
    """Row remapping of each device."""

    init_error: str = ""
    devices: tuple[RemapDevice, ...] = (RemapDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleDevice(Device):
    """Why a device is slowed down now, and its temperature against the point at which it slows down."""

    reasons: tuple[str, ...] = ()
    temperature_c: int | None = 40
    slowdown_c: int | None = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class ThrottleFacts:
    """Slow-down of each device."""

    init_error: str = ""
    devices: tuple[ThrottleDevice, ...] = (ThrottleDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class MigDevice(Device):
    """Partitioning now and after the next reset."""

    current: bool = False
    pending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MigFacts:
    """Partitioning of each device."""

    init_error: str = ""
    devices: tuple[MigDevice, ...] = (MigDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that uses a device; ``ours`` when it descends from whoever asked for the check."""

    pid: int
    name: str = ""
    used_bytes: int | None = None
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDevice(Device):
    """Who computes on a device, and who may."""

    compute_mode: str = "default"
    processes: tuple[Process, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """Users of each device."""

    init_error: str = ""
    devices: tuple[ProcessDevice, ...] = (ProcessDevice(),)


Look = Callable[[Session[Any], Any, Any], Any]


def _collect(request: Request, kind: Callable[..., F], device: type[Any], look: Look) -> F:
    session, error = start_nvml(request)
    if session is None:
        return kind(init_error=error, devices=())
    found = session.devices(lambda handle, identity: look(session, handle, identity), device)
    return kind(devices=found)


def collect_recovery(request: Request) -> RecoveryFacts:
    """Read the recovery action and name it by the constants of the binding, never by number alone."""

    def look(session: Session[Any], handle: Any, identity: Any) -> RecoveryDevice:
        number, error = session.field(
            handle, getattr(session.nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", 230)
        )
        if number is None:
            return RecoveryDevice(**identity, refused=error)
        prefix = "NVML_GPU_RECOVERY_ACTION_"
        names = [
            name.removeprefix(prefix)
            for name in dir(session.nvml)
            if name.startswith(prefix) and getattr(session.nvml, name) == number
        ]
        known = names[0] if len(names) == 1 else f"CODE_{number}"
        return RecoveryDevice(**identity, action="NONE" if number == 0 else known)

    return _collect(request, RecoveryFacts, RecoveryDevice, look)


def collect_ecc(request: Request) -> EccFacts:
    """Read modes and counts; what a device does not count is None."""

    def look(session: Session[Any], handle: Any, identity: Any) -> EccDevice:
        nvml = session.nvml
        modes, error = session.ask("nvmlDeviceGetEccMode", handle)
        if error:
            return EccDevice(**identity, refused=error)
        if not modes[0]:
            return EccDevice(**identity, enabled=False)

        def total(kind: int) -> int | None:
            count = session.ask("nvmlDeviceGetTotalEccErrors", handle, kind, nvml.NVML_VOLATILE_ECC)[0]
            return None if count is None else int(count)

        sram, exceeded = None, False
        if hasattr(nvml, "c_nvmlEccSramErrorStatus_v1_t"):
            status = nvml.c_nvmlEccSramErrorStatus_v1_t()
            _, error = session.ask("nvmlDeviceGetSramEccErrorStatus", handle, byref(status))
            if not error:  # an older driver answers with an argument error: then it does not count
                sram = int(status.aggregateUncParity + status.aggregateUncSecDed)
                exceeded = bool(status.bThresholdExceeded)
        return EccDevice(
            **identity,
            volatile_uncorrected=total(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            volatile_corrected=total(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            sram_uncorrected=sram,
            sram_threshold_exceeded=exceeded,
        )

    return _collect(request, EccFacts, EccDevice, look)


def collect_remap(request: Request) -> RemapFacts:
    """Read the row remapper."""

    def look(session: Session[Any], handle: Any, identity: Any) -> RemapDevice:
        rows, error = session.ask("nvmlDeviceGetRemappedRows", handle)
        if error:
            return RemapDevice(**identity, refused=error)
        corrected, uncorrected, pending, failed = (int(value) for value in rows)
        return RemapDevice(
            **identity,
            remapped_corrected=corrected,
            remapped_uncorrected=uncorrected,
            pending=bool(pending),
            failed=bool(failed),
        )

    return _collect(request, RemapFacts, RemapDevice, look)


def collect_throttle(request: Request) -> ThrottleFacts:
    """Read why clocks are low, the temperature and the temperature that slows the device down."""

    def look(session: Session[Any], handle: Any, identity: Any) -> ThrottleDevice:
        nvml = session.nvml
        bits, error = session.ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
        if error == "NOT_SUPPORTED":
            bits, error = session.ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        if error:
            return ThrottleDevice(**identity, refused=error)
        return ThrottleDevice(
            **identity,
            reasons=tuple(name for bit, name in _THROTTLES.items() if bits & bit),
            temperature_c=session.ask("nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU)[0],
            slowdown_c=session.ask(
                "nvmlDeviceGetTemperatureThreshold", handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
            )[0],
        )

    return _collect(request, ThrottleFacts, ThrottleDevice, look)


def collect_mig(request: Request) -> MigFacts:
    """Read the partitioning mode."""

    def look(session: Session[Any], handle: Any, identity: Any) -> MigDevice:
        modes, error = session.ask("nvmlDeviceGetMigMode", handle)
        if error:
            return MigDevice(**identity, refused=error)
        return MigDevice(**identity, current=bool(modes[0]), pending=bool(modes[1]))

    return _collect(request, MigFacts, MigDevice, look)


def _descends(pid: int, ancestor: int) -> bool:
    """Whether a process is, or comes from, another one, by parents."""
    for _ in range(ANCESTORS_MAX):
        if pid == ancestor:
            return True
        stat = read_text(f"/proc/{pid}/stat") or ""
        fields = stat.rpartition(")")[2].split()
        if len(fields) < 2 or not fields[1].isdigit() or int(fields[1]) <= 1:
            return False
        pid = int(fields[1])
    return False


def collect_processes(request: Request) -> ProcessFacts:
    """List who computes on each device. Nobody is touched."""
    caller = os.getppid()

    def look(session: Session[Any], handle: Any, identity: Any) -> ProcessDevice:
        mode, _ = session.ask("nvmlDeviceGetComputeMode", handle)
        running, error = session.ask("nvmlDeviceGetComputeRunningProcesses", handle)
        if error == "NOT_SUPPORTED":  # an older driver knows an older version of it alone
            running, error = session.ask("nvmlDeviceGetComputeRunningProcesses_v2", handle)
        if error:
            return ProcessDevice(**identity, refused=error)
        processes = []
        for item in running[:PROCESSES_MAX]:
            name, _ = session.ask("nvmlSystemGetProcessName", item.pid)
            processes.append(
                Process(
                    pid=int(item.pid),
                    name=os.path.basename(text_of(name or ""))[:60],
                    used_bytes=None if item.usedGpuMemory is None else int(item.usedGpuMemory),
                    ours=_descends(int(item.pid), caller),
                )
            )
        return ProcessDevice(
            **identity, compute_mode=_COMPUTE_MODES.get(mode, "default"), processes=tuple(processes)
        )

    return _collect(request, ProcessFacts, ProcessDevice, look)
