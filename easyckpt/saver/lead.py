"""The saver that leads a generation: it decides for all ranks, and acts on what the ledger decides.

Every member (this node's own one included, over a queue instead of a connection) sends it facts and is sent
decisions. The lead holds no bytes of any rank. If its process is lost, the next one is told again what is
where: members register anew with all that they hold.

Runs in the saver's event loop; what blocks runs in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from easyckpt.errors import EasyckptError
from easyckpt.saver.commits import FINISH_TIMEOUT_S, Commits, Foreign, Spawn, Threads
from easyckpt.saver.disk import DiskView
from easyckpt.saver.ledger import Change, Ledger, PersistPolicy, Stage
from easyckpt.saver.peering import (
    Ask,
    Drained,
    DrainWanted,
    Health,
    Inventory,
    InventoryAsk,
    LoadWanted,
    Members,
    Opened,
    Persisted,
    Prepared,
    RankLoaded,
    Refused,
    Register,
    Replicated,
    Sealed,
    StageFailed,
    StageReached,
    Verdict,
)
from easyckpt.saver.protocol import Begin, Failure, Held, Message
from easyckpt.saver.rounds import Rounds
from easyckpt.tiers import MEMORY, Plan, choose

__all__ = ["Lead"]

TICK_S = 0.5
"""How often deadlines, intervals and retries are looked at."""

FORGOTTEN_LOAD = (
    "this folder holds checkpoints of earlier training, and load() was not called before save(): going on "
    "would leave them behind"
)

_LOG = logging.getLogger("easyckpt.saver")

SendTo = Callable[[Message], None]


class Lead:
    """See the module.

    Args:
        begin: the generation.
        threads: for blocking calls.
        spawn: starts a background task whose failure is recorded.
        clock: monotonic seconds.
    """

    def __init__(self, begin: Begin, *, threads: Threads, spawn: Spawn, clock: Callable[[], float]) -> None:
        self._begin = begin
        self._spawn = spawn
        self._clock = clock
        self._members: dict[int, SendTo] = {}
        self._registered: dict[int, Register] = {}
        self._ledger = Ledger(
            generation=begin.generation,
            world_size=begin.world_size,
            replicas=begin.nodes > 1 and begin.replicas > 0,
            policy=PersistPolicy(),
        )
        self._commits = Commits(
            begin, ledger=self._ledger, threads=threads, spawn=spawn, clock=clock, host=self
        )
        self._rounds = Rounds(self)
        self._ready = asyncio.Event()
        self._waiting: list[Ask] = []
        self._may_save: asyncio.Task[None] | None = None
        self._save_refusal: str | None = None
        self._inventories: dict[int, tuple[Held, ...]] = {}
        self._inventory_number = 0
        self._inventory_event = asyncio.Event()
        self._drains: set[int] = set()
        self._health: Health | None = None
        self._closed = False
        spawn(self._tick(), "the lead's clock")

    # --- what a restore and the commits need (RestoreHost, CommitHost) ---

    @property
    def begin(self) -> Begin:
        """This life of the job, as the launcher told it."""
        return self._begin

    @property
    def root(self) -> str:
        """The checkpoint folder."""
        options = self._commits.options
        return options.root if options is not None else ""

    async def gather(self) -> Mapping[int, tuple[Held, ...]]:
        """What members hold now. One that is away answers by registering again."""
        self._inventory_number += 1
        self._inventories.clear()
        self._inventory_event.clear()
        self.broadcast(InventoryAsk(number=self._inventory_number))
        while len(self._inventories) < self._begin.nodes:
            self._inventory_event.clear()
            await self._inventory_event.wait()
        return dict(self._inventories)

    def node_of_rank(self) -> Mapping[int, int]:
        """Where each rank runs."""
        return {rank: node for node, register in self._registered.items() for rank in register.ranks}

    async def look(self) -> DiskView:
        """What storage offers."""
        return await self._commits.look()

    async def confirm(self) -> None:
        """Return when all members have just answered."""
        await self.gather()

    async def record_life(self, resumed: int) -> None:
        """See `Commits.record`."""
        await self._commits.record(resumed)

    def send(self, node_rank: int, message: Message) -> None:
        """To one member; lost if it is away, which it makes good when it registers again."""
        target = self._members.get(node_rank)
        if target is not None:
            target(message)

    def broadcast(self, message: Message) -> None:
        """To all members."""
        for target in list(self._members.values()):
            target(message)

    def settle_restore(self, plan: Plan | None) -> None:
        """All ranks resume from here: older history ends, and storage learns of this life."""
        step, durable, lost = (plan.step, plan.durable, plan.lost) if plan is not None else (None, False, ())
        self._ledger.restored(step, durable=durable, whole=not lost, now=self._clock())
        self._commits.settle(step, foreign=Foreign.of(plan, nodes=self._begin.nodes))
        self._tell_health()

    # --- members ---

    def receive(self, node_rank: int, message: Message, reply: SendTo) -> None:
        """A member's message. Never blocks."""
        if isinstance(message, Register):
            self._register(message, reply)
        elif isinstance(message, Opened):
            self._open(message, reply)
        elif isinstance(message, Ask):
            self._waiting.append(message)
            self.after(())
        elif isinstance(message, Sealed):
            self._commits.shares.sealed(message)
            self.after(self._ledger.sealed(message.rank, message.step))
        elif isinstance(message, StageFailed):
            self.after(
                self._ledger.failed(message.rank, message.step, reason=message.reason, now=self._clock())
            )
        elif isinstance(message, Replicated):
            self.after(self._ledger.replicated_by(message.rank, message.step, message.error))
        elif isinstance(message, Persisted):
            self._commits.persisted(message)
        elif isinstance(message, LoadWanted):
            self._spawn(self._load(message, node_rank), "a load")
        elif isinstance(message, Prepared):
            self._rounds.prepared(message)
        elif isinstance(message, Inventory):
            if message.number == self._inventory_number:
                self._note_inventory(message.node_rank, message.held)
        elif isinstance(message, DrainWanted):
            self._drains.add(message.node_rank)
            self._ledger.want_persist()
            self.after(self._ledger.gone(message.gone))
        elif isinstance(message, RankLoaded):
            _LOG.info("rank %d resumed from step %d (%s)", message.rank, message.step, message.tier)
        else:
            _LOG.warning("node %d sent %s, which is not for a lead", node_rank, type(message).__name__)

    def forget(self, node_rank: int, reply: SendTo) -> None:
        """A member's connection is gone. It may come back."""
        if self._members.get(node_rank) is reply:
            del self._members[node_rank]

    def _register(self, message: Register, reply: SendTo) -> None:
        known = self._registered.get(message.node_rank)
        self._registered[message.node_rank] = message
        self._members[message.node_rank] = reply
        self._note_inventory(message.node_rank, message.held)
        _LOG.info(
            "node %d registered from %s with %d pieces",
            message.node_rank,
            message.address or "here",
            len(message.held),
        )
        if message.progressed:
            self._rounds.loaded = True
        if len(self._registered) < self._begin.nodes:
            return
        addresses = tuple(self._registered[node].address for node in range(self._begin.nodes))
        ranks = tuple(self._registered[node].ranks for node in range(self._begin.nodes))
        self.broadcast(Members(addresses=addresses, ranks=ranks))
        if known is None:
            self._take_over()
        else:
            self._rounds.again(message.node_rank)
            order = self._commits.outstanding(message.node_rank)
            if order is not None:
                reply(order)
            for piece in message.held:
                if piece.key.generation == self._begin.generation:
                    self.after(self._ledger.sealed(piece.rank, piece.key.step))
        self._check_ready()

    def _note_inventory(self, node_rank: int, held: tuple[Held, ...]) -> None:
        self._inventories[node_rank] = held
        self._inventory_event.set()

    def _take_over(self) -> None:
        """Everyone is here. If the generation is under way already, an earlier lead of it was lost."""
        if not self._rounds.loaded:
            return
        own = {
            node: tuple(piece for piece in pieces if piece.key.generation == self._begin.generation)
            for node, pieces in self._inventories.items()
        }
        plan = choose(own, (), node_of_rank=self.node_of_rank())
        if plan is not None:
            whole = not plan.reshaped and all(source.tier == MEMORY for source in plan.sources)
            self._ledger.taken_over(plan.step, whole=whole, now=self._clock())
            self._commits.take_over(plan.step)

    def _open(self, message: Opened, reply: SendTo) -> None:
        options = message.options
        if options.continuing:
            self._rounds.loaded = True
        if self._commits.options is None:
            self._commits.open(options)
        elif options.root != self.root:
            what = f"node {message.node_rank} saves to {options.root}, and others to {self.root}"
            failure = Failure(kind="Misuse", what=what, hint="give all ranks the same checkpoint folder")
            reply(Refused(failure=failure))
            return
        self._check_ready()

    def _check_ready(self) -> None:
        if len(self._registered) == self._begin.nodes and self._commits.options is not None:
            self._ready.set()
            self.after(())

    # --- saves ---

    def after(self, changes: tuple[Change, ...]) -> None:
        """Tell what changed, answer who waits, begin what is due."""
        for change in changes:
            _LOG.debug("step %d: %s %s", change.step, change.stage.value, change.reason)
            self.broadcast(self._reached(change))
        if self._closed or not self._ready.is_set():
            if self._commits.options is None:  # no rank has opened a checkpointer: there is nothing to drain
                self._answer_drains()
            return
        self._answer_asks()
        self._commits.start_if_due()
        self._tell_health()
        self._answer_drains()

    def _reached(self, change: Change) -> StageReached:
        sealed = change.stage is Stage.MEMORY
        roster = self._commits.shares.roster(change.step, self._begin.world_size) if sealed else ""
        return StageReached(step=change.step, stage=change.stage.value, reason=change.reason, roster=roster)

    def _answer_asks(self) -> None:
        if self._waiting and not self._rounds.loaded and self._save_refusal is None:
            if self._may_save is None:
                self._may_save = self._spawn(self._check_may_save(), "the look before the first save")
            return
        waiting, self._waiting = self._waiting, []
        for ask in waiting:
            if self._save_refusal:
                self._answer(ask, granted=False, reason=self._save_refusal, misuse=True)
                continue
            answer, changes = self._ledger.ask(
                ask.rank, ask.step, now=self._clock(), block=ask.block, metrics=ask.metrics, cost_s=ask.cost_s
            )
            for change in changes:
                self.broadcast(self._reached(change))
            if answer is None:
                self._waiting.append(ask)
            else:
                abandoned = answer.stage is Stage.ABANDONED
                self._answer(
                    ask,
                    granted=answer.granted,
                    reason=answer.reason,
                    abandoned=abandoned,
                    unprotected=answer.unprotected,
                    not_before=answer.not_before,
                )

    def _answer(
        self,
        ask: Ask,
        *,
        granted: bool,
        reason: str,
        abandoned: bool = False,
        misuse: bool = False,
        unprotected: bool = False,
        not_before: int = 0,
    ) -> None:
        verdict = Verdict(
            rank=ask.rank,
            step=ask.step,
            granted=granted,
            reason=reason,
            abandoned=abandoned,
            misuse=misuse,
            unprotected=unprotected,
            not_before=not_before,
            protect=self._ledger.protected,
        )
        self.send(self.node_of_rank()[ask.rank], verdict)

    async def _check_may_save(self) -> None:
        """A first save without a load must not leave earlier checkpoints behind."""
        try:
            view = await self.look()
            found = bool(view.on_disk or view.lost) or any(self._inventories.values())
        except EasyckptError as error:  # shown again, and retried, when the step is persisted
            _LOG.warning("storage cannot be looked at: %s", error)
            found = False
        self._save_refusal = FORGOTTEN_LOAD if found and not self._rounds.loaded else ""
        self.after(())

    def _answer_drains(self) -> None:
        if not self._drains:
            return
        ledger = self._ledger
        if ledger.persisting is not None or not (ledger.is_settled or ledger.persist_trouble):
            return
        drained = Drained(memory_step=ledger.complete, durable_step=ledger.durable, degraded=self._trouble)
        for node_rank in sorted(self._drains):
            self.send(node_rank, drained)
        self._drains.clear()

    @property
    def _trouble(self) -> str:
        return self._ledger.trouble(self._clock(), storage=self._commits.trouble)

    def _tell_health(self) -> None:
        ledger = self._ledger
        health = Health(
            memory_step=ledger.complete,
            replicated_step=ledger.replicated,
            durable_step=ledger.durable,
            degraded=self._trouble,
        )
        if health != self._health:
            self._health = health
            self.broadcast(health)

    async def _load(self, message: LoadWanted, node_rank: int) -> None:
        await self._ready.wait()
        self.send(node_rank, await self._rounds.want(message.index, message.step))

    async def _tick(self) -> None:
        while not self._closed:
            await asyncio.sleep(TICK_S)
            self.after(self._ledger.expire(self._clock()))

    async def finish(self) -> None:
        """Before the end of the job: what retention has left for later."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._commits.tidy(), FINISH_TIMEOUT_S)

    def close(self) -> None:
        """The generation is over."""
        self._closed = True
        self._commits.close()
        self._members.clear()
