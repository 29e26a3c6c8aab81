"""The loads of one node's ranks: each waits until the lead has every rank's piece proved, then reads its own.

The counterpart of `easyckpt.saver.rounds` on a member.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from easyckpt.errors import IncompleteCheckpoint, Misuse
from easyckpt.saver.commits import Spawn
from easyckpt.saver.frames import read_failure
from easyckpt.saver.holdings import Holdings, Piece
from easyckpt.saver.peering import Go, LoadWanted, Prepare, RankLoaded
from easyckpt.saver.protocol import Begin, Key, Message, Restored
from easyckpt.saver.restore import Restorer
from easyckpt.saver.upkeep import Upkeep
from easyckpt.tiers import MEMORY

__all__ = ["ResumeHost", "Resumes"]


class ResumeHost(Protocol):
    """What the loads need from the member."""

    def check_refused(self) -> None:
        """Raise if this node does not fit to the others, or its generation is over."""
        ...

    async def changed(self) -> None:
        """Wait until anything changed."""
        ...

    def history_begins(self, step: int | None, *, durable: bool) -> None:
        """All ranks resume from here."""
        ...


@dataclass(slots=True, kw_only=True)
class _Load:
    """What is known of one load."""

    rank: int = -1
    """The first rank that asked; -1 while none has."""
    step: int | None = None
    prepare: Prepare | None = None
    go: Go | None = None
    tiers: dict[int, str] = field(default_factory=dict)


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

    async def load(self, rank: int, index: int, step: int | None) -> tuple[Piece | None, str]:
        """A rank's load: when every rank's piece is ready, this rank's piece and the tier that it came from.

        Raises:
            EasyckptError: nothing can be loaded, though something should.
        """
        load = self._loads.setdefault(index, _Load())
        if load.rank < 0:
            load.rank, load.step = rank, step
        self._send(LoadWanted(rank=rank, index=index, step=step))
        while load.go is None:
            self._host.check_refused()
            await self._host.changed()
        go = load.go
        if go.asked != step:
            said = ["the newest" if item is None else f"step {item}" for item in (step, go.asked)]
            raise Misuse(
                f"rank {rank} asks for {said[0]}, and another rank for {said[1]}",
                hint="every rank has to call load with the same step",
            )
        if go.failure is not None:
            raise read_failure(go.failure)
        if go.step is None:
            return None, ""
        piece = self._holdings.sealed(rank, Key(self._begin.generation, go.step))
        if piece is None:
            raise IncompleteCheckpoint(
                f"step {go.step} of rank {rank} is not in memory any more", hint="load before the next save"
            )
        return piece, load.tiers.get(rank, MEMORY)

    def loaded(self, rank: int, step: int, tier: str) -> None:
        """The rank has read its piece."""
        self.restored[rank] = Restored(rank=rank, step=step, tier=tier)
        self._send(RankLoaded(rank=rank, step=step, tier=tier))

    def prepare(self, order: Prepare) -> None:
        """The lead wants the pieces of this node's ranks."""
        self._loads.setdefault(order.index, _Load()).prepare = order
        self._spawn(self._prepare(order), "a restore")

    async def _prepare(self, order: Prepare) -> None:
        await self._upkeep.ready.wait()
        answer = await self._restorer.prepare(
            order, node_rank=self._begin.node_rank, addresses=self._upkeep.addresses
        )
        self._send(answer)

    def go(self, message: Go) -> None:
        """Every rank's piece is ready, or there is nothing to load, or it failed."""
        load = self._loads.setdefault(message.index, _Load())
        if load.go is not None:
            return
        load.go = message
        if message.failure is not None:
            return
        keep = frozenset[Key]()
        order = load.prepare
        if message.step is not None and order is not None:
            load.tiers = {source.rank: source.tier for source in order.sources}
            if order.from_key is not None:
                self._holdings.rename(order.from_key, order.key)
            keep = frozenset({order.key})
        self._upkeep.protect = tuple(keep)
        self._host.history_begins(message.step, durable=message.durable)
        self._holdings.keep_only(keep, ranks=frozenset(self._upkeep.ranks + self._upkeep.peer_ranks))
        for rank in self._upkeep.ranks:
            piece = next((self._holdings.sealed(rank, key) for key in keep), None)
            if piece is not None:
                self._spawn(self._upkeep.replicate(piece), "a peer copy")
