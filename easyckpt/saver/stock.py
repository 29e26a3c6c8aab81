"""What a node knows of a step that was saved in another layout, and how it learns it.

A *stock* is the catalog of all pieces of a step, and for each saved rank where its piece can be had, the
nearest first. It is opened once per node: layouts come from this memory, from the savers that hold pieces,
and for what nobody holds from the fragments on storage. A place that fails is struck out and named.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import msgspec

from easyckpt.catalog import Catalog
from easyckpt.errors import CorruptCheckpoint, EasyckptError, SaverUnavailable
from easyckpt.layout import layout_to_dict
from easyckpt.manifest import Manifest
from easyckpt.saver.commits import Threads
from easyckpt.saver.disk import Vault
from easyckpt.saver.holdings import Holdings
from easyckpt.saver.peering import Describe, Described, Source
from easyckpt.saver.persist import LocatedPiece
from easyckpt.saver.protocol import Key
from easyckpt.saver.replicate import TRANSFER_GRACE_S, Dialer
from easyckpt.tiers import DISK, MEMORY, PEER

__all__ = ["Stock", "StockRoom", "describe", "finished"]

QUESTIONS_MAX = 16
"""To peers and storage, at a time."""

_LOG = logging.getLogger("easyckpt.saver")

T = TypeVar("T")


class _Rows(msgspec.Struct):
    """A layout as it travels: what a catalog takes of it."""

    chunks: list[
        tuple[str, str, str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int, str | None]
    ]
    state: tuple[int, int]
    body_bytes: int


@dataclass(slots=True, kw_only=True)
class Stock:
    """See the module."""

    key: Key | None
    """Name of the step in memory."""
    places: dict[int, list[Source]]
    """Saved rank → where its piece can be had, the nearest first."""
    addresses: tuple[str, ...]
    node_rank: int
    vault: Vault | None = None
    manifest: Manifest | None = None
    catalog: Catalog = field(default_factory=Catalog)
    states: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Saved rank → where its plain state lies in its body."""
    located: dict[int, LocatedPiece] = field(default_factory=dict)
    struck: list[Source] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def strike(self, source: Source, error: object) -> None:
        """A place failed."""
        said = str(error) or type(error).__name__
        _LOG.warning("rank %d from %s: %s", source.rank, source.tier, said)
        self.struck.append(source)
        self.errors.append(f"rank {source.rank} from {source.tier}: {said}")
        left = self.places.get(source.rank, [])
        if source in left:
            left.remove(source)
        if not left:
            self.places.pop(source.rank, None)

    def tier_of(self, source: Source) -> str:
        """As it is from here."""
        if source.tier == MEMORY and source.node_rank != self.node_rank:
            return PEER
        return source.tier

    def costs(self, first: int) -> dict[int, int]:
        """What each saved rank's bytes cost here. The rank that the reader takes after comes first: where
        replicas differ, it has that rank's values."""
        order = {MEMORY: 1, PEER: 2, DISK: 3}
        found = {rank: order[self.tier_of(left[0])] for rank, left in self.places.items()}
        if first in found:
            found[first] = 0
        return found

    def tier(self, ranks: Iterable[int]) -> str:
        """The farthest tier that these ranks' bytes come from."""
        tiers = {self.tier_of(self.places[rank][0]) for rank in ranks if rank in self.places}
        return next((tier for tier in (DISK, PEER) if tier in tiers), MEMORY)


