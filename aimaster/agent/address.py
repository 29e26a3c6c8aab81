"""Which addresses are this machine's, and at which one other nodes reach it.

No name is looked up that the user did not give: a slow resolver must not delay a start on one node.
"""

from __future__ import annotations

import ipaddress
import socket

import psutil

from aimaster.config import is_loopback
from aimaster.errors import MasterUnreachable

LOOPBACK = "127.0.0.1"


def is_this_machine(host: str) -> bool:
    """Whether `host` (name or address) leads to this machine (or network namespace)."""
    if is_loopback(host) or host in (socket.gethostname(), "0.0.0.0", "::"):
        return True
    own = {
        ipaddress.ip_address(entry.address.split("%")[0])
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    }
    return any(address in own for address in _resolve(host))


def address_towards(host: str, port: int) -> str:
    """Address of ours that a packet to `host` would carry: other nodes reach us there.

    No packet is sent: connecting a datagram socket only asks the routing table.

    Raises:
        MasterUnreachable: There is no route, or the name cannot be resolved.
    """
    if is_loopback(host):
        return LOOPBACK
    for address in _resolve(host):
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((str(address), port or 1))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise MasterUnreachable(
        "no route to the master's host, or its name cannot be resolved",
        where=host,
        next_step="check --rdzv-endpoint, the name service and the routes of this node "
        f"(getent hosts {host}; ip route get {host}), or give --local-addr",
    )


def _resolve(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [ipaddress.ip_address(str(entry[4][0]).split("%")[0]) for entry in found]
