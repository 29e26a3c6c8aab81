"""Other machines over TCP: ``net.tcp``. Name, connection, round trip and the largest packet on the way."""

from __future__ import annotations

import socket
import sys
import time
from dataclasses import dataclass

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts.request import Request

__all__ = ["TargetFacts", "TcpFacts", "collect", "split_target"]

TARGETS_MAX = 64
CONNECT_TIMEOUT_S = 3.0
IP_MTU = 14
"""Of the path, as the kernel knows it for a connected socket (ip(7)); not named by Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """One machine.

    Attributes:
        target: ``host:port``.
        problem: Empty, or ``name``, ``refused``, ``timeout``, ``unreachable``.
        address: What the name stands for.
        mtu: Largest packet on the way; 0 where the kernel does not say.
    """

    target: str = "master:29400"
    problem: str = ""
    error: str = ""
    address: str = "10.0.0.1"
    connect_s: float = 0.001
    mtu: int = 1500


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpFacts:
    """All machines that must be reachable."""

    targets: tuple[TargetFacts, ...] = (TargetFacts(),)


def split_target(target: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``.

    Raises:
        ValueError: There is no port.
    """
    host, colon, port = target.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(f"{target!r} is no host:port")
    return host.strip("[]"), int(port)


def _mtu(sock: socket.socket) -> int:
    if not sys.platform.startswith("linux") or sock.family is not socket.AF_INET:
        return 0
    try:
        return sock.getsockopt(socket.IPPROTO_IP, IP_MTU)
    except OSError:
        return 0


def _try(target: str) -> TargetFacts:
    address = ""
    try:
        host, port = split_target(target)
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        address = str(place[0])
        with socket.socket(family, kind) as sock:
            sock.settimeout(CONNECT_TIMEOUT_S)
            begin = time.perf_counter()
            sock.connect(place)
            took = time.perf_counter() - begin
            return TargetFacts(target=target, address=address, connect_s=took, mtu=_mtu(sock))
    except (socket.gaierror, ValueError) as error:
        problem, text = "name", str(error)
    except ConnectionRefusedError as error:
        problem, text = "refused", str(error)
    except TimeoutError as error:
        problem, text = "timeout", str(error)
    except OSError as error:
        problem, text = "unreachable", str(error)
    return TargetFacts(
        target=target, problem=problem, error=text[:200], address=address, connect_s=0.0, mtu=0
    )


def collect(request: Request) -> TcpFacts:
    """Connect to every machine that was named, one after the other."""
    targets = request.options.known.reach[:TARGETS_MAX]
    if not targets:
        raise NotApplicableError("no machine was named that must be reached (--reach HOST:PORT)")
    found = []
    for target in targets:
        request.tell(f"connecting to {target}")
        found.append(_try(target))
    return TcpFacts(targets=tuple(found))
