"""From an outcome to findings. Pure. What a probe could not say is judged here, what it said by its check."""

from __future__ import annotations

from sanitycheck.check import Check
from sanitycheck.options import Options
from sanitycheck.outcome import Answered, Cannot, Crashed, Hung, NotRun, Outcome
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict

__all__ = ["judge"]

BLOCKING_HANG_S = 20.0
"""A store that does not answer for so long would also hold up the training at its first save."""

_BLOCKS_WHEN_HUNG = ("store.ckpt_path",)
_FAULTS = ("SIGSEGV", "SIGILL", "SIGBUS", "SIGFPE", "SIGABRT")
_CANNOT = {
    "not_applicable": (Verdict.SKIPPED, Reason.NOT_APPLICABLE),
    "tool_missing": (Verdict.UNKNOWN, Reason.TOOL_MISSING),
    "not_permitted": (Verdict.UNKNOWN, Reason.NOT_PERMITTED),
    "broken": (Verdict.UNKNOWN, Reason.PROBE_BROKEN),
}
_NOT_RUN = {
    "time": (Verdict.UNKNOWN, Reason.NO_TIME_LEFT),
    "cancelled": (Verdict.UNKNOWN, Reason.CANCELLED),
    "drill": (Verdict.SKIPPED, Reason.NOT_IN_DRILL),
}


def judge(check: Check, options: Options, *, outcome: Outcome) -> tuple[Finding, ...]:
    """At least one finding, whatever came back."""
    if isinstance(outcome, Answered):
        return check.judge(outcome.facts, options)
    if isinstance(outcome, Cannot):
        verdict, reason = _CANNOT.get(outcome.kind, (Verdict.UNKNOWN, Reason.CANNOT_LOOK))
        return (Finding(verdict=verdict, reason=reason, facts={"message": outcome.message}),)
    if isinstance(outcome, NotRun):
        verdict, reason = _NOT_RUN[outcome.why]
        return (Finding(verdict=verdict, reason=reason),)
    if isinstance(outcome, Hung):
        return (_hung(check, outcome),)
    return (_crashed(check, outcome),)


def _hung(check: Check, outcome: Hung) -> Finding:
    facts = {"phase": outcome.phase or "starting", "after_s": round(outcome.after_s, 2)}
    if outcome.unkillable:
        facts |= {"pid": outcome.pid}
        reason = Reason.STUCK_IN_KERNEL
    elif outcome.full_time and check.if_hung is Verdict.FAIL:
        reason = Reason.HUNG
    else:
        reason = Reason.TIMED_OUT
    verdict = check.if_hung if outcome.full_time else Verdict.UNKNOWN
    long_enough = outcome.full_time and outcome.after_s >= BLOCKING_HANG_S
    blocking = verdict is Verdict.FAIL and long_enough and check.id in _BLOCKS_WHEN_HUNG
    return Finding(verdict=verdict, reason=reason, facts=facts, blocking=blocking)


def _crashed(check: Check, outcome: Crashed) -> Finding:
    facts = {
        "how": outcome.signal
        or ("an unknown status" if outcome.code is None else f"exit code {outcome.code}"),
        "phase": outcome.phase or "starting",
        "message": outcome.message,
    }
    verdict = check.if_crashed if outcome.signal in _FAULTS else Verdict.UNKNOWN
    return Finding(verdict=verdict, reason=Reason.CRASHED, facts=facts)
