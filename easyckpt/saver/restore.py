"""A member's side of a restore: its ranks' pieces lie ready in memory, every byte proved, before any rank
reads.

Nothing that is held is overwritten: pieces that come from a peer or from storage go into slots beside the two
that a rank has, and only when all nodes are ready (`Go`) is everything else dropped. So an attempt that
fails, here or on another node, leaves every older step as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import msgspec

from easyckpt.digest import chunk_range
from easyckpt.errors import CorruptCheckpoint, EasyckptError, IncompleteCheckpoint, SaverUnavailable
from easyckpt.layout import encode_layout
from easyckpt.manifest import Manifest
from easyckpt.piece import PieceRecord
from easyckpt.saver.commits import Threads
from easyckpt.saver.disk import Vault
from easyckpt.saver.gather import Gatherer
from easyckpt.saver.holdings import Holdings, Piece, SlotsBusy
from easyckpt.saver.peering import Prepare, Prepared, Pull, Source
from easyckpt.saver.persist import LocatedPiece
from easyckpt.saver.protocol import Begin, Held, Key
from easyckpt.saver.replicate import Dialer, digest_piece, pull
from easyckpt.saver.reserving import Reserver
from easyckpt.tiers import DISK, MEMORY

__all__ = ["Restorer"]

PIECES_AT_ONCE = 4
"""While memory is reserved for one, another one is read."""

_LOG = logging.getLogger("easyckpt.saver")


class Restorer:
    """Gets pieces ready. Used by one member, in the saver's event loop.

    Args:
        begin: the generation and this node's place in it.
        holdings: where pieces are.
        dialer: to other savers.
        threads: for hashing and reading.
    """

    def __init__(self, begin: Begin, *, holdings: Holdings, dialer: Dialer, threads: Threads) -> None:
        self.gatherer = Gatherer(begin.generation, holdings=holdings, dialer=dialer, threads=threads)
        """For steps of another layout."""
        self._holdings = holdings
        self._reserver = Reserver(holdings)
        self._dialer = dialer
        self._threads = threads
        self._generation = begin.generation
        self._world_size = begin.world_size

    async def prepare(self, message: Prepare, *, node_rank: int, addresses: tuple[str, ...]) -> Prepared:
        """Get all pieces of an order ready, a few at a time; those that cannot be had are named.

        Pieces whose bytes are stored once for several ranks come last: what another rank here has read is
        copied from there.
        """
        failed: list[Source] = []
        errors: list[str] = []
        shared: list[tuple[Source, LocatedPiece]] = []
        loaded: list[tuple[PieceRecord, Piece]] = []
        limit = asyncio.Semaphore(PIECES_AT_ONCE)
        sources = message.sources
        if message.saved_ranks:  # each node proves what it holds; who needs what of it is found later
            sources = tuple(item for item in sources if item.tier == MEMORY and item.node_rank == node_rank)

        async def ready(source: Source) -> None:
            if source.tier != DISK:
                await self._one(message, source, addresses)
                return
            located = await self._locate(message, source)
            if located.record.extents:
                shared.append((source, located))
            else:
                await self._from_disk(message, source, located, loaded)

        async def noted(source: Source, work: Callable[[], Awaitable[None]]) -> None:
            try:
                async with limit:
                    await work()
            except (EasyckptError, OSError, SlotsBusy) as error:
                said = str(error) or "its slot is in use"
                _LOG.warning("rank %d of step %d: %s", source.rank, message.key.step, said)
                failed.append(source)
                errors.append(f"rank {source.rank} from {source.tier}: {said}")

        await asyncio.gather(*(noted(source, partial(ready, source)) for source in sources))
        for source, located in shared:
            await noted(source, partial(self._from_disk, message, source, located, loaded))
        return Prepared(
            node_rank=node_rank,
            index=message.index,
            attempt=message.attempt,
            failed=tuple(failed),
            errors=tuple(errors),
        )

    async def _one(self, message: Prepare, source: Source, addresses: tuple[str, ...]) -> None:
        if message.from_key is None:
            raise IncompleteCheckpoint("a piece in memory has no name")
        if source.tier == MEMORY:
            await self._verify_own(message.from_key, source)
            return
        if not 0 <= source.node_rank < len(addresses):
            raise SaverUnavailable(f"node {source.node_rank} has no address")
        await pull(
            self._dialer,
            addresses[source.node_rank],
            question=Pull(generation=self._generation, key=message.from_key, rank=source.rank),
            target=self._target(message.key, source),
            holdings=self._holdings,
            executor=self._threads.hashing,
        )

    def _target(self, key: Key, source: Source) -> Held:
        return Held(key=key, rank=source.rank, world_size=self._world_size, digest=source.digest)

    async def _verify_own(self, key: Key, source: Source) -> None:
        piece = self._holdings.sealed(source.rank, key, source.digest)
        if piece is None:
            raise IncompleteCheckpoint("it is not in memory any more")
        if (await digest_piece(piece, self._threads.hashing)).whole != piece.digest:
            self._holdings.drop(piece)
            raise CorruptCheckpoint(
                "its bytes in memory changed after it was sealed", hint="test this machine's memory"
            )

    async def _locate(self, message: Prepare, source: Source) -> LocatedPiece:
        manifest = msgspec.json.decode(message.manifest, type=Manifest)
        locate = partial(Vault(message.root).locate, manifest, source.rank)
        return await asyncio.get_running_loop().run_in_executor(self._threads.storage, locate)

    async def _from_disk(
        self,
        message: Prepare,
        source: Source,
        located: LocatedPiece,
        loaded: list[tuple[PieceRecord, Piece]],
    ) -> None:
        target = Held(
            key=message.key, rank=source.rank, world_size=self._world_size, digest=located.record.digest
        )
        layout = encode_layout(located.layout.layout, header_bytes=located.layout.header_bytes)
        room = located.record.bytes
        await self._reserver.beside(target, body_bytes=room)
        piece: Piece = self._holdings.place_beside(target, layout=layout, body_bytes=room, in_parts=True)
        try:
            with contextlib.ExitStack() as pins:
                body = pins.enter_context(piece.pinned())
                have = {
                    index: pins.enter_context(_chunk_of(twin, record, index))
                    for index, (record, twin) in _twins(located.record, loaded).items()
                }
                vault = Vault(message.root)

                def load() -> None:
                    vault.load(located, body, have=have, reserve=piece.slot.reserve)
                    piece.slot.finish(room)

                work = asyncio.get_running_loop().run_in_executor(self._threads.storage, load)
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    await asyncio.wait({work})  # the thread writes into the slot until it is done
                    raise
        except BaseException:
            self._holdings.drop(piece)
            raise
        piece.seal(located.record.seal)
        loaded.append((located.record, piece))


def _twins(
    record: PieceRecord, loaded: list[tuple[PieceRecord, Piece]]
) -> dict[int, tuple[PieceRecord, Piece]]:
    """Chunk → a piece that is here already and has an equal one, for what is stored once."""
    found: dict[int, tuple[PieceRecord, Piece]] = {}
    if not record.extents:
        return found
    for other, piece in loaded:
        if (other.hash_chunk_bytes, other.bytes) == (record.hash_chunk_bytes, record.bytes):
            for index, (mine, theirs) in enumerate(zip(record.chunk_hashes, other.chunk_hashes, strict=True)):
                if mine == theirs:
                    found.setdefault(index, (other, piece))
    return found


@contextlib.contextmanager
def _chunk_of(piece: Piece, record: PieceRecord, index: int) -> Iterator[memoryview]:
    begin, end = chunk_range(index, length=record.bytes, chunk_bytes=record.hash_chunk_bytes)
    with piece.pinned() as body, body[begin:end] as chunk:
        yield chunk
