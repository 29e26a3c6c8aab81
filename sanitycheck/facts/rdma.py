"""RDMA ports from sysfs: ``net.rdma_ports`` and ``net.rdma_counters``."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request

__all__ = ["PortFacts", "RdmaCounters", "RdmaPorts", "collect_counters", "collect_ports", "ports_of"]

INFINIBAND = Path("/sys/class/infiniband")
COUNTERS = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors")
PORTS_MAX = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class PortFacts:
    """One port.

    Attributes:
        name: ``device/port``.
        state: ``ACTIVE``, ``DOWN``, ``INIT``, ``ARMED`` (the kernel's word).
        physical: ``LinkUp``, ``Polling``, ``Disabled``, …
        rate_gbit: Signalling rate of all lanes together.
    """

    name: str = "mlx5_0/1"
    state: str = "ACTIVE"
    physical: str = "LinkUp"
    rate_gbit: float = 400.0
    layer: str = "InfiniBand"


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaPorts:
    """All ports."""

    ports: tuple[PortFacts, ...] = (PortFacts(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaCounters:
    """Counters by ``device/port.counter`` since the driver loaded, and for how long that is at most."""

    counters: Mapping[str, int] = field(default_factory=dict)
    uptime_s: float = 86_400.0


def _word(text: str | None) -> str:
    """``4: ACTIVE`` → ``ACTIVE``."""
    return (text or "").partition(":")[2].strip() or (text or "").strip()


def ports_of(root: Path = INFINIBAND) -> tuple[tuple[str, Path], ...]:
    """(``device/port``, folder) of every port."""
    if not root.is_dir():
        return ()
    found = [
        (f"{device.name}/{port.name}", port)
        for device in sorted(root.iterdir())
        if (device / "ports").is_dir()
        for port in sorted((device / "ports").iterdir())
    ]
    return tuple(found[:PORTS_MAX])


def collect_ports(request: Request, *, root: Path = INFINIBAND) -> RdmaPorts:
    """Read state and rate of every port."""
    ports = ports_of(root)
    if not ports and not request.options.known.rdma_ports:
        raise NotApplicableError("no RDMA device here")
    found = []
    for name, folder in ports:
        rate = re.match(r"[\d.]+", (read_text(folder / "rate") or "").strip())
        found.append(
            PortFacts(
                name=name,
                state=_word(read_text(folder / "state")),
                physical=_word(read_text(folder / "phys_state")),
                rate_gbit=float(rate.group()) if rate else 0.0,
                layer=(read_text(folder / "link_layer") or "").strip(),
            )
        )
    return RdmaPorts(ports=tuple(found))


def collect_counters(request: Request, *, root: Path = INFINIBAND) -> RdmaCounters:
    """Read the error counters of every port."""
    ports = ports_of(root)
    if not ports:
        raise NotApplicableError("no RDMA device here")
    counters: dict[str, int] = {}
    for name, folder in ports:
        for counter in COUNTERS:
            text = (read_text(folder / "counters" / counter) or "").strip()
            if text.isdigit():
                counters[f"{name}.{counter}"] = int(text)
    return RdmaCounters(counters=counters, uptime_s=time.clock_gettime(time.CLOCK_BOOTTIME))
