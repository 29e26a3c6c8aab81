"""Carrying an assembly out: bytes of other saved ranks, from this memory, a peer's or storage, each fetched
once.

Carrying an assembly (`easyckpt.assembly`) out takes each source's bytes from the nearest place that a stock
(`easyckpt.saver.stock`) has for it. A place that fails (a peer that is gone, a hash that differs) is struck
out and named, and the same bytes are taken from the next one; other sources are not touched by it. Only
when a saved rank has no place left does the caller have to plan anew without it.

Nothing unproved is used: pieces in memory were proved by their digest before (`easyckpt.saver.restore`),
what a peer sends carries a digest of its own, and of storage whole hash chunks are read, each proved and
read once, even if several saved ranks have stored the same bytes: their chunks have the same hash.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from easyckpt.assembly import Assembly, Take, cut, merged, scatter, touched
from easyckpt.digest import bytes_digest, chunk_range
from easyckpt.errors import (
    CorruptCheckpoint,
    EasyckptError,
    IncompleteCheckpoint,
    ProtocolError,
    SaverUnavailable,
)
from easyckpt.saver.channel import AsyncChannel
from easyckpt.saver.commits import Threads
from easyckpt.saver.disk import Vault
from easyckpt.saver.frames import make_failure
from easyckpt.saver.holdings import Holdings
from easyckpt.saver.peering import PullRanges, RangesFollow
from easyckpt.saver.persist import LocatedPiece
from easyckpt.saver.replicate import TRANSFER_FLOOR_BYTES_PER_S, TRANSFER_GRACE_S, Dialer
from easyckpt.saver.stock import Stock, StockRoom, finished
from easyckpt.tiers import DISK, MEMORY, PEER

__all__ = ["Gatherer", "serve_ranges"]

BATCH_BYTES = 64 << 20
"""Of one transfer between savers; also what one reading thread keeps in memory."""

FETCHES_MAX = 4
"""Transfers and readings at a time."""

RANGES_MAX = 1 << 20
"""In one question to a peer."""

_LOG = logging.getLogger("easyckpt.saver")


class Gatherer:
    """Carries assemblies out. Used by one member, in the saver's event loop."""

    def __init__(self, generation: int, *, holdings: Holdings, dialer: Dialer, threads: Threads) -> None:
        self.room = StockRoom(generation, holdings=holdings, dialer=dialer, threads=threads)
        self._generation = generation
        self._holdings = holdings
        self._dialer = dialer
        self._threads = threads
        self._limit = asyncio.Semaphore(FETCHES_MAX)

    async def carry_out(
        self, stock: Stock, assembly: Mapping[int, list[Take]], *, targets: Sequence[memoryview]
    ) -> set[int]:
        """Fill the targets. Returns the saved ranks that have no place left."""
        left: Assembly = {rank: list(takes) for rank, takes in assembly.items() if takes}
        lost: set[int] = set()
        while left:
            by_tier: dict[str, Assembly] = {MEMORY: {}, PEER: {}, DISK: {}}
            for rank, takes in left.items():
                places = stock.places.get(rank)
                if places:
                    by_tier[stock.tier_of(places[0])][rank] = takes
                else:
                    lost.add(rank)
            used = {rank: stock.places[rank][0] for tier in by_tier.values() for rank in tier}
            work = [self._from_memory(stock, rank, takes, targets) for rank, takes in by_tier[MEMORY].items()]
            work += [self._from_peer(stock, rank, takes, targets) for rank, takes in by_tier[PEER].items()]
            work.append(self._from_disk(stock, by_tier[DISK], targets))
            await asyncio.gather(*work)
            left = {
                rank: takes
                for rank, takes in left.items()
                if rank in used and used[rank] not in stock.places.get(rank, [])[:1]
            }
        return lost

    async def _from_memory(
        self, stock: Stock, rank: int, takes: list[Take], targets: Sequence[memoryview]
    ) -> None:
        source = stock.places[rank][0]
        piece = self._holdings.sealed(rank, stock.key, source.digest or None) if stock.key else None
        if piece is None:
            stock.strike(source, "it is not in memory any more")
            return
        with piece.pinned() as body:
            await self.in_thread(partial(scatter, body, takes, targets=targets))

    async def _from_peer(
        self, stock: Stock, rank: int, takes: list[Take], targets: Sequence[memoryview]
    ) -> None:
        source = stock.places[rank][0]
        assert stock.key is not None
        try:
            async with self._limit:
                if not 0 <= source.node_rank < len(stock.addresses):
                    raise SaverUnavailable(f"node {source.node_rank} has no address")
                await self._pull_ranges(
                    stock.addresses[source.node_rank],
                    question=PullRanges(generation=self._generation, key=stock.key, rank=rank, ranges=()),
                    takes=takes,
                    targets=targets,
                )
        except EasyckptError as error:
            stock.strike(source, error)

    async def _pull_ranges(
        self, address: str, *, question: PullRanges, takes: list[Take], targets: Sequence[memoryview]
    ) -> None:
        intervals = merged(takes, length_max=BATCH_BYTES)
        parts = cut(takes, intervals)
        channel = await self._dialer.connect(address)
        try:
            for first, last in _batches(intervals):
                ranges = tuple((begin, end - begin) for begin, end in intervals[first:last])
                total = sum(length for _, length in ranges)
                deadline = TRANSFER_GRACE_S + total / TRANSFER_FLOOR_BYTES_PER_S
                await channel.send(msgspec.structs.replace(question, ranges=ranges))
                answer = await asyncio.wait_for(channel.expect(RangesFollow), TRANSFER_GRACE_S)
                if answer.byte_count != total:
                    raise CorruptCheckpoint(
                        f"{answer.byte_count} bytes came instead of {total}", where=address
                    )
                buffer = bytearray(total)
                view = memoryview(buffer)
                await asyncio.wait_for(channel.receive_into(view), deadline)
                if await self.in_thread(partial(bytes_digest, view)) != answer.digest:
                    raise CorruptCheckpoint("other bytes arrived than were sent", where=address)
                at = 0
                for (begin, end), served in zip(intervals[first:last], parts[first:last], strict=True):
                    piece = view[at : at + end - begin]
                    await self.in_thread(partial(scatter, piece, served, targets=targets))
                    at += end - begin
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            said = str(error) or type(error).__name__
            raise SaverUnavailable(f"the transfer broke: {said}", where=address) from error
        finally:
            channel.close()

    async def _from_disk(self, stock: Stock, assembly: Assembly, targets: Sequence[memoryview]) -> None:
        """Read each distinct hash chunk once, and give it to all that want something of it."""
        vault, manifest = stock.vault, stock.manifest
        if not assembly or vault is None or manifest is None:
            return
        lacking = [stock.places[rank][0] for rank in assembly if rank not in stock.located]
        if lacking:  # it was known from memory, which failed
            await self.room.learn_disk(stock, lacking)
        shared: dict[tuple[str, int], list[tuple[int, int, list[Take]]]] = {}
        for rank, takes in assembly.items():
            located = stock.located.get(rank)
            if located is None or rank not in stock.places:
                continue
            record = located.record
            numbers = touched(takes, chunk_bytes=record.hash_chunk_bytes)
            if numbers and numbers[-1] >= len(record.chunk_hashes):
                stock.strike(stock.places[rank][0], "its layout goes beyond its body")
                continue
            spans = [
                chunk_range(number, length=record.bytes, chunk_bytes=record.hash_chunk_bytes)
                for number in numbers
            ]
            for number, span, served in zip(numbers, spans, cut(takes, spans), strict=True):
                same = shared.setdefault((record.chunk_hashes[number], span[1] - span[0]), [])
                same.append((rank, number, served))

        async def one(same: list[tuple[int, int, list[Take]]], length: int) -> None:
            for rank, number, _ in same:
                source = next(iter(stock.places.get(rank, ())), None)
                if source is None or source.tier != DISK:
                    continue
                served = [take for _, _, takes in same for take in takes]
                read = partial(
                    _read_chunk,
                    vault,
                    stock.located[rank],
                    number=number,
                    length=length,
                    takes=served,
                    targets=targets,
                )
                try:
                    async with self._limit:
                        await self._storage(read)
                    return
                except (EasyckptError, OSError) as error:
                    stock.strike(source, error)

        await asyncio.gather(*(one(same, length) for (_, length), same in shared.items()))

    async def in_thread(self, work: Any) -> Any:
        """A blocking call's result."""
        return await finished(self._threads.hashing, work)

    async def _storage(self, work: Any) -> Any:
        return await finished(self._threads.storage, work)


