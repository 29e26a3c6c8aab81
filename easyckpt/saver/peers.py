"""Connections from other savers: members of a generation that is led here, and pieces that come and go."""

from __future__ import annotations

import logging
import socket
from typing import Protocol

from easyckpt.errors import EasyckptError, ProtocolError, StaleGeneration
from easyckpt.saver.auth import SECRET_BYTES_MIN, prove_as_server
from easyckpt.saver.channel import AsyncChannel
from easyckpt.saver.commits import Threads
from easyckpt.saver.frames import make_failure
from easyckpt.saver.gather import serve_ranges
from easyckpt.saver.holdings import Holdings
from easyckpt.saver.lead import Lead
from easyckpt.saver.member import Member
from easyckpt.saver.peering import Describe, Link, Pull, PullRanges, Put, Register
from easyckpt.saver.protocol import Message
from easyckpt.saver.replicate import accept_put, serve_pull
from easyckpt.saver.stock import describe
from easyckpt.saver.uplink import Outbox, pump

__all__ = ["PeerHost", "serve_peer"]

_LOG = logging.getLogger("easyckpt.saver")


class PeerHost(Protocol):
    """What a peer's connection needs from the saver."""

    @property
    def lead(self) -> Lead | None: ...

    @property
    def member(self) -> Member | None: ...

    @property
    def holdings(self) -> Holdings: ...

    @property
    def secret(self) -> bytes: ...


async def serve_peer(sock: socket.socket, host: PeerHost, *, job_id: str, threads: Threads) -> None:
    """Serve one TCP connection to its end: who knows the secret, and nobody else."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = AsyncChannel(sock)
    try:
        if len(host.secret) < SECRET_BYTES_MIN:
            raise ProtocolError("a connection came, and there is no secret to prove it with")
        await prove_as_server(channel, secret=host.secret, job_id=job_id)
        await _serve(channel, await channel.receive(), host, threads=threads)
    except (EOFError, OSError):
        pass
    except EasyckptError as error:
        _LOG.warning("a peer was refused: %s", error)
    finally:
        channel.close()


async def _serve(channel: AsyncChannel, message: Message, host: PeerHost, *, threads: Threads) -> None:
    if isinstance(message, Link):
        await _serve_member(channel, host.lead)
        return
    current = host.member.begin.generation if host.member is not None else -1
    if isinstance(message, (Put, Pull, PullRanges, Describe)) and message.generation != current:
        error = StaleGeneration(f"generation {message.generation} is not this saver's, {current}")
        await channel.send(make_failure(error))
    elif isinstance(message, Put):
        await accept_put(channel, message, holdings=host.holdings, executor=threads.hashing)
    elif isinstance(message, Pull):
        await serve_pull(channel, message, host.holdings)
    elif isinstance(message, PullRanges):
        await serve_ranges(channel, message, host.holdings)
    elif isinstance(message, Describe):
        await channel.send(describe(host.holdings, message.key))
    else:
        raise ProtocolError(f"{type(message).__name__} is no first message of a peer")


async def _serve_member(channel: AsyncChannel, lead: Lead | None) -> None:
    first = await channel.expect(Register)
    if lead is None or lead.begin.generation != first.generation:
        return  # it tries again until this node has begun its generation
    outbox = Outbox(channel)
    lead.receive(first.node_rank, first, outbox.put)
    try:
        await pump(channel, outbox, lambda message: lead.receive(first.node_rank, message, outbox.put))
    finally:
        lead.forget(first.node_rank, outbox.put)
