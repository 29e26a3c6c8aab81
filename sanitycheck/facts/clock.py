"""The wall clock: ``net.clock``. The kernel's own opinion, and one comparison over SNTP when a peer is
named."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from dataclasses import dataclass

from sanitycheck.errors import NotPermittedError, ToolMissingError
from sanitycheck.facts.request import Request

__all__ = ["ClockFacts", "collect", "parse_reply", "split_peer"]

NTP_PORT = 123
NTP_UNIX_S = 2_208_988_800
"""Seconds from 1900 (NTP) to 1970 (Unix), RFC 5905."""
NTP_PACKET_BYTES = 48
SAMPLES = 3
SAMPLE_TIMEOUT_S = 0.3

STA_UNSYNC = 0x0040
TIME_ERROR = 5


class _Timex(ctypes.Structure):
    """``struct timex`` of adjtimex(2), up to what is read, then the room it may need."""

    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockFacts:
    """What is known of the wall clock.

    Attributes:
        unix_s: The clock's reading.
        synchronised: The kernel's state; None when it may not be asked.
        why_not_asked: Why not.
        max_error_s: The kernel's bound, growing since the last correction.
        peer_offset_s: This clock minus the peer's; None without a peer or an answer.
        peer_uncertainty_s: The offset may be wrong by as much, half the round trip.
        peer_problem: Why there is no offset although a peer was named.
    """

    unix_s: float = 1_800_000_000.0
    synchronised: bool | None = True
    why_not_asked: str = ""
    max_error_s: float = 0.0
    peer: str = ""
    peer_offset_s: float | None = None
    peer_uncertainty_s: float = 0.0
    peer_problem: str = ""


def split_peer(peer: str) -> tuple[str, int]:
    """``host``, ``host:port`` or ``[v6]:port``."""
    if peer.startswith("["):
        host, _, rest = peer[1:].partition("]")
        return host, int(rest[1:]) if rest.startswith(":") else NTP_PORT
    host, colon, port = peer.rpartition(":")
    if colon and ":" not in host:
        return host, int(port)
    return peer, NTP_PORT


def parse_reply(packet: bytes, *, sent_unix_s: float, received_unix_s: float) -> tuple[float, float]:
    """(own clock minus the server's, half the round trip) from one SNTP answer.

    Raises:
        ValueError: Not an answer, or the server says that it has no time itself.
    """
    if len(packet) < NTP_PACKET_BYTES or packet[0] & 0x7 != 4:
        raise ValueError("not an SNTP answer")
    if packet[1] == 0 or packet[0] >> 6 == 3:
        raise ValueError("the server says that it is not synchronised itself")
    seconds = struct.unpack("!IIII", packet[32:48])
    arrived = seconds[0] - NTP_UNIX_S + seconds[1] / 2**32
    left = seconds[2] - NTP_UNIX_S + seconds[3] / 2**32
    offset = ((sent_unix_s - arrived) + (received_unix_s - left)) / 2
    return offset, max(0.0, (received_unix_s - sent_unix_s - (left - arrived)) / 2)


def _ask_kernel() -> tuple[bool, float]:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "adjtimex"):
        raise ToolMissingError("the C library has no adjtimex")
    timex = _Timex()  # modes = 0: only read
    state = libc.adjtimex(ctypes.byref(timex))
    if state < 0:
        raise NotPermittedError(f"adjtimex: {os.strerror(ctypes.get_errno())}")
    return state != TIME_ERROR and not timex.status & STA_UNSYNC, timex.maxerror / 1e6


def _ask_peer(peer: str) -> tuple[float, float]:
    """The sample with the shortest round trip of a few."""
    host, port = split_peer(peer)
    samples: list[tuple[float, float]] = []
    problem: OSError | ValueError = ValueError("no answer")
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    for _ in range(SAMPLES):
        with socket.socket(family, kind) as sock:
            sock.settimeout(SAMPLE_TIMEOUT_S)
            try:
                sock.connect(address)
                sent = time.time()
                sock.send(bytes([0b00_100_011]) + bytes(NTP_PACKET_BYTES - 1))
                packet = sock.recv(512)
                samples.append(parse_reply(packet, sent_unix_s=sent, received_unix_s=time.time()))
            except (OSError, ValueError) as error:
                problem = error
    if not samples:
        raise problem
    return min(samples, key=lambda sample: sample[1])


def collect(request: Request) -> ClockFacts:
    """Ask the kernel, and the peer if there is one."""
    synchronised, max_error_s, why_not = None, 0.0, ""
    try:
        synchronised, max_error_s = _ask_kernel()
    except (ToolMissingError, NotPermittedError) as error:
        why_not = str(error)
    peer = request.options.clock_peer or ""
    offset, uncertainty, problem = request.options.clock_offset_s, 0.0, ""
    if peer:
        request.tell(f"asking {peer} for the time")
        try:
            offset, uncertainty = _ask_peer(peer)
        except (OSError, ValueError) as error:
            offset, problem = None, str(error) or type(error).__name__
    return ClockFacts(
        unix_s=time.time(),
        synchronised=synchronised,
        why_not_asked=why_not,
        max_error_s=max_error_s,
        peer=peer or ("caller" if offset is not None else ""),
        peer_offset_s=offset,
        peer_uncertainty_s=uncertainty,
        peer_problem=problem,
    )
