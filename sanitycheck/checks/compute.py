"""``cpu.*``, ``num.*`` and ``coll.*``: is it fast enough, and is it right?"""

from __future__ import annotations

from sanitycheck.facts.bitwise import BitwiseFacts
from sanitycheck.facts.collective import CollectiveFacts
from sanitycheck.facts.gemm import GemmFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import GEMM_ERROR_MAX, GEMM_FAIL_SHARE, GEMM_WARN_SHARE

__all__ = ["GEMM_BASELINE", "judge_bitwise", "judge_collective", "judge_gemm"]

GEMM_BASELINE = "cpu.gemm.gflops"
"""Name under which a baseline holds the figure."""


def judge_gemm(facts: GemmFacts, options: Options) -> tuple[Finding, ...]:
    """A wrong product blocks. A slow one does not: other work on the node may be the cause."""
    best = max(facts.gflops, default=0.0)
    named = {"gflops": best, "threads": facts.threads, "library": facts.library}
    if not facts.relative_error <= GEMM_ERROR_MAX:  # so written that NaN is wrong too
        wrong = {
            "relative_error": str(facts.relative_error),
            "limit": GEMM_ERROR_MAX,
            "library": facts.library,
        }
        return (Finding(verdict=Verdict.FAIL, reason=Reason.GEMM_WRONG, facts=wrong, blocking=True),)
    measured = Finding(verdict=Verdict.PASS, reason=Reason.GEMM, facts=named)
    reference = options.baseline.get(GEMM_BASELINE)
    if not reference:
        return (
            measured,
            Finding(verdict=Verdict.SKIPPED, reason=Reason.NO_BASELINE, facts={"name": GEMM_BASELINE}),
        )
    share = best / reference
    compared = {**named, "baseline_gflops": reference, "share": round(share, 3)}
    if share < GEMM_FAIL_SHARE:
        return (Finding(verdict=Verdict.FAIL, reason=Reason.GEMM_SLOW, facts=compared),)
    if share < GEMM_WARN_SHARE:
        return (Finding(verdict=Verdict.WARN, reason=Reason.GEMM_SLOW, facts=compared),)
    return (Finding(verdict=Verdict.PASS, reason=Reason.GEMM, facts=compared),)


def judge_bitwise(facts: BitwiseFacts, options: Options) -> tuple[Finding, ...]:
    """One thread, one library, one seed: another digest is another result of the same instructions."""
    where = ", ".join("not pinned" if one < 0 else str(one) for one in facts.processors)
    named = {
        "library": facts.library,
        "processors": where,
        "digest": facts.digests[0] if facts.digests else "",
    }
    if len(set(facts.digests)) != 1 or not all(facts.repeats_equal):
        named["digests"] = ", ".join(digest[:12] for digest in facts.digests)
        return (Finding(verdict=Verdict.FAIL, reason=Reason.BITS_DIFFER, facts=named, blocking=True),)
    return (Finding(verdict=Verdict.PASS, reason=Reason.BITS_EQUAL, facts=named),)


def judge_collective(facts: CollectiveFacts, options: Options) -> tuple[Finding, ...]:
    """Wrong values block. A group that cannot be formed does not: the training may use another backend or
    network."""
    named = {"backend": facts.backend, "ranks": facts.ranks, "interface": facts.interface}
    found: list[Finding] = []
    if facts.wrong:
        wrong = {**named, "count": len(facts.wrong), "first": facts.wrong[0]}
        found.append(
            Finding(verdict=Verdict.FAIL, reason=Reason.COLLECTIVE_WRONG, facts=wrong, blocking=True)
        )
    if facts.problem:
        broken = {**named, "problem": facts.problem}
        found.append(Finding(verdict=Verdict.FAIL, reason=Reason.COLLECTIVE_BROKEN, facts=broken))
    if not found:
        speeds = {f"{name}_mb_s": speed for name, speed in facts.mb_s.items()}
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.COLLECTIVE, facts={**named, **speeds}))
    return tuple(found)
