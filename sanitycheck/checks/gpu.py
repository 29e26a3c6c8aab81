"""``gpu.*``: NVIDIA devices."""

from __future__ import annotations

from typing import Any

from sanitycheck.facts.gpu import DeviceFacts, GpuFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict

__all__ = ["ABSENT", "judge_inventory", "of_error"]

ABSENT = frozenset(("LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "NO_DATA", "NOT_FOUND"))
_HARDWARE = frozenset(
    (
        "GPU_IS_LOST",
        "RESET_REQUIRED",
        "INSUFFICIENT_POWER",
        "IRQ_ISSUE",
        "CORRUPTED_INFOROM",
        "TIMEOUT",
        "GPU_NOT_FOUND",
    )
)
_PERMISSION = frozenset(("NO_PERMISSION", "OPERATING_SYSTEM"))
"""NVML names an operating-system block of a call by the second (a container without the devices)."""


def of_error(error: str, *, subject: str) -> Finding:
    """A finding from the name of an NVML error: broken hardware fails, what only keeps us from looking is
    unknown."""
    named: dict[str, Any] = {"error": error}
    if error in _HARDWARE:
        return Finding(verdict=Verdict.FAIL, reason=Reason.GPU_HARDWARE, subject=subject, facts=named)
    if error == "LIB_RM_VERSION_MISMATCH":
        return Finding(verdict=Verdict.FAIL, reason=Reason.DRIVER_MISMATCH, subject=subject, facts=named)
    if error in _PERMISSION:
        return Finding(verdict=Verdict.UNKNOWN, reason=Reason.GPU_NOT_PERMITTED, subject=subject, facts=named)
    if error == "UNKNOWN":
        return Finding(
            verdict=Verdict.UNKNOWN, reason=Reason.NVML_UNKNOWN_ERROR, subject=subject, facts=named
        )
    return Finding(verdict=Verdict.UNKNOWN, reason=Reason.NVML_ERROR, subject=subject, facts=named)


def _without_nvml(facts: GpuFacts, options: Options) -> tuple[Finding, ...]:
    expected = options.expect_gpus
    if facts.init_error in ABSENT:
        if expected:
            named: dict[str, Any] = {"expected": expected, "found": 0, "error": facts.init_error}
            return (Finding(verdict=Verdict.FAIL, reason=Reason.GPU_NONE, facts=named, blocking=True),)
        return (
            Finding(
                verdict=Verdict.SKIPPED, reason=Reason.GPU_NOT_EXPECTED, facts={"error": facts.init_error}
            ),
        )
    finding = of_error(facts.init_error, subject="")
    if expected is None and not facts.pci_devices and finding.verdict is Verdict.UNKNOWN:
        # A driver's library without a device behind it, as in images built for both kinds of node.
        return (
            Finding(
                verdict=Verdict.SKIPPED, reason=Reason.GPU_NOT_EXPECTED, facts={"error": facts.init_error}
            ),
        )
    return (finding,)


def judge_inventory(facts: GpuFacts, options: Options) -> tuple[Finding, ...]:
    """Blocking only where the caller said how many devices there must be and there are fewer."""
    if facts.init_error:
        return _without_nvml(facts, options)
    expected = options.expect_gpus
    healthy = [device for device in facts.devices if not device.error]
    found = [of_error(device.error, subject=_subject(device)) for device in facts.devices if device.error]
    if expected is not None and len(healthy) < expected:
        # A device that only could not be asked may work: fewer is certain only without those.
        unasked = sum(finding.verdict is Verdict.UNKNOWN for finding in found)
        certain = len(healthy) + unasked < expected
        named: dict[str, Any] = {"expected": expected, "found": len(healthy), "not_asked": unasked}
        verdict = Verdict.FAIL if certain else Verdict.UNKNOWN
        found.append(Finding(verdict=verdict, reason=Reason.GPU_MISSING, facts=named, blocking=certain))
    if expected is not None and len(facts.devices) > expected:
        named = {"expected": expected, "found": len(facts.devices)}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.GPU_EXTRA, facts=named))
    if expected is not None and facts.visible is not None and facts.visible < expected:
        named = {"expected": expected, "visible": facts.visible}
        found.append(Finding(verdict=Verdict.FAIL, reason=Reason.GPU_HIDDEN, facts=named, blocking=True))
    if len({device.name for device in healthy}) > 1:
        named = {"models": ", ".join(sorted({device.name for device in healthy}))}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.GPU_MIXED, facts=named))
    if not facts.devices and expected is None:
        return (
            Finding(verdict=Verdict.SKIPPED, reason=Reason.GPU_NOT_EXPECTED, facts={"error": "no device"}),
        )
    if not found:
        named = {
            "count": len(healthy),
            "model": healthy[0].name if healthy else "none",
            "driver": facts.driver,
        }
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.GPU_INVENTORY, facts=named))
    return tuple(found)


def _subject(device: DeviceFacts) -> str:
    return f"gpu:{device.uuid or device.index}"
