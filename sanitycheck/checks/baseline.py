"""Comparing a figure with this node's own record: the median, and the noise around it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import GEMM_FAIL_SHARE, GEMM_WARN_SHARE, NOISE_MADS

__all__ = ["against_record", "best_of"]

MAD_TO_SIGMA = 1.4826


def best_of(values: Sequence[float]) -> float:
    """The best pass: what disturbs a measurement only ever makes it slower."""
    return max(values, default=0.0)


def against_record(
    best: float, options: Options, *, name: str, passed: Reason, slow: Reason, named: dict[str, Any]
) -> tuple[Finding, ...]:
    """Slow is below a share of the record *and* outside of the noise that the record knows. Never blocking:
    other work on the node may be the cause."""
    reference = options.baseline.get(name)
    if not reference:
        return (
            Finding(verdict=Verdict.PASS, reason=passed, facts=named),
            Finding(verdict=Verdict.SKIPPED, reason=Reason.NO_BASELINE, facts={"name": name}),
        )
    share = best / reference
    noise = NOISE_MADS * MAD_TO_SIGMA * options.known.noise.get(name, 0.0)
    named = {**named, "baseline": reference, "share": round(share, 3)}
    if best < reference - noise and share < GEMM_WARN_SHARE:
        verdict = Verdict.FAIL if share < GEMM_FAIL_SHARE else Verdict.WARN
        return (Finding(verdict=verdict, reason=slow, facts=named),)
    return (Finding(verdict=Verdict.PASS, reason=passed, facts=named),)
