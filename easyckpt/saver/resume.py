"""The loads of one node's ranks: each waits until the lead has every rank's piece proved, then reads its own.

The counterpart of `easyckpt.saver.rounds` on a member. A step that was saved by another number of ranks is
first offered to each rank, and what the ranks want of it is put together (`easyckpt.saver.reshape`) before
the lead lets anybody read. By the same means a rank whose own piece lacks something (the same number of
ranks, and another layout) gets it from the pieces of all ranks, which are in memory and proved by then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from easyckpt.errors import EasyckptError, IncompleteCheckpoint, Misuse, SaverUnavailable
from easyckpt.saver.commits import Spawn
from easyckpt.saver.frames import make_failure, read_failure
from easyckpt.saver.holdings import Holdings, Piece
from easyckpt.saver.peering import Go, LoadWanted, Prepare, Prepared, RankLoaded, Source
from easyckpt.saver.protocol import Begin, Failure, Key, LoadOffer, LoadWant, Message, Restored
from easyckpt.saver.reshape import Reshaper, first_of
from easyckpt.saver.restore import Restorer
from easyckpt.saver.stock import Stock
from easyckpt.saver.upkeep import UNFORESEEN, Upkeep
from easyckpt.tiers import MEMORY

__all__ = ["Ready", "ResumeHost", "Resumes"]

WANT_TIMEOUT_S = 900.0
"""How long a rank may take from the offer of a step to its answer. Then the step is refused, naming the
rank."""


class ResumeHost(Protocol):
    """What the loads need from the member."""

    def check_refused(self) -> None:
        """Raise if this node does not fit to the others, or its generation is over."""
        ...

    def changed(self) -> Coroutine[Any, Any, object]:
        """To be awaited: ends when anything has changed since this call."""
        ...

    def wake(self) -> None:
        """Something changed."""
        ...

    def history_begins(self, step: int | None, *, durable: bool) -> None:
        """All ranks resume from here."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a rank reads."""

    step: int
    piece: Piece
    tier: str


@dataclass(slots=True, kw_only=True)
class _Load:
    """What is known of one load."""

    rank: int = -1
    """The first rank that asked; -1 while none has."""
    step: int | None = None
    prepare: Prepare | None = None
    go: Go | None = None
    tiers: dict[int, str] = field(default_factory=dict)
    stock: Stock | None = None
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    offers: dict[int, LoadOffer] = field(default_factory=dict)
    wants: dict[int, LoadWant] = field(default_factory=dict)
    made: dict[int, tuple[Piece, str]] = field(default_factory=dict)

    def forget(self) -> None:
        """What was put together for an attempt that failed."""
        for piece, _ in self.made.values():
            piece.unpin()
        self.made.clear()
        self.offers.clear()
        self.wants.clear()