def _batches(intervals: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """Slices of a list of intervals, each of at most `BATCH_BYTES` and `RANGES_MAX`."""
    first, total = 0, 0
    for number, (begin, end) in enumerate(intervals):
        if number > first and (total + end - begin > BATCH_BYTES or number - first >= RANGES_MAX):
            yield first, number
            first, total = number, 0
        total += end - begin
    if first < len(intervals):
        yield first, len(intervals)


def _read_chunk(
    vault: Vault,
    located: LocatedPiece,
    *,
    number: int,
    length: int,
    takes: list[Take],
    targets: Sequence[memoryview],
) -> None:
    buffer = bytearray(length)
    with memoryview(buffer) as view:
        vault.read_chunk(located, number, into=view)
        scatter(view, takes, targets=targets)


async def serve_ranges(channel: AsyncChannel, message: PullRanges, holdings: Holdings) -> None:
    """The other side of a pull of ranges: questions about one piece until the connection ends."""
    while True:
        piece = holdings.sealed(message.rank, message.key)
        try:
            if piece is None:
                raise IncompleteCheckpoint(
                    f"rank {message.rank} of step {message.key.step} is not in this saver's memory"
                )
            with piece.pinned() as body:
                data = _joined(body, message.ranges)
        except EasyckptError as error:
            await channel.send(make_failure(error))
            return
        answer = RangesFollow(byte_count=len(data), digest=bytes_digest(data))
        await channel.send(answer, body=memoryview(data))
        message = await channel.expect(PullRanges)


def _joined(body: memoryview, ranges: tuple[tuple[int, int], ...]) -> bytes:
    total = sum(length for _, length in ranges)
    outside = any(begin < 0 or length < 0 or begin + length > len(body) for begin, length in ranges)
    if outside or total > BATCH_BYTES:
        raise ProtocolError(f"{len(ranges)} ranges of {total} bytes do not lie within a piece and a batch")
    return b"".join(body[begin : begin + length] for begin, length in ranges)
