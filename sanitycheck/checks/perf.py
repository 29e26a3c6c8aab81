"""``gpu.context``, ``perf.*``, ``mem.pattern`` and ``deep.*``: what devices really do.

A rate is judged by its best pass against what the model reaches (``gpu_specs.yaml``), and against the other
devices of the node. An unknown model gets *unknown* for the absolute part, and is still compared with its
siblings and with this node's own record.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sanitycheck.checks.baseline import best_of
from sanitycheck.checks.devices import over_devices, subject_of
from sanitycheck.facts.cuda import (
    ContextDevice,
    ContextFacts,
    MeasuredDevice,
    MeasuredFacts,
    PairsFacts,
    PatternDevice,
    PatternFacts,
)
from sanitycheck.facts.dcgm import DcgmFacts
from sanitycheck.knowledge.specs import GpuSpec, spec_of
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import (
    GPU_COPY_FAIL_SHARE,
    GPU_FAIL_SHARE,
    GPU_MEMORY_FAIL_SHARE,
    GPU_MEMORY_WARN_SHARE,
    GPU_SPREAD_MAX,
    GPU_WARN_SHARE,
    PATTERN_SHARE_MIN,
    SUSTAIN_DROP_MAX,
)

__all__ = ["judge_context", "judge_dcgm", "judge_measured", "judge_p2p", "judge_pattern", "judge_sustained"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Metric:
    """How a metric is judged: its reference, the shares below which it warns and fails, its spread."""

    unit: str
    reference: Callable[[GpuSpec], float | None]
    warn_share: float
    fail_share: float
    spread_max: float


_METRICS = {
    "gemm_tflops": _Metric(
        unit="TFLOP/s",
        reference=lambda spec: spec.gemm_tflops,
        warn_share=GPU_WARN_SHARE,
        fail_share=GPU_FAIL_SHARE,
        spread_max=GPU_SPREAD_MAX,
    ),
    "memory_gb_s": _Metric(
        unit="GB/s",
        reference=lambda spec: spec.memory_gb_s,
        warn_share=GPU_MEMORY_WARN_SHARE,
        fail_share=GPU_MEMORY_FAIL_SHARE,
        spread_max=GPU_SPREAD_MAX,
    ),
    "h2d_gb_s": _Metric(
        unit="GB/s",
        reference=lambda spec: spec.h2d_gb_s,
        warn_share=GPU_COPY_FAIL_SHARE,
        fail_share=GPU_COPY_FAIL_SHARE,
        spread_max=2 * GPU_SPREAD_MAX,
    ),
}
_METRICS["d2h_gb_s"] = _METRICS["h2d_gb_s"]


def _broken(device: Any) -> list[Finding]:
    named = {"problem": device.problem}
    return [Finding(verdict=Verdict.FAIL, reason=Reason.PERF_BROKEN, subject=subject_of(device), facts=named)]


def judge_context(facts: ContextFacts, options: Options) -> tuple[Finding, ...]:
    """A device on which nothing can start blocks, and so does one that gives back other bytes."""

    def one(device: ContextDevice) -> list[Finding]:
        subject = subject_of(device)
        if device.problem:
            return [
                Finding(
                    verdict=Verdict.FAIL,
                    reason=Reason.CONTEXT_FAILED,
                    subject=subject,
                    facts={"problem": device.problem},
                    blocking=True,
                )
            ]
        if device.wrong_bytes:
            return [
                Finding(
                    verdict=Verdict.FAIL,
                    reason=Reason.CONTEXT_WRONG,
                    subject=subject,
                    facts={"count": device.wrong_bytes},
                    blocking=True,
                )
            ]
        return []

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    slowest = max((device.took_s for device in facts.devices), default=0.0)
    return tuple(found) or (
        Finding(
            verdict=Verdict.PASS,
            reason=Reason.CONTEXT_MADE,
            facts={"count": len(facts.devices), "took_s": slowest},
        ),
    )


def judge_measured(facts: MeasuredFacts, options: Options) -> tuple[Finding, ...]:
    """Each device against its model, then against the median of its siblings."""
    metric = _METRICS[facts.metric]
    rates = {device.index: best_of(device.values) for device in facts.devices if device.values}
    median = statistics.median(rates.values()) if rates else 0.0

    def one(device: MeasuredDevice) -> list[Finding]:
        if device.problem or not device.values:
            return _broken(device)
        rate = rates[device.index]
        spec = spec_of(device.name)
        reference = metric.reference(spec) if spec is not None else None
        named: dict[str, Any] = {"rate": rate, "unit": metric.unit}
        if reference and rate < metric.warn_share * reference:
            share = rate / reference
            named |= {"expected": reference, "share": round(share, 3)}
            verdict = Verdict.FAIL if share < metric.fail_share else Verdict.WARN
            return [
                Finding(verdict=verdict, reason=Reason.PERF_SLOW, subject=subject_of(device), facts=named)
            ]
        if rate < (1.0 - metric.spread_max) * median:
            named |= {"expected": median, "share": round(rate / median, 3)}
            return [
                Finding(
                    verdict=Verdict.WARN, reason=Reason.PERF_SPREAD, subject=subject_of(device), facts=named
                )
            ]
        if not reference:
            return [
                Finding(
                    verdict=Verdict.UNKNOWN,
                    reason=Reason.GPU_MODEL_UNKNOWN,
                    subject=subject_of(device),
                    facts={"model": device.name or "unnamed", "rate": rate, "unit": metric.unit},
                )
            ]
        return []

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    if found:
        return tuple(found)
    named = {"rate": min(rates.values()), "unit": metric.unit, "count": len(rates)}
    return (Finding(verdict=Verdict.PASS, reason=Reason.PERF_MEASURED, facts=named),)


def judge_p2p(facts: PairsFacts, options: Options) -> tuple[Finding, ...]:
    """Direct copies against the model's NVLinks; copies through the host against each other only."""
    if facts.count == 1 and not facts.init_error:
        return (Finding(verdict=Verdict.SKIPPED, reason=Reason.PERF_ONE_DEVICE),)
    if facts.init_error or not facts.pairs:
        return tuple(over_devices((), options, init_error=facts.init_error, judge=lambda _: []))
    spec = spec_of(facts.name)
    linked = spec.nvlink_gb_s if spec is not None and not spec.bridged else None
    median = statistics.median([pair.gb_s for pair in facts.pairs if not pair.problem] or [0.0])
    found = []
    for pair in facts.pairs:
        subject = f"pair:{pair.source}->{pair.target}"
        reference = linked if linked and pair.direct else median
        if pair.problem:
            named: dict[str, Any] = {"problem": pair.problem}
            found.append(
                Finding(verdict=Verdict.FAIL, reason=Reason.PERF_BROKEN, subject=subject, facts=named)
            )
        elif pair.gb_s < GPU_COPY_FAIL_SHARE * reference:
            share = round(pair.gb_s / reference, 3)
            named = {"rate": pair.gb_s, "unit": "GB/s", "expected": reference, "share": share}
            found.append(Finding(verdict=Verdict.FAIL, reason=Reason.PERF_SLOW, subject=subject, facts=named))
    if found:
        return tuple(found)
    named = {"rate": min(pair.gb_s for pair in facts.pairs), "unit": "GB/s", "count": facts.count}
    return (Finding(verdict=Verdict.PASS, reason=Reason.PERF_MEASURED, facts=named),)


