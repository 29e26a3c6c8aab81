"""Pieces between savers: a copy put into a peer's memory, or pulled from it.

Each transfer has a TCP connection of its own, so that a slow one holds up nothing else. The bytes are sent
from the slot and received into a slot; the receiver hashes them and answers only if the digest is right.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from easyckpt.digest import BodyDigest, bytes_digest, chunk_count, chunk_range
from easyckpt.errors import (
    CorruptCheckpoint,
    EasyckptError,
    IncompleteCheckpoint,
    MemoryFull,
    SaverUnavailable,
)
from easyckpt.saver.auth import prove_as_client
from easyckpt.saver.channel import AsyncChannel
from easyckpt.saver.frames import make_failure
from easyckpt.saver.holdings import Holdings, Piece, SlotsBusy
from easyckpt.saver.peering import Piece as PieceFollows
from easyckpt.saver.peering import Pull, Put, Send
from easyckpt.saver.protocol import Done, Held, Key

__all__ = ["Dialer", "accept_put", "digest_piece", "parse_address", "pull", "put", "serve_pull"]

CONNECT_TIMEOUT_S = 10.0
TRANSFER_FLOOR_BYTES_PER_S = 20 << 20
"""A slower peer is given up: it would hold the slots for minutes."""
TRANSFER_GRACE_S = 30.0

_LOG = logging.getLogger("easyckpt.saver")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialer:
    """Connects to other savers of the job."""

    job_id: str
    secret: bytes

    async def connect(self, address: str) -> AsyncChannel:
        """A proved connection.

        Raises:
            SaverUnavailable: nobody answers there, or not the right one.
        """
        host, port = parse_address(address)
        try:
            sock = await asyncio.wait_for(_open(host, port), CONNECT_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            raise SaverUnavailable(
                f"a peer's saver cannot be reached: {error or 'no answer'}", where=address
            ) from error
        channel = AsyncChannel(sock)
        try:
            await prove_as_client(channel, secret=self.secret, job_id=self.job_id)
        except BaseException:
            channel.close()
            raise
        return channel


async def _open(host: str, port: int) -> socket.socket:
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    trouble: OSError | None = None
    for family, kind, protocol, _, target in infos:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, target)
        except OSError as error:
            sock.close()
            trouble = error
            continue
        except BaseException:
            sock.close()
            raise
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock
    raise trouble or OSError(f"{host} has no address")


def parse_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``.

    Raises:
        SaverUnavailable: it is neither.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise SaverUnavailable("this is no address of a saver", where=address)
    return host.strip("[]"), int(port)


def _deadline_s(body_bytes: int) -> float:
    return TRANSFER_GRACE_S + body_bytes / TRANSFER_FLOOR_BYTES_PER_S


async def digest_piece(piece: Piece, executor: Executor) -> BodyDigest:
    """Hash a piece's bytes in the threads of the executor."""
    loop = asyncio.get_running_loop()
    with piece.pinned() as body:
        ranges = [chunk_range(index, length=len(body)) for index in range(chunk_count(len(body)))]
        work = [loop.run_in_executor(executor, bytes_digest, body[begin:end]) for begin, end in ranges]
        try:
            return BodyDigest.of(await asyncio.shield(asyncio.gather(*work)))
        except asyncio.CancelledError:
            await asyncio.wait(work)  # threads read the slot until they are done
            raise


async def put(
    dialer: Dialer, address: str, *, piece: Piece, generation: int, protect: tuple[Key, ...]
) -> None:
    """Have a peer keep a copy; returns when it has proved it.

    Raises:
        EasyckptError: it cannot: unreachable, too slow, no memory, busy.
    """
    channel = await dialer.connect(address)
    try:
        await asyncio.wait_for(_put(channel, piece, generation, protect), _deadline_s(piece.body_bytes))
    except (OSError, EOFError, asyncio.TimeoutError) as error:
        said = str(error) or type(error).__name__
        raise SaverUnavailable(f"the transfer broke: {said}", where=address) from error
    finally:
        channel.close()


