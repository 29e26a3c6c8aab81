"""gRPC channels and servers as this project sets them up, and finding out why a connection fails.

gRPC's defaults are for services behind proxies and balancers. Ours differ, each for a reason:

- a proxy from the environment is never used: masters are inside the cluster, and proxies are not;
- a server port is never shared (gRPC shares by default: two masters would each get half of the agents);
- pings go out while nothing else does, so that a cut cable is noticed in seconds, not after TCP's minutes;
- reconnecting is ours (`client`), because it has to say hello again anyway.

gRPC reports a failed handshake as "unavailable" with a sentence of the TLS library. `diagnose` therefore
makes its own connection and says which of the causes it is, by error class and not by text.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc
import grpc.aio

from aimaster.errors import PortInUse, SetupError, UsageError
from aimaster.rpc import limits
from aimaster.rpc.gen import contract
from aimaster.rpc.security import SERVER_NAME, Credentials
from aimaster.rpc.waiting import within

Call = Any
"""One stream, as gRPC gives it; its type parameters say nothing here, since messages travel as bytes."""
END_OF_STREAM: object = grpc.aio.EOF  # type: ignore[attr-defined]  # the stubs forget it

PING_INTERVAL_MS = 5_000
PING_TIMEOUT_MS = 5_000
CONNECT_TIMEOUT_S = 5.0
STREAMS_MAX = 20_000
"""Most agents connected to one master at once."""

_BOTH_SIDES = (
    ("grpc.keepalive_time_ms", PING_INTERVAL_MS),
    ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
_CHANNEL_OPTIONS = (
    *_BOTH_SIDES,
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.ssl_target_name_override", SERVER_NAME),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
)
_SERVER_OPTIONS = (
    *_BOTH_SIDES,
    ("grpc.so_reuseport", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", PING_INTERVAL_MS // 5),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.STATUS_BYTES_MAX),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where a master listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """``host:port``, with brackets around an IPv6 address.

        Raises:
            UsageError: if it is not that.
        """
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            host = ""
        if not (colon and host and port.isascii() and port.isdigit() and int(port) <= limits.PORT_MAX):
            raise UsageError(
                "not an endpoint", where=repr(text), next_step="write HOST:PORT, or [ADDRESS]:PORT for IPv6"
            )
        return cls(host=host, port=int(port))

    def __str__(self) -> str:
        """As `parse` reads it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def open_channel(endpoint: Endpoint, credentials: Credentials) -> grpc.aio.Channel:
    """A channel for an agent's session; connects with the first call."""
    options = (*_CHANNEL_OPTIONS, ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX))
    secure = credentials.client()
    if secure is None:
        return grpc.aio.insecure_channel(str(endpoint), options=options)
    return grpc.aio.secure_channel(str(endpoint), secure, options=options)


def open_session(channel: grpc.aio.Channel) -> Call:
    """An agent's stream on its channel; messages travel as bytes."""
    return channel.stream_stream(contract.SESSION_METHOD, None, None)()  # type: ignore


