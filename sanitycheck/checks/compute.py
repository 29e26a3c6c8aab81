"""``cpu.*``, ``num.*`` and ``coll.*``: is it fast enough, and is it right?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from sanitycheck.checks.baseline import against_record, best_of
from sanitycheck.facts.bitwise import BitwiseFacts, DigestDevice
from sanitycheck.facts.collective import CollectiveFacts
from sanitycheck.facts.gemm import GemmFacts
from sanitycheck.facts.membw import MembwFacts
from sanitycheck.facts.training import TrainingFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import GEMM_ERROR_MAX, LOSS_SHARE_MAX

__all__ = [
    "GEMM_BASELINE",
    "MEMBW_BASELINE",
    "TRAINING_DIGEST",
    "judge_bitwise",
    "judge_collective",
    "judge_gemm",
    "judge_membw",
    "judge_training",
]

GEMM_BASELINE = "cpu.gemm.gflops"
MEMBW_BASELINE = "cpu.membw.gb_s"
"""Names under which a baseline holds the figures."""
TRAINING_DIGEST = "train.mini_gpt"


def judge_gemm(facts: GemmFacts, options: Options) -> tuple[Finding, ...]:
    """A wrong product blocks. A slow one does not: other work on the node may be the cause."""
    best = best_of(facts.gflops)
    named: dict[str, Any] = {"gflops": best, "threads": facts.threads, "library": facts.library}
    if not facts.relative_error <= GEMM_ERROR_MAX:  # so written that NaN is wrong too
        wrong = {
            "relative_error": str(facts.relative_error),
            "limit": GEMM_ERROR_MAX,
            "library": facts.library,
        }
        return (Finding(verdict=Verdict.FAIL, reason=Reason.GEMM_WRONG, facts=wrong, blocking=True),)
    return against_record(
        best, options, name=GEMM_BASELINE, passed=Reason.GEMM, slow=Reason.GEMM_SLOW, named=named
    )


def judge_membw(facts: MembwFacts, options: Options) -> tuple[Finding, ...]:
    """Against this node's own record; bytes that came out wrong block."""
    named: dict[str, Any] = {"gb_s": best_of(facts.gb_s), "threads": facts.threads}
    if not facts.correct:
        return (Finding(verdict=Verdict.FAIL, reason=Reason.MEMBW_WRONG, facts=named, blocking=True),)
    return against_record(
        best_of(facts.gb_s),
        options,
        name=MEMBW_BASELINE,
        passed=Reason.MEMBW,
        slow=Reason.MEMBW_SLOW,
        named=named,
    )


def judge_training(facts: TrainingFacts, options: Options) -> tuple[Finding, ...]:
    """Wrong learning blocks; a training that cannot start does not, since it may be the network's setting."""
    if facts.problem:
        named: dict[str, Any] = {"problem": facts.problem}
        return (Finding(verdict=Verdict.FAIL, reason=Reason.TRAIN_BROKEN, facts=named),)
    first, last = (facts.losses[0], facts.losses[-1]) if facts.losses else (0.0, 0.0)
    digest = facts.digests[0] if facts.digests else ""
    named = {"first_loss": str(first), "last_loss": str(last), "steps": len(facts.losses)}
    if len(set(facts.digests)) != 1:
        named["digests"] = ", ".join(one[:12] for one in facts.digests)
        return (Finding(verdict=Verdict.FAIL, reason=Reason.TRAIN_RANKS_DIFFER, facts=named, blocking=True),)
    if not (math.isfinite(last) and last < LOSS_SHARE_MAX * first):
        return (Finding(verdict=Verdict.FAIL, reason=Reason.TRAIN_LOSS_STUCK, facts=named, blocking=True),)
    known = options.known.digests.get(f"{TRAINING_DIGEST}: {facts.key}")
    named |= {"digest": digest, "key": facts.key, "tokens_per_s": facts.tokens_per_s}
    if known is not None and known != digest:
        named["expected"] = known
        return (
            Finding(verdict=Verdict.FAIL, reason=Reason.TRAIN_DIGEST_DIFFERS, facts=named, blocking=True),
        )
    return (Finding(verdict=Verdict.PASS, reason=Reason.TRAINED, facts=named),)


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
    return (
        Finding(verdict=Verdict.PASS, reason=Reason.BITS_EQUAL, facts=named),
        *_bitwise_devices(facts.devices),
    )


def _bitwise_devices(devices: Sequence[DigestDevice]) -> list[Finding]:
    """Devices of one model against the digest that most of them have, and each against itself."""
    found = []
    for device in devices:
        subject = f"gpu:{device.index}"
        if device.problem:
            named: dict[str, Any] = {"message": device.problem}
            found.append(
                Finding(
                    verdict=Verdict.UNKNOWN, reason=Reason.BITS_NOT_COMPARED, subject=subject, facts=named
                )
            )
            continue
        siblings = Counter(one.digest for one in devices if one.name == device.name and not one.problem)
        usual = siblings.most_common(1)[0][0]
        if device.digest != usual or not device.again:
            named = {"model": device.name, "digest": device.digest[:12], "usual": usual[:12]}
            found.append(
                Finding(
                    verdict=Verdict.FAIL,
                    reason=Reason.BITS_DIFFER_DEVICE,
                    subject=subject,
                    facts=named,
                    blocking=True,
                )
            )
    return found


def judge_collective(facts: CollectiveFacts, options: Options) -> tuple[Finding, ...]:
    """Wrong values block. A group that cannot be formed does not: the training may use another backend or
    network."""
    named: dict[str, Any] = {
        "backend": facts.backend,
        "ranks": facts.ranks,
        "interface": facts.interface,
        "largest_bytes": facts.largest_bytes,
    }
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
