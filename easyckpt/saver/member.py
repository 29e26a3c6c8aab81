"""One node's part in a generation: carries out what the lead decides, and reports what happened here.

The member stands between the ranks of this node (`easyckpt.saver.session`) and the lead
(`easyckpt.saver.lead`), which may be in this process. It owns no policy: whether a step is saved, persisted
or restored is the lead's decision; which slot is used is the holdings'.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from easyckpt.errors import EasyckptError, IncompleteCheckpoint, MemoryFull, Misuse
from easyckpt.manifest import FragmentRef
from easyckpt.saver.disk import Life, Vault, encode_ref
from easyckpt.saver.holdings import Holdings, Piece, PieceState, SlotsBusy
from easyckpt.saver.lead import Spawn
from easyckpt.saver.protocol import (
    Ask,
    Begin,
    Drained,
    DrainWanted,
    Failure,
    Go,
    Health,
    Held,
    Inventory,
    InventoryAsk,
    Key,
    LoadWanted,
    Members,
    Message,
    Open,
    Opened,
    Persisted,
    PersistStep,
    Prepare,
    RankLoaded,
    Refused,
    Register,
    Replicated,
    Restored,
    Sealed,
    StageAsk,
    StageFailed,
    StageInfo,
    StageReached,
    Verdict,
    read_failure,
)
from easyckpt.saver.replicate import Dialer, hash_piece, put
from easyckpt.saver.restore import Restorer
from easyckpt.tiers import MEMORY

__all__ = ["Member"]

STAGES_KEPT = 1024
BACKLOG_MAX = 256
VERDICT_TIMEOUT_S = 30.0
"""Then a save is skipped rather than training held up."""

VERDICT_BLOCK_TIMEOUT_S = 3600.0

ORDER = ("staging", "memory", "replicated", "durable")
"""Stages of a step that gets on, in order."""

UNFORESEEN = "an error that nobody foresaw; see the saver's log on this node"

_LOG = logging.getLogger("easyckpt.saver")


@dataclass(slots=True, kw_only=True)
class _Restore:
    """What is known of one load."""

    rank: int = -1
    """The first rank that asked; -1 while none has."""
    step: int | None = None
    prepare: Prepare | None = None
    go: Go | None = None
    tiers: dict[int, str] = field(default_factory=dict)


class Member:
    """See the module. Runs in the saver's event loop.

    Args:
        begin: the generation and this node's place in it.
        holdings: pieces in memory; outlives the member.
        dialer: to other savers.
        executor: for blocking calls.
        spawn: starts a background task whose failure is recorded.
        address: where other savers reach this one.
    """

    def __init__(
        self,
        begin: Begin,
        *,
        holdings: Holdings,
        dialer: Dialer,
        executor: Executor,
        spawn: Spawn,
        address: str,
    ) -> None:
        self.begin = begin
        self.ranks = tuple(range(begin.first_rank, begin.first_rank + begin.ranks))
        self.options: Open | None = None
        self.health = Health(memory_step=None, replicated_step=None, durable_step=None)
        self.restored: dict[int, Restored] = {}
        self.skipped = 0
        self.uplink: Callable[[Message], None] | None = None
        self.ready = asyncio.Event()
        """Set when all members are known."""
        self._holdings = holdings
        self._dialer = dialer
        self._executor = executor
        self._spawn = spawn
        self._address = address
        self._addresses: tuple[str, ...] = ()
        self._progressed = False
        self._verdicts: dict[tuple[int, int], asyncio.Future[Verdict]] = {}
        self._stages: OrderedDict[int, StageInfo] = OrderedDict()
        self._restores: dict[int, _Restore] = {}
        self._protect: tuple[Key, ...] = ()
        self._refused: Failure | None = None
        self._changed = asyncio.Event()
        self._drained: Drained | None = None
        self._backlog: list[Message] = []
        self._peers: tuple[tuple[int, ...], ...] = ()
        self._restorer = Restorer(
            holdings,
            dialer=dialer,
            executor=executor,
            generation=begin.generation,
            world_size=begin.world_size,
        )

    # --- the lead's side
    # -------------------------------------------------------------------------------------

    def connected(self, uplink: Callable[[Message], None]) -> None:
        """There is a lead: tell it all."""
        self.uplink = uplink
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
        backlog, self._backlog = self._backlog, []
        for message in backlog:
            self._send(message)
        for index, restore in self._restores.items():
            if restore.go is None and restore.rank >= 0:
                self._send(LoadWanted(rank=restore.rank, index=index, step=restore.step))

    def disconnected(self) -> None:
        """The lead is away: nothing can be granted until it is back."""
        self.uplink = None
        for (rank, step), future in list(self._verdicts.items()):
            if not future.done():
                reason = "the saver that leads this generation cannot be reached"
                future.set_result(Verdict(rank=rank, step=step, granted=False, reason=reason))

    def _send(self, message: Message) -> None:
        if self.uplink is not None:
            self.uplink(message)
        elif isinstance(message, (StageFailed, Replicated)) and len(self._backlog) < BACKLOG_MAX:
            self._backlog.append(message)  # the others are told anew when the lead is back

    def receive(self, message: Message) -> None:
        """A decision of the lead. Never blocks."""
        if isinstance(message, Verdict):
            self._protect = message.protect
            future = self._verdicts.get((message.rank, message.step))
            if future is not None and not future.done():
                future.set_result(message)
        elif isinstance(message, StageReached):
            self._note_stage(message.step, message.stage, message.reason)
        elif isinstance(message, Health):
            self.health = message
        elif isinstance(message, Members):
            self._addresses = message.addresses
            self._peers = message.ranks
            self.ready.set()
        elif isinstance(message, PersistStep):
            self._spawn(self._persist(message), "writing to storage")
        elif isinstance(message, Prepare):
            self._restores.setdefault(message.index, _Restore()).prepare = message
            self._spawn(self._prepare(message), "a restore")
        elif isinstance(message, Go):
            self._go(message)
        elif isinstance(message, InventoryAsk):
            self._send(
                Inventory(
                    node_rank=self.begin.node_rank, number=message.number, held=self._holdings.inventory()
                )
            )
        elif isinstance(message, Drained):
            self._drained = message
        elif isinstance(message, Refused):
            self._refused = message.failure
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Wait until anything changed."""
        await self._changed.wait()

    def _note_stage(self, step: int, stage: str, reason: str) -> None:
        known = self._stages.get(step)
        if (
            known is not None
            and known.stage in ORDER
            and stage in ORDER
            and ORDER.index(stage) < ORDER.index(known.stage)
        ):
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

    # --- saves
    # -----------------------------------------------------------------------------------------------

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
        self._check_refused()
        if self.uplink is None:
            return self._skip(ask.step, "the saver that leads this generation cannot be reached")
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._verdicts[rank, ask.step] = future
        self._send(Ask(rank=rank, step=ask.step, block=ask.block, metrics=ask.metrics))
        limit = VERDICT_BLOCK_TIMEOUT_S if ask.block else VERDICT_TIMEOUT_S
        try:
            verdict = await asyncio.wait_for(future, limit)
        except asyncio.TimeoutError:
            reason = f"no decision within {limit:g} s"
            self.stage_failed(rank, ask.step, reason)
            return self._skip(ask.step, reason)
        finally:
            self._verdicts.pop((rank, ask.step), None)
        if verdict.misuse:
            raise Misuse(verdict.reason, where=self.root, hint="call load() first, or use an empty folder")
        if not verdict.granted:
            return self._skip(ask.step, verdict.reason)
        self._progressed = True
        self._stages.setdefault(ask.step, StageInfo(step=ask.step, stage="staging"))
        held = Held(
            key=Key(self.begin.generation, ask.step), rank=rank, world_size=self.begin.world_size, digest=""
        )
        try:
            return self._holdings.place(
                held, layout=layout, body_bytes=ask.body_bytes, protect=verdict.protect
            )
        except SlotsBusy:
            reason = "both slots are still in use here"
        except MemoryFull as error:
            reason = str(error)
        self.stage_failed(rank, ask.step, reason)
        return StageInfo(step=ask.step, stage="abandoned", reason=reason)

    @property
    def root(self) -> str:
        """The checkpoint folder."""
        return self.options.root if self.options is not None else ""

    def _check_refused(self) -> None:
        if self._refused is not None:
            raise read_failure(self._refused)

    def _skip(self, step: int, reason: str) -> StageInfo:
        self.skipped += 1
        info = StageInfo(step=step, stage="skipped", reason=reason)
        self._stages.setdefault(step, info)
        return info

    def stage_failed(self, rank: int, step: int, reason: str) -> None:
        """A granted copy will not come."""
        _LOG.warning("step %d of rank %d will not come: %s", step, rank, reason)
        self._send(StageFailed(rank=rank, step=step, reason=reason))

    def seal(self, piece: Piece) -> None:
        """The rank says that its copy is complete: hash it, tell the lead, copy it to the peer."""
        piece.state = PieceState.COPIED
        self._spawn(self._seal(piece), "sealing a slot")

    async def _seal(self, piece: Piece) -> None:
        try:
            digest = await hash_piece(piece, self._executor)
        except BaseException:
            self.stage_failed(piece.rank, piece.key.step, "it could not be hashed; see the saver's log")
            raise
        if piece.dropped or self._holdings.find(piece.rank, piece.key) is not piece:
            return
        piece.digest = digest
        piece.state = PieceState.SEALED
        self._send(Sealed(rank=piece.rank, step=piece.key.step, digest=digest))
        await self._replicate(piece)

    async def _replicate(self, piece: Piece) -> None:
        """A copy to the next node of the ring."""
        if self.begin.nodes < 2 or self.begin.replicas < 1:
            return
        await self.ready.wait()
        neighbour = self._addresses[(self.begin.node_rank + 1) % self.begin.nodes]
        error = UNFORESEEN
        try:
            await put(
                self._dialer,
                neighbour,
                piece,
                generation=self.begin.generation,
                protect=self._protect,
            )
            error = ""
        except EasyckptError as trouble:
            error = str(trouble)
        finally:
            if error:
                _LOG.warning("step %d of rank %d has no peer copy: %s", piece.key.step, piece.rank, error)
            self._send(Replicated(rank=piece.rank, step=piece.key.step, error=error))

    async def _persist(self, message: PersistStep) -> None:
        error = UNFORESEEN
        fragment = b""
        try:
            fragment = encode_ref(await self._write(message))
            error = ""
        except (EasyckptError, OSError) as trouble:
            error = str(trouble)
        finally:
            self._send(
                Persisted(
                    node_rank=self.begin.node_rank,
                    key=message.key,
                    life=message.life,
                    fragment=fragment,
                    error=error,
                )
            )

    async def _write(self, message: PersistStep) -> FragmentRef:
        found = [self._holdings.sealed(rank, message.key) for rank in self.ranks]
        lacking = [rank for rank, piece in zip(self.ranks, found, strict=True) if piece is None]
        if lacking:
            raise IncompleteCheckpoint(f"ranks {lacking} of step {message.key.step} are not in memory")
        pieces = tuple(piece for piece in found if piece is not None)
        for piece in pieces:
            piece.pin()
        try:
            work = partial(
                Vault(self.root).persist,
                pieces,
                life=Life(run_id=message.run_id, generation=message.life, resumed_step=None),
                node_rank=self.begin.node_rank,
                step=message.key.step,
            )
            # Shielded: the thread reads the slots until it is done, whatever becomes of this task.
            return await _to_its_end(asyncio.get_running_loop().run_in_executor(self._executor, work))
        finally:
            for piece in pieces:
                piece.unpin()

    def stage_of(self, step: int) -> StageInfo | None:
        """How far a step is."""
        return self._stages.get(step)

    # --- restores
    # --------------------------------------------------------------------------------------------

    async def load(self, rank: int, index: int, step: int | None) -> tuple[Piece | None, str]:
        """A rank's load: when every rank's piece is ready, this rank's piece and the tier that it came from.

        Raises:
            EasyckptError: nothing can be loaded, though something should.
        """
        restore = self._restores.setdefault(index, _Restore())
        if restore.rank < 0:
            restore.rank, restore.step = rank, step
        self._send(LoadWanted(rank=rank, index=index, step=step))
        while restore.go is None:
            self._check_refused()
            await self.changed()
        go = restore.go
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
        piece = self._holdings.sealed(rank, Key(self.begin.generation, go.step))
        if piece is None:
            raise IncompleteCheckpoint(
                f"step {go.step} of rank {rank} is not in memory any more", hint="load before the next save"
            )
        return piece, restore.tiers.get(rank, MEMORY)

    def loaded(self, rank: int, step: int, tier: str) -> None:
        """The rank has read its piece."""
        self.restored[rank] = Restored(rank=rank, step=step, tier=tier)
        self._send(RankLoaded(rank=rank, step=step, tier=tier))
        self._wake()

    async def _prepare(self, message: Prepare) -> None:
        await self.ready.wait()
        answer = await self._restorer.prepare(
            message, node_rank=self.begin.node_rank, addresses=self._addresses
        )
        self._send(answer)

    def _go(self, message: Go) -> None:
        restore = self._restores.setdefault(message.index, _Restore())
        if restore.go is not None:
            return
        restore.go = message
        if message.failure is not None:
            return
        self._progressed = True
        self._stages.clear()
        keep = frozenset[Key]()
        prepare = restore.prepare
        if message.step is not None and prepare is not None:
            restore.tiers = {source.rank: source.tier for source in prepare.sources}
            if prepare.from_key is not None:
                self._holdings.rename(prepare.from_key, prepare.key)
            keep = frozenset({prepare.key})
            self._protect = (prepare.key,)
            self._note_stage(message.step, "durable" if message.durable else "memory", "")
        self._holdings.keep_only(keep, ranks=frozenset(self.ranks + self._peer_ranks()))
        for rank in self.ranks:
            piece = next((self._holdings.sealed(rank, key) for key in keep), None)
            if piece is not None:
                self._spawn(self._replicate(piece), "a peer copy")

    def _peer_ranks(self) -> tuple[int, ...]:
        """Ranks whose copies are kept here: those of the node before this one in the ring."""
        nodes = self.begin.nodes
        if nodes < 2 or self.begin.replicas < 1 or len(self._peers) < nodes:
            return ()
        return self._peers[(self.begin.node_rank - 1) % nodes]

    # --- the end
    # ---------------------------------------------------------------------------------------------

    def ask_persist(self) -> None:
        """Have the newest step made durable, whatever the interval says."""
        self._send(DrainWanted(node_rank=self.begin.node_rank))

    def retire(self, why: str) -> None:
        """The generation is over here: whoever waits is told."""
        self._refused = Failure(kind="StaleGeneration", what=why)
        self.disconnected()
        self._wake()

    async def drain(self, timeout_s: float) -> Drained:
        """Have the newest step made durable; what is safe now, or when the time is over."""
        self._drained = None
        self._send(DrainWanted(node_rank=self.begin.node_rank))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._drained is None and loop.time() < deadline:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.changed(), max(deadline - loop.time(), 0.001))
        if self._drained is not None:
            return self._drained
        health = self.health
        said = health.degraded or f"not finished within {timeout_s:g} s"
        return Drained(memory_step=health.memory_step, durable_step=health.durable_step, degraded=said)


async def _to_its_end(work: asyncio.Future[FragmentRef]) -> FragmentRef:
    """Wait for a thread's work even if cancelled meanwhile; a cancellation is raised after it."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise
