"""Checks of the network: other machines, RDMA ports."""

from __future__ import annotations

from sanitycheck.check import Check
from sanitycheck.checks import network
from sanitycheck.facts import rdma, reach
from sanitycheck.reasons import Reason
from sanitycheck.result import Level

__all__ = ["NETWORK_CHECKS"]

NETWORK_CHECKS: tuple[Check, ...] = (
    Check(
        id="net.tcp",
        level=Level.QUICK,
        scope="node",
        title="other machines can be reached",
        about="Connects to every machine named with --reach (the master, peers, a storage server), one after "
        "the other: name, way, round trip, largest packet.",
        rule="A name without an address and a machine without a way fail; a refused connection warns, since "
        "the service may start later; ways with different packet sizes warn.",
        source="RFC 1191 (path MTU); ip(7), IP_MTU",
        collect=reach.collect,
        facts=reach.TcpFacts,
        judge=network.judge_tcp,
        reasons=(
            Reason.TCP_REACHED,
            Reason.TCP_NAME,
            Reason.TCP_REFUSED,
            Reason.TCP_UNREACHABLE,
            Reason.TCP_MTU,
        ),
        deadline_s=20.0,
    ),
    Check(
        id="net.rdma_ports",
        level=Level.QUICK,
        scope="node",
        title="RDMA ports are up at full speed",
        about="State, physical state and rate of every port of every RDMA device, from the kernel. One slow "
        "or lost port halves the bandwidth of every collective that uses its rail.",
        rule="A port that is down without having been disabled fails; one slower than its siblings of the "
        "same kind fails; fewer ports than expected (--rdma-ports) fail.",
        source="Documentation/ABI/stable/sysfs-class-infiniband; field: AzNHC, gpud, sichek",
        collect=rdma.collect_ports,
        facts=rdma.RdmaPorts,
        judge=network.judge_rdma_ports,
        reasons=(
            Reason.RDMA_PORTS,
            Reason.RDMA_DISABLED,
            Reason.RDMA_DOWN,
            Reason.RDMA_SLOW,
            Reason.RDMA_FEW,
        ),
    ),
    Check(
        id="net.rdma_counters",
        level=Level.QUICK,
        scope="node",
        title="RDMA links stay up and carry no errors",
        about="How often each link went down, and its error counters, against the last recorded look or as a "
        "rate since boot. A link that flaps stalls a job for seconds each time.",
        rule="Three times down since the last look, or per 12 hours without one, fails; more than 120 errors "
        "per hour warn.",
        source="Field: 3 in 12 h (gpud), 5 in 24 h (AzNHC); 120 symbol errors per hour before PAM4",
        collect=rdma.collect_counters,
        facts=rdma.RdmaCounters,
        judge=network.judge_rdma_counters,
        reasons=(Reason.RDMA_COUNTERS, Reason.RDMA_FLAPS, Reason.RDMA_ERRORS),
    ),
)
