"""A member's side of a restore: its ranks' pieces lie ready in memory, every byte proved, before any rank
reads.

Nothing that is held is overwritten: pieces that come from a peer or from storage go into slots beside the two
that a rank has, and only when all nodes are ready (`Go`) is everything else dropped. So an attempt that
fails, here or on another node, leaves every older step as it was.
"""

from __future__ import annotations

import asyncio
import json
import logging
from functools import partial

import msgspec

from easyckpt.errors import CorruptCheckpoint, EasyckptError, IncompleteCheckpoint, SaverUnavailable
from easyckpt.layout import layout_to_dict
from easyckpt.manifest import Manifest
from easyckpt.saver.commits import Threads
from easyckpt.saver.disk import Vault
from easyckpt.saver.gather import Gatherer
from easyckpt.saver.holdings import Holdings, Piece, SlotsBusy
from easyckpt.saver.peering import Prepare, Prepared, Pull, Source
from easyckpt.saver.protocol import Begin, Held, Key
from easyckpt.saver.replicate import Dialer, digest_piece, pull
from easyckpt.tiers import DISK, MEMORY

__all__ = ["Restorer"]

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
        self._dialer = dialer
        self._threads = threads
        self._generation = begin.generation
        self._world_size = begin.world_size

    async def prepare(self, message: Prepare, *, node_rank: int, addresses: tuple[str, ...]) -> Prepared:
        """Get all pieces of an order ready, one after the other; those that cannot be had are named."""
        failed: list[Source] = []
        errors: list[str] = []
        sources = message.sources
        if message.saved_ranks:  # each node proves what it holds; who needs what of it is found later
            sources = tuple(item for item in sources if item.tier == MEMORY and item.node_rank == node_rank)
        for source in sources:
            try:
                await self._one(message, source, addresses)
            except (EasyckptError, OSError, SlotsBusy) as error:
                said = str(error) or "its slot is in use"
                _LOG.warning("rank %d of step %d: %s", source.rank, message.key.step, said)
                failed.append(source)
                errors.append(f"rank {source.rank} from {source.tier}: {said}")
        return Prepared(
            node_rank=node_rank,
            index=message.index,
            attempt=message.attempt,
            failed=tuple(failed),
            errors=tuple(errors),
        )

    async def _one(self, message: Prepare, source: Source, addresses: tuple[str, ...]) -> None:
        if source.tier == DISK:
            await self._from_disk(message, source)
            return
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

    async def _from_disk(self, message: Prepare, source: Source) -> None:
        loop = asyncio.get_running_loop()
        vault = Vault(message.root)
        manifest = msgspec.json.decode(message.manifest, type=Manifest)
        located = await loop.run_in_executor(
            self._threads.storage, partial(vault.locate, manifest, source.rank)
        )
        target = Held(
            key=message.key, rank=source.rank, world_size=self._world_size, digest=located.record.digest
        )
        layout = json.dumps(
            {**layout_to_dict(located.layout.layout), "header_bytes": located.layout.header_bytes}
        ).encode()
        piece: Piece = self._holdings.place_beside(target, layout=layout, body_bytes=located.record.bytes)
        try:
            with piece.pinned() as body:
                work = loop.run_in_executor(self._threads.storage, partial(vault.load, located, body))
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    await asyncio.wait({work})  # the thread writes into the slot until it is done
                    raise
        except BaseException:
            self._holdings.drop(piece)
            raise
        piece.seal(located.record.seal)
