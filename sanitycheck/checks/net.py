"""``net.*``: for now the clock."""

from __future__ import annotations

from typing import Any

from sanitycheck.facts.clock import ClockFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import CLOCK_OFFSET_FAIL_S, CLOCK_OFFSET_WARN_S, CLOCK_SANE_UNIX_S

__all__ = ["judge_clock"]


def judge_clock(facts: ClockFacts, options: Options) -> tuple[Finding, ...]:
    """Never blocking: a training does not read the wall clock. A measured offset outranks the kernel's
    opinion."""
    if facts.unix_s < CLOCK_SANE_UNIX_S:
        named: dict[str, Any] = {"unix_s": round(facts.unix_s)}
        return (Finding(verdict=Verdict.FAIL, reason=Reason.CLOCK_WRONG, facts=named),)
    found: list[Finding] = []
    if facts.peer_problem:
        named = {"peer": facts.peer, "problem": facts.peer_problem}
        found.append(Finding(verdict=Verdict.UNKNOWN, reason=Reason.CLOCK_PEER_SILENT, facts=named))
    if facts.peer_offset_s is not None:
        return (*found, _of_offset(facts, facts.peer_offset_s))
    if facts.synchronised is None:
        found.append(
            Finding(
                verdict=Verdict.UNKNOWN, reason=Reason.CLOCK_NOT_ASKED, facts={"message": facts.why_not_asked}
            )
        )
    elif not facts.synchronised:
        # One node has nobody to disagree with, and containers and virtual machines often keep time without
        # the kernel knowing, so that alone it is no warning.
        verdict = Verdict.WARN if options.nnodes > 1 else Verdict.PASS
        named = {"max_error_s": round(facts.max_error_s, 3)}
        found.append(Finding(verdict=verdict, reason=Reason.CLOCK_UNSYNCHRONISED, facts=named))
    else:
        named = {"max_error_s": round(facts.max_error_s, 3)}
        found.append(Finding(verdict=Verdict.PASS, reason=Reason.CLOCK_SYNCHRONISED, facts=named))
    return tuple(found)


def _of_offset(facts: ClockFacts, offset_s: float) -> Finding:
    certain_s = max(0.0, abs(offset_s) - facts.peer_uncertainty_s)
    named: dict[str, Any] = {
        "peer": facts.peer,
        "offset_s": round(offset_s, 4),
        "uncertainty_s": round(facts.peer_uncertainty_s, 4),
        "limit_s": CLOCK_OFFSET_WARN_S,
    }
    if certain_s > CLOCK_OFFSET_FAIL_S:
        return Finding(verdict=Verdict.FAIL, reason=Reason.CLOCK_OFF, facts=named)
    if certain_s > CLOCK_OFFSET_WARN_S:
        return Finding(verdict=Verdict.WARN, reason=Reason.CLOCK_OFF, facts=named)
    return Finding(verdict=Verdict.PASS, reason=Reason.CLOCK_AGREES, facts=named)