class StockRoom:
    """Opens stocks. Used by one member, in the saver's event loop."""

    def __init__(self, generation: int, *, holdings: Holdings, dialer: Dialer, threads: Threads) -> None:
        self._generation = generation
        self._holdings = holdings
        self._dialer = dialer
        self._threads = threads
        self._limit = asyncio.Semaphore(QUESTIONS_MAX)

    async def open(
        self,
        sources: Iterable[Source],
        *,
        key: Key | None,
        addresses: tuple[str, ...],
        node_rank: int,
        root: str = "",
        manifest: bytes = b"",
    ) -> Stock:
        """Learn how all pieces of a step are laid out. Places that fail are struck out.

        Args:
            sources: all that can be had.
            key: name of the step in memory.
            addresses: of all savers.
            node_rank: of this one.
            root: the checkpoint folder, if sources are on storage.
            manifest: JSON, likewise.
        """
        places: dict[int, list[Source]] = {}
        for source in sources:
            places.setdefault(source.rank, []).append(source)
        for left in places.values():
            left.sort(key=lambda item: (item.tier == DISK, item.node_rank != node_rank))
        stock = Stock(key=key, places=places, addresses=addresses, node_rank=node_rank)
        if manifest:
            stock.vault = Vault(root)
            stock.manifest = msgspec.json.decode(manifest, type=Manifest)
        unknown = set(places)
        while unknown:
            known = await self._learn(stock, unknown)
            unknown = {rank for rank in unknown - known if rank in stock.places}
        return stock

    async def _learn(self, stock: Stock, unknown: set[int]) -> set[int]:
        """Ask the first place of each rank for its layout; who is known then."""
        by_node: dict[int, list[Source]] = {}
        on_disk: list[Source] = []
        for rank in sorted(unknown):
            source = stock.places[rank][0]
            if source.tier == DISK:
                on_disk.append(source)
            else:
                by_node.setdefault(source.node_rank, []).append(source)
        before = set(stock.states)
        work = [self._learn_node(stock, node, wanted) for node, wanted in by_node.items()]
        if on_disk:
            work.append(self.learn_disk(stock, on_disk))
        await asyncio.gather(*work)
        return set(stock.states) - before

    async def _learn_node(self, stock: Stock, node: int, wanted: list[Source]) -> None:
        assert stock.key is not None, "a piece in memory has a name"
        try:
            if node == stock.node_rank:
                said = describe(self._holdings, stock.key)
            else:
                async with self._limit:
                    said = await self._ask(stock, node, Describe(generation=self._generation, key=stock.key))
            needed = {source.rank for source in wanted}
            for raw, ranks in zip(said.layouts, said.ranks, strict=True):
                mine = tuple(rank for rank in ranks if rank in needed)
                if mine:
                    await finished(self._threads.hashing, partial(_add_layout, stock, raw, mine))
                    needed -= set(mine)
            error: object = "it is not in memory any more"
        except (EasyckptError, OSError, msgspec.MsgspecError) as trouble:
            error = trouble
            needed = {source.rank for source in wanted if source.rank not in stock.states}
        for source in wanted:
            if source.rank in needed:
                stock.strike(source, error)

    async def _ask(self, stock: Stock, node: int, question: Describe) -> Described:
        if not 0 <= node < len(stock.addresses):
            raise SaverUnavailable(f"node {node} has no address")
        address = stock.addresses[node]
        channel = await self._dialer.connect(address)
        try:
            await channel.send(question)
            return await asyncio.wait_for(channel.expect(Described), TRANSFER_GRACE_S)
        except (OSError, EOFError, asyncio.TimeoutError) as error:
            said = str(error) or type(error).__name__
            raise SaverUnavailable(f"the connection broke: {said}", where=address) from error
        finally:
            channel.close()

    async def learn_disk(self, stock: Stock, wanted: list[Source]) -> None:
        """Find the pieces of these sources on storage."""
        vault, manifest = stock.vault, stock.manifest
        assert vault is not None, "a source on storage comes with its manifest"
        assert manifest is not None, "likewise"
        by_fragment: dict[int, list[Source]] = {}
        for source in wanted:
            ref = manifest.ref_of(source.rank)
            by_fragment.setdefault(-1 if ref is None else ref.node_rank, []).append(source)

        async def one(sources: list[Source]) -> None:
            try:
                async with self._limit:
                    located = await finished(
                        self._threads.storage,
                        partial(vault.locate_all, manifest, tuple(source.rank for source in sources)),
                    )
                await finished(self._threads.hashing, partial(_add_located, stock, located))
            except (EasyckptError, OSError) as error:
                for source in sources:
                    stock.strike(source, error)

        await asyncio.gather(*(one(sources) for sources in by_fragment.values()))


async def finished(executor: Executor, work: Callable[[], T]) -> T:
    """A blocking call's result. Cancelled, it still waits for the call: its buffers are in use till then."""
    running = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        raise


def _add_layout(stock: Stock, raw: bytes, ranks: tuple[int, ...]) -> None:
    layout = msgspec.json.decode(raw, type=_Rows)
    _check_bounds(layout.state, max((row[8] for row in layout.chunks), default=0), layout.body_bytes)
    stock.catalog.add(layout.chunks, ranks=ranks)
    for rank in ranks:
        stock.states[rank] = layout.state


def _add_located(stock: Stock, located: Mapping[int, LocatedPiece]) -> None:
    by_layout: dict[str, list[LocatedPiece]] = {}
    for rank, piece in located.items():
        stock.located[rank] = piece
        if rank not in stock.states:
            by_layout.setdefault(piece.record.layout, []).append(piece)
    for pieces in by_layout.values():
        layout = pieces[0].layout.layout
        rows = layout_to_dict(layout)["chunks"]
        ranks = tuple(piece.record.rank for piece in pieces)
        stock.catalog.add(rows, ranks=ranks)
        for rank in ranks:
            stock.states[rank] = (layout.state_begin, layout.state_end)


def _check_bounds(state: tuple[int, int], last: int, body_bytes: int) -> None:
    if not 0 <= state[0] <= state[1] <= body_bytes or last > body_bytes:
        raise CorruptCheckpoint("a layout goes beyond its body")


def describe(holdings: Holdings, key: Key) -> Described:
    """How this saver's sealed pieces of a step are laid out."""
    found: dict[bytes, list[int]] = {}
    for piece in holdings.of_step(key):
        found.setdefault(piece.layout, []).append(piece.rank)
    return Described(layouts=tuple(found), ranks=tuple(tuple(ranks) for ranks in found.values()))
