"""``gpu.xid_recent``: what the driver's messages mean for the node, by the catalogue."""

from __future__ import annotations

from typing import Any

from sanitycheck.facts.xid import XidEvent, XidFacts
from sanitycheck.knowledge.xids import catalogue, recovery_wanted
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import XID_REPEATS

__all__ = ["judge_xid"]

RECOVERY_CODE = 154
_WANTED_EFFECT = {
    "NONE": "none",
    "DRAIN_AND_RESET": "suspect",
    "DRAIN_P2P": "isolate",
    "GPU_RESET": "isolate",
    "NODE_REBOOT": "isolate",
}


def _effect(event: XidEvent) -> str:
    """``none``, ``count_only``, ``suspect``, ``isolate`` or ``unknown``."""
    if event.code == 0:
        return "unknown"  # a message of the driver, but not one that can be read
    if event.switch:
        return "isolate" if event.payload == "fatal" else "suspect"
    entry = catalogue().entries.get(event.code)
    if entry is None:
        return "unknown"
    if entry.effect == "from_text":
        return _WANTED_EFFECT.get(recovery_wanted(event.wanted), "unknown")
    if entry.effect == "from_payload":
        return {"fatal": "isolate", "nonfatal": "count_only"}.get(event.payload, "unknown")
    if entry.action == "restart_job_track" and event.count >= XID_REPEATS:
        return "repeated"
    return entry.effect


def judge_xid(facts: XidFacts, options: Options) -> tuple[Finding, ...]:
    """An effect of *isolate* fails, unless the driver has since said that the device needs nothing any more;
    codes that belong to a program are only counted. It never blocks: the log may be about an earlier state.
    """
    recovered = {
        event.pci: event.newest_age_s
        for event in facts.events
        if event.code == RECOVERY_CODE and not event.switch and recovery_wanted(event.wanted) == "NONE"
    }
    found: list[Finding] = []
    seen: list[str] = []
    for event in facts.events:
        effect = _effect(event)
        reason, verdict = {
            "isolate": (Reason.XID_ISOLATE, Verdict.FAIL),
            "suspect": (Reason.XID_SUSPECT, Verdict.WARN),
            "repeated": (Reason.XID_REPEATED, Verdict.WARN),
            "unknown": (Reason.XID_UNKNOWN, Verdict.UNKNOWN),
        }.get(effect, (Reason.XID_SEEN, Verdict.PASS))
        if reason is Reason.XID_ISOLATE and recovered.get(event.pci, float("inf")) < event.newest_age_s:
            reason, verdict = Reason.XID_RECOVERED, Verdict.WARN
        if verdict is Verdict.PASS:
            seen.append(f"{event.code} x{event.count}")
            continue
        found.append(
            Finding(
                verdict=verdict,
                reason=reason,
                subject=f"{'switch' if event.switch else 'gpu'}:{event.pci or 'unknown'}",
                facts=_named(event),
            )
        )
    if found:
        return tuple(found)
    if seen:
        return (Finding(verdict=Verdict.PASS, reason=Reason.XID_SEEN, facts={"codes": ", ".join(seen)}),)
    named: dict[str, Any] = {"records": facts.records, "window_s": facts.window_s}
    return (Finding(verdict=Verdict.PASS, reason=Reason.XID_NONE, facts=named),)


def _named(event: XidEvent) -> dict[str, Any]:
    entry = None if event.switch else catalogue().entries.get(event.code)
    return {
        "code": event.code,
        "kind": "SXid" if event.switch else "Xid",
        "count": event.count,
        "newest_age_s": round(event.newest_age_s, 1),
        "meaning": entry.meaning if entry else event.newest,
        "action": (entry.action if entry else "look").replace("_", " "),
    }