def open_blocking_channel(endpoint: Endpoint, credentials: Credentials) -> grpc.Channel:
    """A channel for commands of people, without an event loop."""
    options = (*_CHANNEL_OPTIONS, ("grpc.max_receive_message_length", limits.STATUS_BYTES_MAX))
    secure = credentials.client()
    if secure is None:
        return grpc.insecure_channel(str(endpoint), options=options)
    return grpc.secure_channel(str(endpoint), secure, options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A server that holds its port and does not answer yet; callers wait in the kernel's backlog."""

    server: grpc.aio.Server
    endpoint: Endpoint
    """With the real port."""


def bind(endpoint: Endpoint, credentials: Credentials) -> Bound:
    """Take a port. Needs a running event loop.

    Raises:
        PortInUse: somebody listens there.
        SetupError: it cannot be taken for another reason.
    """
    server = grpc.aio.server(options=_SERVER_OPTIONS, maximum_concurrent_rpcs=STREAMS_MAX)
    secure = credentials.server()
    try:
        if secure is None:
            port = server.add_insecure_port(str(endpoint))
        else:
            port = server.add_secure_port(str(endpoint), secure)
    except RuntimeError:
        port = 0
    if port == 0:
        raise _bind_error(endpoint)
    return Bound(server=server, endpoint=Endpoint(host=endpoint.host, port=int(port)))


def _bind_error(endpoint: Endpoint) -> SetupError:
    error = _bind_trouble(endpoint)
    if error.errno == errno.EADDRINUSE:
        return PortInUse(
            "another process listens there",
            where=str(endpoint),
            next_step=f"give another port, or see who has it: ss -ltnp 'sport = :{endpoint.port}'",
        )
    next_step = "check the host of the endpoint: it must be a name or address of this machine"
    if error.errno == errno.EACCES:
        next_step = "choose a port above 1023"
    return SetupError(f"cannot listen ({error.strerror or error})", where=str(endpoint), next_step=next_step)


def _bind_trouble(endpoint: Endpoint) -> OSError:
    """Ask the operating system itself why an address cannot be bound; gRPC does not pass it on."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error
    return OSError(f"gRPC could not listen on {endpoint}")


class Trouble(Enum):
    """Why a connection to a master does not come about."""

    NONE = "none"  # it does: the trouble was over, or is beyond the handshake
    NAME = "name"
    UNREACHABLE = "unreachable"
    SECRET_DIFFERS = "secret_differs"
    CLOCK = "clock"
    NO_TLS_THERE = "no_tls_there"
    TLS_THERE = "tls_there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The trouble, and a sentence about it without a full stop."""

    trouble: Trouble
    sentence: str


_EXPIRED_OR_NOT_YET_VALID = (9, 10)
"""OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""


async def diagnose(endpoint: Endpoint, credentials: Credentials) -> Diagnosis:
    """Connect once more and say what is wrong."""
    try:
        await _connect(endpoint, None)
    except socket.gaierror as error:
        return Diagnosis(trouble=Trouble.NAME, sentence=f"the name cannot be resolved ({error.strerror})")
    except asyncio.TimeoutError:
        sentence = f"nothing answered within {CONNECT_TIMEOUT_S:g} s"
        return Diagnosis(trouble=Trouble.UNREACHABLE, sentence=sentence)
    except OSError as error:
        sentence = os.strerror(error.errno).lower() if error.errno and error.errno > 0 else str(error)
        return Diagnosis(trouble=Trouble.UNREACHABLE, sentence=sentence)
    context = credentials.verifying_context()
    return await (_diagnose_plain(endpoint) if context is None else _diagnose_tls(endpoint, context))


async def _diagnose_tls(endpoint: Endpoint, context: ssl.SSLContext) -> Diagnosis:
    try:
        await _connect(endpoint, context)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in _EXPIRED_OR_NOT_YET_VALID:
            sentence = "the clocks of this node and of the master differ by days"
            return Diagnosis(trouble=Trouble.CLOCK, sentence=sentence)
        sentence = "the secret differs from the master's, or the master serves another job"
        return Diagnosis(trouble=Trouble.SECRET_DIFFERS, sentence=sentence)
    except ssl.SSLError:
        sentence = "what listens there does not ask for a job secret"
        return Diagnosis(trouble=Trouble.NO_TLS_THERE, sentence=sentence)
    except (OSError, asyncio.TimeoutError):
        return Diagnosis(trouble=Trouble.UNREACHABLE, sentence="the connection broke while it was set up")
    return Diagnosis(trouble=Trouble.NONE, sentence="it can be reached now")


async def _diagnose_plain(endpoint: Endpoint) -> Diagnosis:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # only to see whether it speaks TLS; nothing is sent
    context.set_alpn_protocols(["h2"])
    try:
        await _connect(endpoint, context)
    except (OSError, asyncio.TimeoutError):
        return Diagnosis(trouble=Trouble.NONE, sentence="it can be reached now")
    sentence = "the master asks for the job secret, and there is none here"
    return Diagnosis(trouble=Trouble.TLS_THERE, sentence=sentence)


async def _connect(endpoint: Endpoint, context: ssl.SSLContext | None) -> None:
    """Connect, shake hands if there is a context, and hang up."""
    opening = asyncio.open_connection(
        endpoint.host, endpoint.port, ssl=context, server_hostname=SERVER_NAME if context else None
    )
    _, writer = await within(CONNECT_TIMEOUT_S, opening)
    writer.close()
    with contextlib.suppress(OSError, asyncio.TimeoutError):
        await within(CONNECT_TIMEOUT_S, writer.wait_closed())
