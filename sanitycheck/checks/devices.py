"""``gpu.*`` beyond the inventory: what each device says of its own state.

Device errors are judged in one place (:func:`over_devices`): a driver that names broken hardware fails, "not
supported" is skipped, what keeps us from looking is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sanitycheck.checks.gpu import ABSENT, of_error
from sanitycheck.facts.devices import (
    EccDevice,
    EccFacts,
    MigDevice,
    MigFacts,
    ProcessDevice,
    ProcessFacts,
    RecoveryDevice,
    RecoveryFacts,
    RemapDevice,
    RemapFacts,
    ThrottleDevice,
    ThrottleFacts,
)
from sanitycheck.facts.nvml import Device
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import ECC_SRAM_MAX

__all__ = [
    "DEVICE_REASONS",
    "judge_ecc",
    "judge_mig",
    "judge_processes",
    "judge_recovery",
    "judge_remap",
    "judge_throttle",
    "over_devices",
    "subject_of",
]

DEVICE_REASONS = (
    Reason.GPU_NOT_EXPECTED,
    Reason.GPU_NONE,
    Reason.GPU_HARDWARE,
    Reason.GPU_NOT_PERMITTED,
    Reason.DRIVER_MISMATCH,
    Reason.NVML_UNKNOWN_ERROR,
    Reason.NVML_ERROR,
    Reason.NOT_SUPPORTED,
)
"""What every check of devices may say before it comes to its own question."""

_RECOVERY = {
    "NONE": (Verdict.PASS, Reason.RECOVERY_NONE, False),
    "GPU_RESET": (Verdict.FAIL, Reason.RECOVERY_RESET, True),
    "BUS_RESET": (Verdict.FAIL, Reason.RECOVERY_RESET, True),
    "NODE_REBOOT": (Verdict.FAIL, Reason.RECOVERY_REBOOT, True),
    "SYSTEM_REBOOT": (Verdict.FAIL, Reason.RECOVERY_REBOOT, True),
    "DRAIN_P2P": (Verdict.FAIL, Reason.RECOVERY_DRAIN, False),
    "DRAIN_AND_RESET": (Verdict.WARN, Reason.RECOVERY_DRAIN, False),
}
_HARDWARE_THROTTLES = frozenset(("hw_slowdown", "hw_thermal_slowdown", "hw_power_brake"))


def subject_of(device: Device) -> str:
    """``gpu:GPU-1a2b``, by index where the device could not tell its UUID."""
    return f"gpu:{device.uuid or device.index}"


def over_devices(
    devices: Sequence[Any], options: Options, *, init_error: str, judge: Callable[[Any], list[Finding]]
) -> list[Finding]:
    """The findings of every device, with NVML's own errors judged as everywhere; never empty without
    devices."""
    expected = options.expect_gpus
    if init_error in ABSENT or (not init_error and not devices):
        named: dict[str, Any] = {"error": init_error or "no device"}
        if expected:
            named |= {"expected": expected, "found": 0}
            return [Finding(verdict=Verdict.FAIL, reason=Reason.GPU_NONE, facts=named)]
        return [Finding(verdict=Verdict.SKIPPED, reason=Reason.GPU_NOT_EXPECTED, facts=named)]
    if init_error:
        return [of_error(init_error, subject="")]
    found: list[Finding] = []
    for device in devices:
        problem = device.error or device.refused
        if problem == "NOT_SUPPORTED":
            found.append(
                Finding(verdict=Verdict.SKIPPED, reason=Reason.NOT_SUPPORTED, subject=subject_of(device))
            )
        elif problem:
            found.append(of_error(problem, subject=subject_of(device)))
        else:
            found.extend(judge(device))
    return found


def _or_pass(found: list[Finding], reason: Reason, **facts: Any) -> tuple[Finding, ...]:
    return tuple(found) or (Finding(verdict=Verdict.PASS, reason=reason, facts=facts),)


def judge_recovery(facts: RecoveryFacts, options: Options) -> tuple[Finding, ...]:
    """By the name of the action. The driver says itself that nothing runs there before a reset or reboot, so
    those block; an action that this version does not know is unknown."""

    def one(device: RecoveryDevice) -> list[Finding]:
        unknown = (Verdict.UNKNOWN, Reason.RECOVERY_UNKNOWN, False)
        verdict, reason, blocking = _RECOVERY.get(device.action, unknown)
        if verdict is Verdict.PASS:
            return []
        named = {"action": device.action}
        return [
            Finding(
                verdict=verdict, reason=reason, subject=subject_of(device), facts=named, blocking=blocking
            )
        ]

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    return _or_pass(found, Reason.RECOVERY_NONE, count=len(facts.devices))


def judge_ecc(facts: EccFacts, options: Options) -> tuple[Finding, ...]:
    """Uncorrected errors since the last load fail; counts over the board's life only above the vendor's
    limit, since they never go back to zero."""

    def one(device: EccDevice) -> list[Finding]:
        subject = subject_of(device)
        if device.enabled is False:
            return [Finding(verdict=Verdict.SKIPPED, reason=Reason.ECC_OFF, subject=subject)]
        found = []
        if device.volatile_uncorrected:
            named: dict[str, Any] = {"count": device.volatile_uncorrected}
            found.append(
                Finding(verdict=Verdict.FAIL, reason=Reason.ECC_UNCORRECTED, subject=subject, facts=named)
            )
        if device.sram_threshold_exceeded or (device.sram_uncorrected or 0) > ECC_SRAM_MAX:
            named = {"count": device.sram_uncorrected, "limit": ECC_SRAM_MAX}
            found.append(Finding(verdict=Verdict.FAIL, reason=Reason.ECC_SRAM, subject=subject, facts=named))
        return found

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    corrected = sum(device.volatile_corrected or 0 for device in facts.devices)
    return _or_pass(found, Reason.ECC_CLEAN, count=len(facts.devices), corrected=corrected)


def judge_remap(facts: RemapFacts, options: Options) -> tuple[Finding, ...]:
    """A failed remap means a new board, a pending one a reset at the next idle moment."""

    def one(device: RemapDevice) -> list[Finding]:
        named = {"rows": device.remapped_uncorrected + device.remapped_corrected}
        reasons = [(device.failed, Reason.REMAP_FAILED), (device.pending, Reason.REMAP_PENDING)]
        return [
            Finding(verdict=Verdict.FAIL, reason=reason, subject=subject_of(device), facts=named)
            for holds, reason in reasons
            if holds
        ]

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    rows = sum(device.remapped_uncorrected + device.remapped_corrected for device in facts.devices)
    return _or_pass(found, Reason.REMAP_CLEAN, count=len(facts.devices), rows=rows)


def judge_throttle(facts: ThrottleFacts, options: Options) -> tuple[Finding, ...]:
    """A slow-down by hardware fails, one by software for heat warns; the power cap under load is normal."""

    def one(device: ThrottleDevice) -> list[Finding]:
        found = []
        subject = subject_of(device)
        hardware = [reason for reason in device.reasons if reason in _HARDWARE_THROTTLES]
        named: dict[str, Any] = {"why": ", ".join(hardware), "temperature_c": device.temperature_c}
        if hardware:
            found.append(
                Finding(verdict=Verdict.FAIL, reason=Reason.THROTTLE_HARDWARE, subject=subject, facts=named)
            )
        elif "sw_thermal_slowdown" in device.reasons:
            named["why"] = "sw_thermal_slowdown"
            found.append(
                Finding(verdict=Verdict.WARN, reason=Reason.THROTTLE_THERMAL, subject=subject, facts=named)
            )
        if (
            device.temperature_c is not None
            and device.slowdown_c
            and device.temperature_c >= device.slowdown_c
        ):
            named = {"temperature_c": device.temperature_c, "limit_c": device.slowdown_c}
            found.append(
                Finding(verdict=Verdict.FAIL, reason=Reason.TEMPERATURE_HIGH, subject=subject, facts=named)
            )
        return found

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    hottest = max((device.temperature_c or 0 for device in facts.devices), default=0)
    return _or_pass(found, Reason.THROTTLE_NONE, count=len(facts.devices), temperature_c=hottest)


def judge_mig(facts: MigFacts, options: Options) -> tuple[Finding, ...]:
    """Fails only against what somebody said; otherwise a partitioned device is worth a warning, since
    collectives between parts of one device do not work."""
    wanted = options.known.mig

    def one(device: MigDevice) -> list[Finding]:
        found = []
        named: dict[str, Any] = {"mode": "on" if device.current else "off"}
        if device.current != bool(wanted):
            verdict = Verdict.WARN if wanted is None else Verdict.FAIL
            found.append(
                Finding(
                    verdict=verdict, reason=Reason.MIG_NOT_EXPECTED, subject=subject_of(device), facts=named
                )
            )
        if device.pending != device.current:
            named = {**named, "pending": "on" if device.pending else "off"}
            found.append(
                Finding(
                    verdict=Verdict.WARN, reason=Reason.MIG_PENDING, subject=subject_of(device), facts=named
                )
            )
        return found

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    return _or_pass(found, Reason.MIG_AS_EXPECTED, mode="on" if wanted else "off", count=len(facts.devices))


def judge_processes(facts: ProcessFacts, options: Options) -> tuple[Finding, ...]:
    """Somebody else on a device fails the check; it blocks only where the device takes nobody beside them."""

    def one(device: ProcessDevice) -> list[Finding]:
        found = []
        subject = subject_of(device)
        others = [process for process in device.processes if not process.ours]
        exclusive = device.compute_mode.startswith("exclusive")
        named: dict[str, Any] = {"mode": device.compute_mode}
        if device.compute_mode == "prohibited":
            found.append(
                Finding(
                    verdict=Verdict.FAIL,
                    reason=Reason.GPU_PROHIBITED,
                    subject=subject,
                    facts=named,
                    blocking=True,
                )
            )
        if others:
            who = ", ".join(f"{one.name or 'process'} (pid {one.pid})" for one in others[:4])
            busy = {
                "count": len(others),
                "who": who,
                "used_bytes": sum(one.used_bytes or 0 for one in others),
            }
            found.append(
                Finding(
                    verdict=Verdict.FAIL,
                    reason=Reason.GPU_BUSY,
                    subject=subject,
                    facts=busy,
                    blocking=exclusive,
                )
            )
        elif exclusive:
            found.append(
                Finding(verdict=Verdict.WARN, reason=Reason.GPU_EXCLUSIVE, subject=subject, facts=named)
            )
        return found

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    return _or_pass(found, Reason.GPU_FREE, count=len(facts.devices))
