"""One node's part in a generation: carries out what the lead decides, and reports what happened here.

The member stands between the ranks of this node (`easyckpt.saver.session`) and the lead
(`easyckpt.saver.lead`), which may be in this process. It owns no policy: whether a step is saved, persisted
or restored is the lead's decision; which slot is used is the holdings'.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

from easyckpt.errors import MemoryFull, Misuse, Unprotected
from easyckpt.saver.commits import Spawn, Threads
from easyckpt.saver.frames import read_failure
from easyckpt.saver.holdings import Holdings, Piece, PieceState, SlotsBusy
from easyckpt.saver.peering import (
    Ask,
    Drained,
    DrainWanted,
    Go,
    Health,
    Inventory,
    InventoryAsk,
    Members,
    Opened,
    PersistStep,
    Prepare,
    Refused,
    Register,
    Replicated,
    StageFailed,
    StageReached,
    Verdict,
)
from easyckpt.saver.protocol import Begin, Failure, Held, Key, Message, Open, Restored, StageAsk, StageInfo
from easyckpt.saver.replicate import Dialer
from easyckpt.saver.reserving import Reserver
from easyckpt.saver.restore import Restorer
from easyckpt.saver.resume import Resumes
from easyckpt.saver.upkeep import Upkeep
from easyckpt.slots import Slot

__all__ = ["ORDER", "Member"]

STAGES_KEPT = 1024

VERDICT_TIMEOUT_S = 30.0
"""Then a save is skipped rather than training held up."""

VERDICT_BLOCK_TIMEOUT_S = 3600.0

ORDER = ("staging", "memory", "replicated", "durable")
"""Stages of a step that gets on, in order."""

LEAD_GONE_S = 3.0
"""At the end a lead without a connection for so long is taken to have ended: it commits nothing any more."""
LOOK_S = 0.25
LEAD_AWAY = "the saver that leads this generation cannot be reached"


class Member:
    """See the module. Runs in the saver's event loop.

    Args:
        begin: the generation and this node's place in it.
        holdings: pieces in memory; outlives the member.
        dialer: to other savers.
        threads: for blocking calls.
        spawn: starts a background task whose failure is recorded.
        address: where other savers reach this one.
    """

    def __init__(
        self,
        begin: Begin,
        *,
        holdings: Holdings,
        dialer: Dialer,
        threads: Threads,
        spawn: Spawn,
        address: str,
    ) -> None:
        self.begin = begin
        self.options: Open | None = None
        self.health = Health(memory_step=None, replicated_step=None, durable_step=None)
        self.skipped = 0
        self._holdings = holdings
        self._reserver = Reserver(holdings)
        self._spawn = spawn
        self._address = address
        self._uplink: Callable[[Message], None] | None = None
        self._last_words: dict[tuple[type[Message], int], Message] = {}
        """The newest `StageFailed` and `Replicated` of each rank: what a broken connection may have lost, and
        nothing else would tell."""
        self._progressed = False
        self._verdicts: dict[tuple[int, int], asyncio.Future[Verdict]] = {}
        self._stages: OrderedDict[int, StageInfo] = OrderedDict()
        self._refused: Failure | None = None
        self._connections: Counter[int] = Counter()
        """Of each rank that was ever here."""
        self._changed = asyncio.Event()
        self._drained: Drained | None = None
        self._upkeep = Upkeep(begin, holdings=holdings, dialer=dialer, threads=threads, send=self._send)
        self._resumes = Resumes(
            begin,
            holdings=holdings,
            upkeep=self._upkeep,
            restorer=Restorer(begin, holdings=holdings, dialer=dialer, threads=threads),
            spawn=spawn,
            send=self._send,
            host=self,
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of this node."""
        return self._upkeep.ranks

    @property
    def root(self) -> str:
        """The checkpoint folder; empty until a rank has opened its checkpointer."""
        return self.options.root if self.options is not None else ""

    @property
    def restored(self) -> dict[int, Restored]:
        """The ranks that have loaded in this generation."""
        return self._resumes.restored

    # --- the lead ---

    def connected(self, uplink: Callable[[Message], None]) -> None:
        """There is a lead: tell it all."""
        self._uplink = uplink
        self._send(
            Register(
                generation=self.begin.generation,
                node_rank=self.begin.node_rank,
                address=self._address,
                ranks=self.ranks,
                held=self._holdings.inventory(),
                progressed=self._progressed,
            )
        )
        if self.options is not None:
            self._send(Opened(node_rank=self.begin.node_rank, options=self.options))
        for message in tuple(self._last_words.values()):
            self._send(message)
        self._resumes.ask_again()

    def disconnected(self) -> None:
        """The lead is away: nothing can be granted until it is back."""
        self._uplink = None
        for (rank, step), future in list(self._verdicts.items()):
            if not future.done():
                future.set_result(Verdict(rank=rank, step=step, granted=False, reason=LEAD_AWAY))

    def _send(self, message: Message) -> None:
        if isinstance(message, (StageFailed, Replicated)):
            self._last_words[type(message), message.rank] = message
        if self._uplink is not None:  # else it is told anew when the lead is back
            self._uplink(message)

    def receive(self, message: Message) -> None:
        """A decision of the lead. Never blocks."""
        if isinstance(message, Verdict):
            self._upkeep.protect = message.protect
            future = self._verdicts.get((message.rank, message.step))
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, StageReached):
            self._note_stage(message.step, message.stage, message.reason)
            if message.stage == "memory":  # what another number of ranks saved is not needed any more
                self._holdings.drop_others(self.begin.world_size)
                self._holdings.note_roster(Key(self.begin.generation, message.step), message.roster)
        elif isinstance(message, Health):
            self.health = message
        elif isinstance(message, Members):
            self._upkeep.know(message)
        elif isinstance(message, PersistStep):
            self._spawn(self._upkeep.persist(message), "writing to storage")
        elif isinstance(message, Prepare):
            self._resumes.prepare(message)
        elif isinstance(message, Go):
            self._resumes.go(message)
        elif isinstance(message, InventoryAsk):
            held = self._holdings.inventory()
            self._send(Inventory(node_rank=self.begin.node_rank, number=message.number, held=held))
        elif isinstance(message, Drained):
            self._drained = message
        elif isinstance(message, Refused):
            self._refused = message.failure
        self.wake()

    def wake(self) -> None:
        """Something changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    def changed(self) -> Coroutine[Any, Any, object]:
        """To be awaited: ends when anything has changed since this call.

        No coroutine function: that would look for the event only when it begins to run, which under
        `asyncio.wait_for` is later, and miss what changed between.
        """
        return self._changed.wait()

    def check_refused(self) -> None:
        """Raise if this node does not fit to the others, or its generation is over."""
        if self._refused is not None:
            raise read_failure(self._refused)

    def history_begins(self, step: int | None, *, durable: bool) -> None:
        """All ranks resume from here."""
        self._progressed = True
        self._stages.clear()
        if step is not None:
            self._note_stage(step, "durable" if durable else "memory", "")

    def _note_stage(self, step: int, stage: str, reason: str) -> None:
        known = self._stages.get(step)
        if known is not None and stage in ORDER and known.stage in ORDER[ORDER.index(stage) :]:
            return
        self._stages[step] = StageInfo(step=step, stage=stage, reason=reason)
        self._stages.move_to_end(step)
        while len(self._stages) > STAGES_KEPT:
            self._stages.popitem(last=False)
        if stage == "abandoned":
            for rank in self.ranks:
                piece = self._holdings.find(rank, Key(self.begin.generation, step))
                if piece is not None and piece.state is not PieceState.COPYING and not piece.pins:
                    self._holdings.drop(piece)

    def stage_of(self, step: int) -> StageInfo | None:
        """How far a step is."""
        return self._stages.get(step)

    # --- saves ---

    def came(self, rank: int) -> None:
        """A worker of this rank has connected."""
        self._connections[rank] += 1

    def left(self, rank: int) -> None:
        """A connection of this rank has ended."""
        self._connections[rank] -= 1
        self._resumes.gone(rank)

    def open(self, options: Open) -> None:
        """A rank's checkpointer.

        Raises:
            Misuse: another rank of this node saves elsewhere.
        """
        if self.options is not None and self.options.root != options.root:
            raise Misuse(
                f"a rank saves to {options.root}, and another rank of this node to {self.options.root}",
                hint="give all ranks the same checkpoint folder",
            )
        if self.options is None:
            self.options = options
            self._send(Opened(node_rank=self.begin.node_rank, options=options))
        if options.continuing:
            self._progressed = True

    async def stage(self, rank: int, ask: StageAsk, layout: bytes) -> Piece | StageInfo:
        """May this rank copy? Its slot, or why not."""
        self.check_refused()
        verdict = await self._verdict(rank, ask)
        self.check_refused()
        if verdict.misuse:
            raise Misuse(verdict.reason, where=self.root, hint="call load() first, or use an empty folder")
        if verdict.unprotected:
            raise Unprotected(
                verdict.reason, where=self.root, hint="mend the storage; `easyckpt ls` shows what is there"
            )
        if not verdict.granted:
            self.skipped += 1
            stage = "abandoned" if verdict.abandoned else "skipped"
            info = StageInfo(step=ask.step, stage=stage, reason=verdict.reason, not_before=verdict.not_before)
            self._stages.setdefault(ask.step, info)
            return info
        self._progressed = True
        self._stages.setdefault(ask.step, StageInfo(step=ask.step, stage="staging"))
        key = Key(self.begin.generation, ask.step)
        held = Held(key=key, rank=rank, world_size=self.begin.world_size, digest="")
        try:
            await self._reserver.clear_way(held, body_bytes=ask.body_bytes, protect=verdict.protect)
            self.check_refused()
            return self._holdings.place(
                held, layout=layout, body_bytes=ask.body_bytes, protect=verdict.protect
            )
        except asyncio.CancelledError:
            self.stage_failed(rank, ask.step, "the worker is gone")
            raise
        except SlotsBusy:
            reason = "both slots are still in use here"
        except MemoryFull as error:
            reason = f"{error.what} ({error.hint})"
        self.stage_failed(rank, ask.step, reason)
        return StageInfo(step=ask.step, stage="abandoned", reason=f"rank {rank}: {reason}")

    async def reserve(self, rank: int, body_bytes: int) -> Slot | None:
        """A slot for the rank's next save, made now. See `Reserver.ahead`."""
        return await self._reserver.ahead(rank, body_bytes)

    def slots_of(self, rank: int) -> tuple[int, ...]:
        """See `Holdings.slots_of`."""
        return self._holdings.slots_of(rank)

    async def _verdict(self, rank: int, ask: StageAsk) -> Verdict:
        """The lead's answer. If it does not come, the step is given up here, and so on every rank."""
        reason = LEAD_AWAY
        if self._uplink is not None:
            future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
            self._verdicts[rank, ask.step] = future
            self._send(Ask(rank=rank, step=ask.step, block=ask.block, metrics=ask.metrics, cost_s=ask.cost_s))
            limit = VERDICT_BLOCK_TIMEOUT_S if ask.block else VERDICT_TIMEOUT_S
            try:
                verdict = await asyncio.wait_for(future, limit)
            except asyncio.TimeoutError:
                reason = f"no decision within {limit:g} s"
            except asyncio.CancelledError:
                self.stage_failed(rank, ask.step, "the worker is gone")
                raise
            else:
                if verdict.reason != LEAD_AWAY:
                    return verdict
            finally:
                self._verdicts.pop((rank, ask.step), None)
        self.stage_failed(rank, ask.step, reason)
        return Verdict(rank=rank, step=ask.step, granted=False, reason=reason)

    def stage_failed(self, rank: int, step: int, reason: str) -> None:
        """A copy that was granted, or might be, will not come."""
        self._upkeep.failed(rank, step, reason)

    def seal(self, piece: Piece) -> None:
        """The rank says that its copy is complete: hash it, tell the lead, copy it to the peer."""
        piece.state = PieceState.COPIED
        self._spawn(self._upkeep.seal(piece), "sealing a slot")

    # --- loads ---

    @property
    def resumes(self) -> Resumes:
        """The loads of this node's ranks."""
        return self._resumes

    def loaded(self, rank: int, step: int, tier: str) -> None:
        """The rank has read its piece."""
        self._resumes.loaded(rank, step, tier)
        self.wake()

    # --- the end ---

    def ask_persist(self) -> None:
        """Have the newest step made durable, whatever the interval says.

        A rank that is still connected may be about to save the step that its partners have saved: only what
        waits for one that has left is given up.
        """
        gone = tuple(rank for rank in self.ranks if self._connections.get(rank) == 0)
        self._send(DrainWanted(node_rank=self.begin.node_rank, gone=gone))

    def retire(self, why: str) -> None:
        """The generation is over here: whoever waits is told."""
        self._refused = Failure(kind="StaleGeneration", what=why)
        self._resumes.close()
        self.disconnected()
        self.wake()

    async def drain(self, timeout_s: float) -> Drained:
        """Have the newest step made durable; what is safe now, or when the time or the lead is over."""
        self._drained = None
        self.ask_persist()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        alone_since: float | None = None
        while self._drained is None and self._refused is None and loop.time() < deadline:
            alone_since = None if self._uplink is not None else alone_since or loop.time()
            if alone_since is not None:
                safe = self.health.memory_step == self.health.durable_step
                if safe or loop.time() - alone_since > LEAD_GONE_S:
                    break
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed(), min(max(deadline - loop.time(), 0.001), LOOK_S))
        if self._drained is not None:
            return self._drained
        health = self.health
        said = health.degraded or f"not finished within {timeout_s:g} s"
        return Drained(memory_step=health.memory_step, durable_step=health.durable_step, degraded=said)
