"""A fresh port for the workers' store, held until they use it.

A port that is only looked up is a race that somebody loses sooner or later. This one stays bound, but not
listening, for as long as the generation lives: the kernel gives it to nobody else, and a store that sets
``SO_REUSEADDR`` (torch's both do) may still listen on it.
"""

from __future__ import annotations

import socket
from types import TracebackType


class HeldPort:
    """A bound, not listening TCP port on all addresses. Close it when the generation is over."""

    def __init__(self) -> None:
        self._socket = _bound_socket()
        self.port: int = self._socket.getsockname()[1]

    def close(self) -> None:
        """Give the port back. May be called twice."""
        self._socket.close()

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _bound_socket() -> socket.socket:
    # Dual stack where there is IPv6, as torch's store listens on both.
    if socket.has_dualstack_ipv6():
        held = socket.socket(socket.AF_INET6, socket.SOCK_STREAM)
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        address: tuple[str, int] = ("::", 0)
    else:
        held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        address = ("0.0.0.0", 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(address)
    return held
