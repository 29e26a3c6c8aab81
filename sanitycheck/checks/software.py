"""``sw.*``: versions that fit together here, and that are the ones the job expects."""

from __future__ import annotations

import re

from sanitycheck.facts.software import SoftwareFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict

__all__ = ["judge_fingerprint", "judge_versions"]

TORCH_FLOOR = (2, 6)
CUDA_DRIVER_FLOOR = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""Least Linux driver of each CUDA major version (CUDA release notes, table "minor version compatibility")."""
KEY_VERSIONS = ("torch", "cuda", "nccl", "python")
"""A difference in these changes results or keeps ranks from talking; looked at before every start."""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+", 1)[0])[:3])


def judge_versions(facts: SoftwareFacts, options: Options) -> tuple[Finding, ...]:
    """Metadata only says what is installed in this interpreter; a job may train with another, so little is
    certain."""
    found: list[Finding] = []
    if not facts.torch_version:
        found.append(
            Finding(verdict=Verdict.SKIPPED, reason=Reason.TORCH_NOT_HERE, facts={"python": facts.python})
        )
    else:
        found.extend(_judge_torch(facts))
    found.extend(_differences({key: options.fingerprint.get(key, "") for key in KEY_VERSIONS}, facts))
    if not found:
        named = {"python": facts.python, "torch": facts.torch_version, "nccl": facts.nccl or "none"}
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.VERSIONS, facts=named))
    return tuple(found)


def _judge_torch(facts: SoftwareFacts) -> list[Finding]:
    found: list[Finding] = []
    bare, recorded = (version.split("+", 1)[0] for version in (facts.torch_version, facts.torch_metadata))
    if recorded and bare != recorded:
        named = {"file": facts.torch_version, "metadata": facts.torch_metadata}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.TORCH_MIXED, facts=named))
    if _numbers(facts.torch_version)[:2] < TORCH_FLOOR:
        named = {"torch": facts.torch_version, "floor": ".".join(map(str, TORCH_FLOOR))}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.TORCH_OLD, facts=named))
    if facts.nccl and facts.nccl_needed and facts.nccl != facts.nccl_needed:
        named = {"nccl": facts.nccl, "needed": facts.nccl_needed}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.NCCL_MIXED, facts=named))
    cuda = _numbers(facts.torch_cuda)
    floor = CUDA_DRIVER_FLOOR.get(cuda[0]) if cuda else None
    if floor and facts.driver and _numbers(facts.driver) < floor:
        # Not a failure: a compatibility package may stand between, which only a CUDA context would show.
        named = {"driver": facts.driver, "cuda": facts.torch_cuda, "floor": ".".join(map(str, floor))}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.DRIVER_OLD, facts=named))
    return found


def _differences(expected: dict[str, str], facts: SoftwareFacts) -> list[Finding]:
    """One finding per version that is not the expected one."""
    found: list[Finding] = []
    for name, wanted in sorted(expected.items()):
        here = facts.versions.get(name, "")
        if wanted and here != wanted:
            named = {"package": name, "here": here or "none", "expected": wanted}
            # NCCL refuses to talk to another version of itself. Everything else may still train.
            blocking = name == "nccl" and bool(here) and bool(facts.driver)
            found.append(
                Finding(
                    verdict=Verdict.FAIL,
                    reason=Reason.VERSION_DIFFERS,
                    subject=name,
                    facts=named,
                    blocking=blocking,
                )
            )
    return found


def judge_fingerprint(facts: SoftwareFacts, options: Options) -> tuple[Finding, ...]:
    """Every difference to the expected set is named; without one, the set is recorded."""
    differing = _differences(dict(options.fingerprint), facts)
    if differing:
        return tuple(differing)
    reason = Reason.FINGERPRINT_EQUAL if options.fingerprint else Reason.FINGERPRINT
    named = {"digest": facts.digest, "versions": dict(facts.versions)}
    return (Finding(verdict=Verdict.PASS, reason=reason, facts=named),)