def judge_pattern(facts: PatternFacts, options: Options) -> tuple[Finding, ...]:
    """One wrong byte blocks."""

    def one(device: PatternDevice) -> list[Finding]:
        subject = subject_of(device)
        if device.problem:
            return _broken(device)
        if device.wrong_bytes:
            named: dict[str, Any] = {"count": device.wrong_bytes, "tested_bytes": device.tested_bytes}
            return [
                Finding(
                    verdict=Verdict.FAIL,
                    reason=Reason.MEMORY_PATTERN_WRONG,
                    subject=subject,
                    facts=named,
                    blocking=True,
                )
            ]
        if device.tested_bytes < PATTERN_SHARE_MIN * device.free_bytes:
            named = {"tested_bytes": device.tested_bytes, "free_bytes": device.free_bytes}
            return [
                Finding(
                    verdict=Verdict.UNKNOWN, reason=Reason.MEMORY_PATTERN_PART, subject=subject, facts=named
                )
            ]
        return []

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    tested = min((device.tested_bytes for device in facts.devices), default=0)
    return tuple(found) or (
        Finding(
            verdict=Verdict.PASS,
            reason=Reason.MEMORY_PATTERN,
            facts={"count": len(facts.devices), "tested_bytes": tested},
        ),
    )


def judge_sustained(facts: MeasuredFacts, options: Options) -> tuple[Finding, ...]:
    """The rate at the end against that of the beginning, both as medians over a third of the slices."""

    def one(device: MeasuredDevice) -> list[Finding]:
        if device.problem or not device.values:
            return _broken(device)
        third = max(1, len(device.values) // 3)
        early, late = (statistics.median(part) for part in (device.values[:third], device.values[-third:]))
        if late >= (1.0 - SUSTAIN_DROP_MAX) * early:
            return []
        named = {"early": early, "late": late, "share": round(late / early, 3)}
        return [
            Finding(
                verdict=Verdict.FAIL, reason=Reason.SUSTAINED_DROP, subject=subject_of(device), facts=named
            )
        ]

    found = over_devices(facts.devices, options, init_error=facts.init_error, judge=one)
    lowest = min((min(device.values) for device in facts.devices if device.values), default=0.0)
    return tuple(found) or (
        Finding(
            verdict=Verdict.PASS,
            reason=Reason.SUSTAINED,
            facts={"count": len(facts.devices), "rate": lowest},
        ),
    )


def judge_dcgm(facts: DcgmFacts, options: Options) -> tuple[Finding, ...]:
    """Every test that DCGM failed, in its own words."""
    found = [
        Finding(
            verdict=Verdict.FAIL if test.status.lower() == "fail" else Verdict.WARN,
            reason=Reason.DCGM_FAILED,
            subject=f"gpu:{test.subject}" if test.subject else "",
            facts={"name": test.name, "status": test.status, "info": test.info or "nothing more"},
        )
        for test in facts.failed
    ]
    return tuple(found) or (
        Finding(verdict=Verdict.PASS, reason=Reason.DCGM_PASSED, facts={"count": facts.tests}),
    )
