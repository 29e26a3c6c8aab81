"""``link.*``: NVLink, fabric and PCIe, with what is normal for a model taken from the table of models."""

from __future__ import annotations

import math
from typing import Any

from sanitycheck.checks.devices import over_devices, subject_of
from sanitycheck.facts.links import (
    AerDevice,
    AerFacts,
    FabricDevice,
    FabricFacts,
    NvlinkDevice,
    NvlinkFacts,
    PcieDevice,
    PcieFacts,
)
from sanitycheck.knowledge.specs import replay_expected_per_min, spec_of
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import AER_CORRECTED_FACTOR, AER_WINDOW_MIN_S

__all__ = ["judge_aer", "judge_fabric", "judge_nvlink", "judge_pcie"]


def _finding(verdict: Verdict, reason: Reason, device: Any, facts: dict[str, Any]) -> Finding:
    return Finding(verdict=verdict, reason=reason, subject=subject_of(device), facts=facts)


def judge_nvlink(facts: NvlinkFacts, options: Options) -> tuple[Finding, ...]:
    """All links of a board with NVSwitches must be up; on a part that is bridged, none is healthy too. An
    unknown model is compared with its siblings only."""
    actives = {device.active for device in facts.devices if not device.error}

    def one(device: NvlinkDevice) -> list[Finding]:
        found: list[Finding] = []
        spec = spec_of(device.name)
        named: dict[str, Any] = {"active": device.active, "inactive": device.inactive}
        if spec is None:
            siblings = max(actives, default=0)
            if device.active < siblings:
                named["expected"] = siblings
                found.append(_finding(Verdict.FAIL, Reason.NVLINK_DOWN, device, named))
            elif device.inactive:
                found.append(
                    _finding(Verdict.UNKNOWN, Reason.GPU_MODEL_UNKNOWN, device, {"model": device.name})
                )
        elif spec.nvlinks and device.active < spec.nvlinks:
            named["expected"] = spec.nvlinks
            alone = device.active == 0 and (spec.bridged or len(facts.devices) == 1)
            partly = device.active > 0 and spec.bridged and len(actives) == 1
            if not alone and not partly:
                found.append(_finding(Verdict.FAIL, Reason.NVLINK_DOWN, device, named))
        if device.recoveries or device.replays:
            named = {"recoveries": device.recoveries, "replays": device.replays}
            found.append(_finding(Verdict.WARN, Reason.NVLINK_ERRORS, device, named))
        return found

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    if found:
        return tuple(found)
    if max(actives, default=0) == 0:
        return (
            Finding(verdict=Verdict.PASS, reason=Reason.NVLINK_NONE, facts={"count": len(facts.devices)}),
        )
    named = {"count": len(facts.devices), "active": max(actives)}
    return (Finding(verdict=Verdict.PASS, reason=Reason.NVLINK_UP, facts=named),)


def judge_fabric(facts: FabricFacts, options: Options) -> tuple[Finding, ...]:
    """Joined means completed with success; on a multi-node fabric also a clique and a cluster, without which
    jobs over several nodes find "insufficient resources"."""

    def one(device: FabricDevice) -> list[Finding]:
        named: dict[str, Any] = {"state": device.state, "status": device.status}
        if device.state == "not_supported":
            return [_finding(Verdict.SKIPPED, Reason.NOT_SUPPORTED, device, {})]
        if device.state == "in_progress":
            return [_finding(Verdict.UNKNOWN, Reason.FABRIC_JOINING, device, named)]
        if device.state != "completed" or device.status != "SUCCESS":
            return [_finding(Verdict.FAIL, Reason.FABRIC_NOT_JOINED, device, named)]
        spec = spec_of(device.name)
        if spec is not None and spec.id.startswith("gb") and not (device.clique and device.cluster):
            return [_finding(Verdict.FAIL, Reason.FABRIC_NO_CLIQUE, device, {"clique": device.clique})]
        return []

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    return tuple(found) or (
        Finding(verdict=Verdict.PASS, reason=Reason.FABRIC_JOINED, facts={"count": len(facts.devices)}),
    )


def judge_pcie(facts: PcieFacts, options: Options) -> tuple[Finding, ...]:
    """Width always, generation only under load, both against the least of card and way."""
    idle = []

    def one(device: PcieDevice) -> list[Finding]:
        spec = spec_of(device.name)
        if spec is not None and spec.chip_link:
            return [_finding(Verdict.SKIPPED, Reason.NOT_SUPPORTED, device, {})]
        found = []
        width = min((w for w in (device.card_width, device.path_width) if w), default=0)
        generation = min((g for g in (device.card_generation, device.path_generation) if g), default=0)
        if device.width and device.width < width:
            named: dict[str, Any] = {"width": device.width, "expected": width}
            found.append(_finding(Verdict.FAIL, Reason.PCIE_NARROW, device, named))
        if device.generation < generation:
            if device.loaded:
                named = {"generation": device.generation, "expected": generation}
                found.append(_finding(Verdict.FAIL, Reason.PCIE_SLOW, device, named))
            else:
                idle.append(device)
        return found

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    if found:
        return tuple(found)
    if idle:
        named = {"generation": idle[0].generation, "width": idle[0].width}
        return (Finding(verdict=Verdict.PASS, reason=Reason.PCIE_IDLE, facts=named),)
    first = facts.devices[0]
    named = {"count": len(facts.devices), "generation": first.generation, "width": first.width}
    return (Finding(verdict=Verdict.PASS, reason=Reason.PCIE_FULL, facts=named),)


def judge_aer(facts: AerFacts, options: Options) -> tuple[Finding, ...]:
    """Corrected errors are normal up to a rate that grows with speed and lanes: fixed limits made people
    replace good nodes. The others are not normal."""
    minutes = max(facts.uptime_s, AER_WINDOW_MIN_S) / 60.0

    def one(device: AerDevice) -> list[Finding]:
        if device.corrected is None and device.fatal is None and device.nonfatal is None:
            return [_finding(Verdict.SKIPPED, Reason.AER_NOT_COUNTED, device, {})]
        found = []
        if device.fatal:
            found.append(_finding(Verdict.FAIL, Reason.AER_FATAL, device, {"count": device.fatal}))
        if device.nonfatal:
            found.append(_finding(Verdict.WARN, Reason.AER_NONFATAL, device, {"count": device.nonfatal}))
        usual = replay_expected_per_min(device.generation, width=device.width)
        limit = math.ceil(usual * minutes * AER_CORRECTED_FACTOR)
        if (device.corrected or 0) > limit:
            named = {"count": device.corrected, "limit": limit}
            found.append(_finding(Verdict.WARN, Reason.AER_CORRECTED, device, named))
        return found

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    corrected = sum(device.corrected or 0 for device in facts.devices)
    return tuple(found) or (
        Finding(
            verdict=Verdict.PASS,
            reason=Reason.AER_CLEAN,
            facts={"count": len(facts.devices), "corrected": corrected},
        ),
    )