class Resumes:
    """See the module. Runs in the saver's event loop."""

    def __init__(
        self,
        begin: Begin,
        *,
        holdings: Holdings,
        upkeep: Upkeep,
        restorer: Restorer,
        spawn: Spawn,
        send: Callable[[Message], None],
        host: ResumeHost,
    ) -> None:
        self._begin = begin
        self._holdings = holdings
        self._upkeep = upkeep
        self._restorer = restorer
        self._reshaper = Reshaper(restorer.gatherer, holdings=holdings)
        self._spawn = spawn
        self._send = send
        self._host = host
        self._loads: dict[int, _Load] = {}
        self.restored: dict[int, Restored] = {}

    def ask_again(self) -> None:
        """There is a new connection to the lead: what was not answered is asked once more."""
        for index, load in self._loads.items():
            if load.go is None and load.rank >= 0:
                self._send(LoadWanted(rank=load.rank, index=index, step=load.step))

    async def load(self, rank: int, index: int, step: int | None) -> Ready | LoadOffer | None:
        """A rank's load: what it may read when every rank's piece is ready, or an offer to answer before.

        Raises:
            EasyckptError: nothing can be loaded, though something should.
        """
        load = self._loads.setdefault(index, _Load())
        if load.rank < 0:
            load.rank, load.step = rank, step
        self._send(LoadWanted(rank=rank, index=index, step=step))
        ready = await self._ready(rank, load)
        if load.go is not None and load.go.asked != step:
            said = ["the newest" if item is None else f"step {item}" for item in (step, load.go.asked)]
            raise Misuse(
                f"rank {rank} asks for {said[0]}, and another rank for {said[1]}",
                hint="every rank has to call load with the same step",
            )
        return ready

    async def _ready(self, rank: int, load: _Load) -> Ready | LoadOffer | None:
        while load.go is None:
            offer = load.offers.pop(rank, None)
            if offer is not None:
                return offer
            self._host.check_refused()
            await self._host.changed()
        go = load.go
        if go.failure is not None:
            raise read_failure(go.failure)
        if go.step is None:
            return None
        made = load.made.pop(rank, None)
        if made is not None:
            return Ready(step=go.step, piece=made[0], tier=made[1])
        piece = self._holdings.sealed(rank, Key(self._begin.generation, go.step))
        if piece is None or piece.world_size != self._begin.world_size:
            raise IncompleteCheckpoint(
                f"step {go.step} of rank {rank} is not in memory any more", hint="load before the next save"
            )
        piece.pin()
        return Ready(step=go.step, piece=piece, tier=load.tiers.get(rank, MEMORY))

    def loaded(self, rank: int, step: int, tier: str) -> None:
        """The rank has read its piece."""
        self.restored[rank] = Restored(rank=rank, step=step, tier=tier)
        self._send(RankLoaded(rank=rank, step=step, tier=tier))

    def gone(self, rank: int) -> None:
        """The rank's connection has ended: what is kept for it is given back, and nobody waits for it."""
        for load in self._loads.values():
            made = load.made.pop(rank, None)
            if made is not None:
                made[0].unpin()
            if load.go is None and load.prepare is not None and load.prepare.assemble:
                what = f"rank {rank} is gone"
                load.wants[rank] = LoadWant(
                    index=load.prepare.index,
                    attempt=load.prepare.attempt,
                    refusal=Failure(kind="SaverUnavailable", what=what),
                )
        self._host.wake()

    def prepare(self, order: Prepare) -> None:
        """The lead wants the pieces of this node's ranks."""
        load = self._loads.setdefault(order.index, _Load())
        load.prepare = order
        load.forget()
        self._spawn(self._assemble(load, order) if order.assemble else self._prepare(order), "a restore")

    async def _prepare(self, order: Prepare) -> None:
        await self._upkeep.ready.wait()
        answer = await self._restorer.prepare(
            order, node_rank=self._begin.node_rank, addresses=self._upkeep.addresses
        )
        self._send(answer)

    # --- a step of another layout ---

    async def _assemble(self, load: _Load, order: Prepare) -> None:
        """Offer the step to this node's ranks, and put together what they want."""
        await self._upkeep.ready.wait()
        stock: Stock | None = None
        error: EasyckptError | None = SaverUnavailable(UNFORESEEN)
        try:
            stock = load.stock = await self._open(order, order.sources, key=order.from_key)
            load.offers = await self._reshaper.offers(
                stock,
                self._firsts(order),
                step=order.key.step,
                attempt=order.attempt,
                saved_ranks=order.saved_ranks,
                seed=_seed(stock, order.sources),
            )
            self._host.wake()
            wants = await self._wanted(load, order)
            made = await self._reshaper.make(
                stock,
                {rank: want.chunks for rank, want in wants.items()},
                key=order.key,
                firsts=self._firsts(order),
                saved_ranks=order.saved_ranks,
            )
            if load.prepare is not order:
                for piece, _ in made.values():
                    piece.unpin()
                return
            load.made = made
            error = None
        except EasyckptError as trouble:
            error = trouble
        finally:
            if load.prepare is order:
                self._report(order, stock, error)

    def _firsts(self, order: Prepare) -> dict[int, int]:
        """The saved rank that each rank of this node takes after. By the order, not by what can be had here:
        a place that fails is reported, and never made good by other values."""
        there = {source.rank for source in order.sources}
        return {rank: first_of(rank, order.saved_ranks, there) for rank in self._upkeep.ranks}

    def _report(self, order: Prepare, stock: Stock | None, error: EasyckptError | None) -> None:
        failed = tuple(stock.struck) if stock is not None and error is not None else ()
        self._send(
            Prepared(
                node_rank=self._begin.node_rank,
                index=order.index,
                attempt=order.attempt,
                failed=failed,
                errors=tuple(stock.errors) if stock is not None and failed else (),
                refusal=make_failure(error) if error is not None and not failed else None,
            )
        )

    async def _open(self, order: Prepare, sources: tuple[Source, ...], *, key: Key | None) -> Stock:
        return await self._reshaper.gatherer.room.open(
            sources,
            key=key,
            addresses=self._upkeep.addresses,
            node_rank=self._begin.node_rank,
            root=order.root,
            manifest=order.manifest,
        )

    async def _wanted(self, load: _Load, order: Prepare) -> dict[int, LoadWant]:
        """What all ranks of this node need.

        Raises:
            EasyckptError: a rank refuses, is gone, or does not answer.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WANT_TIMEOUT_S
        while True:
            refusals = [want.refusal for want in load.wants.values() if want.refusal is not None]
            if refusals:
                raise read_failure(refusals[0])
            lacking = [rank for rank in self._upkeep.ranks if rank not in load.wants]
            if not lacking or load.prepare is not order:
                return dict(load.wants)
            self._host.check_refused()
            left = deadline - loop.time()
            if left <= 0:
                raise SaverUnavailable(
                    f"rank {lacking[0]} did not say within {WANT_TIMEOUT_S:g} s what it needs of step "
                    f"{order.key.step}",
                    hint="every rank has to call load",
                )
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._host.changed(), left)

    async def want(self, rank: int, message: LoadWant) -> Ready | LoadOffer | None:
        """A rank's answer to an offer; then as `load`."""
        load = self._loads.get(message.index)
        if load is None or load.prepare is None:
            raise Misuse(f"rank {rank} was not offered anything")
        if load.go is not None and load.go.step is not None and load.stock is not None:
            key = Key(self._begin.generation, load.go.step)
            made = await self._reshaper.make(
                load.stock,
                {rank: message.chunks},
                key=key,
                firsts={rank: rank},
                saved_ranks=self._begin.world_size,
            )
            return Ready(step=load.go.step, piece=made[rank][0], tier=load.tiers.get(rank, MEMORY))
        if message.attempt == load.prepare.attempt:
            load.wants[rank] = message
            self._host.wake()
        return await self._ready(rank, load)

    async def reshape(self, rank: int, index: int) -> LoadOffer:
        """A rank's own piece does not have all that it needs: what all ranks' pieces have."""
        load = self._loads.get(index)
        if load is None or load.go is None or load.go.step is None or load.prepare is None:
            raise Misuse(f"rank {rank} has loaded nothing that could be cut anew")
        key = Key(self._begin.generation, load.go.step)
        async with load.opening:
            if load.stock is None:
                sources = tuple(
                    Source(rank=other, tier=MEMORY, node_rank=node)
                    for node, ranks in enumerate(self._upkeep.ranks_by_node)
                    for other in ranks
                )
                load.stock = await self._open(load.prepare, sources, key=key)
        offers = await self._reshaper.offers(
            load.stock,
            {rank: rank},
            step=load.go.step,
            attempt=load.prepare.attempt,
            saved_ranks=self._begin.world_size,
            seed=0,
        )
        return offers[rank]

    def go(self, message: Go) -> None:
        """Every rank's piece is ready, or there is nothing to load, or it failed."""
        load = self._loads.setdefault(message.index, _Load())
        if load.go is not None:
            return
        load.go = message
        if message.failure is not None:
            load.forget()
            return
        keep = frozenset[Key]()
        order = load.prepare
        reshaped = order is not None and order.saved_ranks > 0
        if message.step is not None and order is not None:
            load.tiers = {source.rank: source.tier for source in order.sources}
            if order.from_key is not None:
                self._holdings.rename(order.from_key, order.key)
            keep = frozenset({order.key})
        if reshaped:
            load.stock = None  # read by now; the pieces have another name
        self._upkeep.protect = tuple(keep)
        self._host.history_begins(message.step, durable=message.durable)
        if reshaped:
            self._holdings.keep_only(keep)
            return
        self._holdings.keep_only(keep, ranks=frozenset(self._upkeep.ranks + self._upkeep.peer_ranks))
        for rank in self._upkeep.ranks:
            piece = next((self._holdings.sealed(rank, key) for key in keep), None)
            if piece is not None:
                self._spawn(self._upkeep.replicate(piece), "a peer copy")

    def close(self) -> None:
        """The generation is over."""
        for load in self._loads.values():
            load.forget()


def _seed(stock: Stock, sources: tuple[Source, ...]) -> int:
    """A number that all nodes find alike: from the digest of the first rank's piece that is there."""
    first = min((source.rank for source in sources), default=0)
    digest = next((source.digest for source in sources if source.rank == first and source.digest), "")
    if not digest and first in stock.located:
        digest = stock.located[first].record.digest
    return int(digest[:15] or "0", 16)
