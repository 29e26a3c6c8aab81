"""``net.tcp``, ``net.rdma_ports`` and ``net.rdma_counters``."""

from __future__ import annotations

from typing import Any

from sanitycheck.facts.rdma import PortFacts, RdmaCounters, RdmaPorts
from sanitycheck.facts.reach import TcpFacts
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict
from sanitycheck.thresholds import RDMA_ERRORS_PER_H_MAX, RDMA_FLAPS_MAX, RDMA_FLAPS_WINDOW_S

__all__ = ["judge_rdma_counters", "judge_rdma_ports", "judge_tcp"]

_TCP = {
    "name": (Verdict.FAIL, Reason.TCP_NAME),
    "refused": (Verdict.WARN, Reason.TCP_REFUSED),
    "timeout": (Verdict.FAIL, Reason.TCP_UNREACHABLE),
    "unreachable": (Verdict.FAIL, Reason.TCP_UNREACHABLE),
}


def judge_tcp(facts: TcpFacts, options: Options) -> tuple[Finding, ...]:
    """No way to a machine fails; a refusal only says that its service is not up (yet). Ways of different
    packet sizes warn: large messages then hang where small ones pass."""
    found = []
    for target in facts.targets:
        if target.problem:
            verdict, reason = _TCP.get(target.problem, (Verdict.FAIL, Reason.TCP_UNREACHABLE))
            named: dict[str, Any] = {"error": target.error, "address": target.address or "no address"}
            found.append(Finding(verdict=verdict, reason=reason, subject=target.target, facts=named))
    sizes = sorted({target.mtu for target in facts.targets if target.mtu})
    if len(sizes) > 1:
        named = {"sizes": ", ".join(map(str, sizes))}
        found.append(Finding(verdict=Verdict.WARN, reason=Reason.TCP_MTU, facts=named))
    if found:
        return tuple(found)
    named = {
        "count": len(facts.targets),
        "connect_s": round(max((target.connect_s for target in facts.targets), default=0.0), 4),
    }
    return (Finding(verdict=Verdict.PASS, reason=Reason.TCP_REACHED, facts=named),)


def _is_up(port: PortFacts) -> bool:
    return port.state == "ACTIVE"


def judge_rdma_ports(facts: RdmaPorts, options: Options) -> tuple[Finding, ...]:
    """A port that was switched off on purpose is nothing to say; one that should be up and is not fails, and
    so does one that is slower than its siblings of the same kind."""
    found = []
    up = [port for port in facts.ports if _is_up(port)]
    best = {port.layer: max(p.rate_gbit for p in up if p.layer == port.layer) for port in up}
    for port in facts.ports:
        named: dict[str, Any] = {
            "state": port.state,
            "physical": port.physical,
            "rate_gbit": port.rate_gbit,
        }
        if not _is_up(port) and port.physical != "Disabled":
            found.append(
                Finding(verdict=Verdict.FAIL, reason=Reason.RDMA_DOWN, subject=port.name, facts=named)
            )
        elif _is_up(port) and port.rate_gbit < best[port.layer]:
            named["expected_gbit"] = best[port.layer]
            found.append(
                Finding(verdict=Verdict.FAIL, reason=Reason.RDMA_SLOW, subject=port.name, facts=named)
            )
    expected = options.known.rdma_ports
    if expected is not None and len(up) < expected:
        named = {"found": len(up), "expected": expected}
        found.append(Finding(verdict=Verdict.FAIL, reason=Reason.RDMA_FEW, facts=named))
    if found:
        return tuple(found)
    if not up:
        return (
            Finding(verdict=Verdict.PASS, reason=Reason.RDMA_DISABLED, facts={"count": len(facts.ports)}),
        )
    named = {"count": len(up), "rate_gbit": min(port.rate_gbit for port in up)}
    return (Finding(verdict=Verdict.PASS, reason=Reason.RDMA_PORTS, facts=named),)


def judge_rdma_counters(facts: RdmaCounters, options: Options) -> tuple[Finding, ...]:
    """Against an earlier look where there is one, else as a rate since boot. Links that go down and come back
    fail; errors that the link corrects only warn."""
    before = options.known.counters
    hours = max(1.0, facts.uptime_s / 3600.0)
    found = []
    for name, value in sorted(facts.counters.items()):
        port, _, counter = name.rpartition(".")
        rise = value - before[name] if name in before and value >= before[name] else None
        named: dict[str, Any] = {"counter": counter, "count": value if rise is None else rise}
        if counter == "link_downed":
            limit = RDMA_FLAPS_MAX * max(1.0, facts.uptime_s / RDMA_FLAPS_WINDOW_S)
            if (rise is not None and rise >= RDMA_FLAPS_MAX) or (rise is None and value >= limit):
                found.append(
                    Finding(verdict=Verdict.FAIL, reason=Reason.RDMA_FLAPS, subject=port, facts=named)
                )
        elif (value if rise is None else rise) > RDMA_ERRORS_PER_H_MAX * hours:
            found.append(Finding(verdict=Verdict.WARN, reason=Reason.RDMA_ERRORS, subject=port, facts=named))
    return tuple(found) or (
        Finding(verdict=Verdict.PASS, reason=Reason.RDMA_COUNTERS, facts={"count": len(facts.counters)}),
    )