async def _put(channel: AsyncChannel, piece: Piece, generation: int, protect: tuple[Key, ...]) -> None:
    question = Put(
        generation=generation,
        held=piece.held,
        layout=piece.layout,
        body_bytes=piece.body_bytes,
        protect=protect,
    )
    with piece.pinned() as body:
        await channel.send(question)
        answer = await channel.expect(Send)
        if answer.wanted:
            await channel.send(Done(), body=body)
        await channel.expect(Done)


async def accept_put(
    channel: AsyncChannel, message: Put, *, holdings: Holdings, executor: Executor
) -> Piece | None:
    """The other side of `put`. Returns the copy, or None when it was refused."""
    held = message.held
    if holdings.sealed(held.rank, held.key, held.digest) is not None:
        await channel.send(Send(wanted=False))
        await channel.send(Done())
        return None
    try:
        piece = holdings.place(
            held, layout=message.layout, body_bytes=message.body_bytes, protect=message.protect
        )
    except SlotsBusy:
        await channel.send(make_failure(SaverUnavailable("both slots of the peer are in use")))
        return None
    except MemoryFull as error:
        await channel.send(make_failure(error))
        return None
    await channel.send(Send(wanted=True))
    try:
        await channel.expect(Done)
        await _fill(channel, piece, held.digest, executor)
    except BaseException as error:
        holdings.drop(piece)
        if isinstance(error, EasyckptError):
            await channel.send(make_failure(error))
            return None
        raise
    await channel.send(Done())
    return piece


async def _fill(channel: AsyncChannel, piece: Piece, digest: str, executor: Executor) -> None:
    with piece.pinned() as body:
        await channel.receive_into(body)
    found = await digest_piece(piece, executor)
    if found.whole != digest:
        raise CorruptCheckpoint(
            f"rank {piece.rank} of step {piece.key.step} arrived with other bytes than were sent"
        )
    piece.seal(found)


async def pull(
    dialer: Dialer, address: str, *, question: Pull, target: Held, holdings: Holdings, executor: Executor
) -> Piece:
    """Fetch a piece from a peer's memory into a slot of ours, proved.

    Args:
        dialer: connects.
        address: the peer.
        question: which piece, by the name that the peer knows.
        target: what it is called here, and the digest that it must have.
        holdings: where it goes, beside everything that is there.
        executor: hashes.

    Raises:
        EasyckptError: it cannot be had from there.
    """
    channel = await dialer.connect(address)
    piece: Piece | None = None
    try:
        await channel.send(question)
        answer = await asyncio.wait_for(channel.expect(PieceFollows), TRANSFER_GRACE_S)
        held = msgspec.structs.replace(target, data=answer.held.data)
        piece = holdings.place_beside(held, layout=answer.layout, body_bytes=answer.body_bytes)
        holdings.note_roster(target.key, answer.held.roster)
        await asyncio.wait_for(_fill(channel, piece, target.digest, executor), _deadline_s(answer.body_bytes))
    except BaseException as error:
        if piece is not None:
            holdings.drop(piece)
        if isinstance(error, (OSError, EOFError, asyncio.TimeoutError)):
            said = str(error) or type(error).__name__
            raise SaverUnavailable(f"the transfer broke: {said}", where=address) from error
        raise
    finally:
        channel.close()
    return piece


async def serve_pull(channel: AsyncChannel, message: Pull, holdings: Holdings) -> None:
    """The other side of `pull`."""
    piece = holdings.sealed(message.rank, message.key)
    if piece is None:
        error = IncompleteCheckpoint(
            f"rank {message.rank} of step {message.key.step} is not in this saver's memory"
        )
        await channel.send(make_failure(error))
        return
    with piece.pinned() as body:
        answer = PieceFollows(held=holdings.told(piece), layout=piece.layout, body_bytes=piece.body_bytes)
        await channel.send(answer, body=body)
