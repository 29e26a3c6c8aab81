"""What a node puts together for its ranks when a step was saved in another layout.

Each rank is offered the step: the names of all its tensors and the plain state of the saved rank that it
takes after (its own number, modulo the number of ranks that saved). It answers with the chunks that it
needs, which only it can know, since optimizers make their state to fit what was saved. Then one assembly
for all ranks of the node is planned and carried out, into memory that is given back when the rank has read
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from functools import partial

from easyckpt.assembly import Assembly, Take, place
from easyckpt.catalog import Planner
from easyckpt.errors import CorruptCheckpoint, IncompleteCheckpoint
from easyckpt.layout import STATE_LENGTH_BYTES, ChunkKind, ChunkSpec
from easyckpt.saver.gather import Gatherer
from easyckpt.saver.holdings import Holdings, Piece
from easyckpt.saver.protocol import Held, Key, LoadOffer, TensorKnown, WantedChunk
from easyckpt.saver.stock import Stock

__all__ = ["Reshaper", "first_of"]


def first_of(rank: int, saved_ranks: int, there: Collection[int]) -> int:
    """The saved rank that a rank takes after, where saved ranks differ: that of its own number, modulo the
    number of ranks that saved; if its piece is lost, one of those that are there."""
    own = rank % saved_ranks
    return own if own in there else sorted(there)[rank % len(there)]


class Reshaper:
    """See the module. Runs in the saver's event loop; planning runs in a thread.

    Args:
        gatherer: brings bytes.
        holdings: gives memory.
    """

    def __init__(self, gatherer: Gatherer, *, holdings: Holdings) -> None:
        self.gatherer = gatherer
        self._holdings = holdings

    async def offers(
        self, stock: Stock, firsts: Mapping[int, int], *, step: int, attempt: int, saved_ranks: int, seed: int
    ) -> dict[int, LoadOffer]:
        """What each rank is offered.

        Args:
            stock: what there is.
            firsts: rank → the saved rank that it takes after.
            step: the step's number.
            attempt: of the load.
            saved_ranks: number of ranks that saved it.
            seed: see `LoadOffer`.

        Raises:
            IncompleteCheckpoint: the plain state cannot be had.
        """
        plains = {first: await self._plain(stock, first) for first in sorted(set(firsts.values()))}
        tensors = {}
        for first in plains:
            known = stock.catalog.directory(first)
            tensors[first] = tuple(
                TensorKnown(name, item.dtype, item.global_shape) for name, item in known.items()
            )
        return {
            rank: LoadOffer(
                attempt=attempt,
                step=step,
                tensors=tensors[first],
                plain=plains[first],
                saved_ranks=saved_ranks,
                seed=seed,
                borrowed=first != rank % saved_ranks,
            )
            for rank, first in firsts.items()
        }

    async def _plain(self, stock: Stock, first: int) -> bytes:
        begin, end = stock.states.get(first, (0, 0))
        buffer = bytearray(end - begin)
        take = Take(source_begin=begin, target=0, target_begin=0, length=end - begin)
        with memoryview(buffer) as view:
            lost = await self.gatherer.carry_out(stock, {first: [take]} if buffer else {}, targets=[view])
        if lost or not buffer:
            raise IncompleteCheckpoint(f"the plain state of saved rank {first} cannot be had")
        length = int.from_bytes(buffer[:STATE_LENGTH_BYTES], "little")
        if STATE_LENGTH_BYTES + length > len(buffer):
            raise CorruptCheckpoint("its plain state is longer than its room", where=f"saved rank {first}")
        return bytes(buffer[STATE_LENGTH_BYTES : STATE_LENGTH_BYTES + length])

    async def make(
        self,
        stock: Stock,
        wanted: Mapping[int, tuple[WantedChunk, ...]],
        *,
        key: Key,
        firsts: Mapping[int, int],
        saved_ranks: int,
    ) -> dict[int, tuple[Piece, str]]:
        """Each rank's chunks, one behind the other (`easyckpt.assembly.place`), and the tier they came from.
        For ``firsts`` see `offers`.

        Raises:
            EasyckptError: something cannot be had; nothing is kept.
        """
        specs = {rank: [_spec_of(chunk) for chunk in chunks] for rank, chunks in wanted.items()}
        number_of = {rank: number for number, rank in enumerate(specs)}
        made: dict[int, Piece] = {}
        tiers: dict[int, str] = {}
        try:
            for rank, chunks in specs.items():
                held = Held(key=key, rank=rank, world_size=saved_ranks, digest="")
                made[rank] = self._holdings.scratch(held, body_bytes=place(chunks)[1])
            todo = list(specs)
            while todo:
                assembly: Assembly = {}
                for rank in todo:
                    costs = stock.costs(firsts[rank])
                    work = partial(_plan, stock, specs[rank], costs=costs, target=number_of[rank])
                    found = await self.gatherer.in_thread(work)
                    tiers[rank] = stock.tier(found or [firsts[rank]])
                    for source, takes in found.items():
                        assembly.setdefault(source, []).extend(takes)
                with contextlib.ExitStack() as pins:
                    targets = [pins.enter_context(made[rank].pinned()) for rank in specs]
                    lost = await self.gatherer.carry_out(stock, assembly, targets=targets)
                without = {take.target for source in lost for take in assembly[source]}
                todo = [
                    rank for rank in todo if number_of[rank] in without
                ]  # planned anew, without what is lost
        except BaseException:
            for piece in made.values():
                piece.unpin()
            raise
        return {rank: (piece, tiers[rank]) for rank, piece in made.items()}


def _spec_of(chunk: WantedChunk) -> ChunkSpec:
    return ChunkSpec(
        name=chunk.name,
        dtype=chunk.dtype,
        global_shape=chunk.global_shape,
        offsets=chunk.offsets,
        sizes=chunk.sizes,
        kind=ChunkKind(chunk.kind),
    )


def _plan(stock: Stock, specs: list[ChunkSpec], *, costs: Mapping[int, int], target: int) -> Assembly:
    begins, _ = place(specs)
    return Planner(stock.catalog, costs).assemble(specs, begins=begins, target=target)
