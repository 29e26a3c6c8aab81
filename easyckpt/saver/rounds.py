"""The lead's side of a restore: one step for all ranks, proved on every node before any rank reads a byte.

A *round* is the n-th load of every rank in a generation. The lead chooses a plan (`easyckpt.tiers`), tells
every member to get its ranks' pieces ready and verified, and only when all have answered does it say `Go`.
A piece that cannot be had from where the plan said is struck out and the plan is made again, from the next
tier or for an older step. Each attempt strikes out at least one source, so that it ends.

A step that another number of ranks saved takes two orders: first every node proves what it holds of it, then
every node puts together what its ranks want (`easyckpt.saver.resume`). A rank that cannot take what was saved
refuses, and then no rank loads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import msgspec

from easyckpt.errors import EasyckptError, NothingToLoad
from easyckpt.saver.disk import DiskView
from easyckpt.saver.frames import make_failure
from easyckpt.saver.peering import Go, Prepare, Prepared, Source
from easyckpt.saver.protocol import Begin, Failure, Held, Key, Message
from easyckpt.tiers import DISK, Plan, choose

__all__ = ["RestoreHost", "Rounds"]

ERRORS_KEPT = 8
ORDERS_MAX = 100
"""How often members may lose their connection in one attempt."""

_LOG = logging.getLogger("easyckpt.saver")


class RestoreHost(Protocol):
    """What a restore needs from the lead."""

    @property
    def begin(self) -> Begin: ...

    @property
    def root(self) -> str: ...

    async def gather(self) -> Mapping[int, tuple[Held, ...]]:
        """Node rank → pieces in memory, asked anew for each round."""
        ...

    def node_of_rank(self) -> Mapping[int, int]: ...

    async def look(self) -> DiskView: ...

    def send(self, node_rank: int, message: Message) -> None: ...

    def broadcast(self, message: Message) -> None: ...

    async def record_life(self, resumed: int) -> None:
        """Have storage know that newer steps are left behind."""
        ...

    def settle_restore(self, plan: Plan | None) -> None:
        """All ranks resume from here."""
        ...


@dataclass(slots=True, kw_only=True)
class _Round:
    index: int
    step: int | None
    attempt: int = 0
    answers: dict[int, Prepared] = field(default_factory=dict)
    all_answered: asyncio.Event = field(default_factory=asyncio.Event)
    bad: set[Source] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    refusal: Failure | None = None
    """A rank cannot take the step, whatever its sources."""
    outcome: Go | None = None


class Rounds:
    """All restores of one generation. Runs in the lead's event loop."""

    def __init__(self, host: RestoreHost) -> None:
        self._host = host
        self._rounds: dict[int, _Round] = {}
        self._running = asyncio.Lock()
        self.loaded = False
        """Whether a restore was settled in this generation (with a step or with nothing)."""

    async def want(self, index: int, step: int | None) -> Go:
        """A rank's load. Runs the round if it is the first to ask.

        Returns:
            What every rank is told. It was broadcast already if the round ran just now.
        """
        entry = self._rounds.get(index)
        if entry is None:
            entry = self._rounds[index] = _Round(index=index, step=step)
        async with self._running:
            if entry.outcome is None:
                entry.outcome = await self._run(entry)
                self._host.broadcast(entry.outcome)
        return entry.outcome

    def prepared(self, message: Prepared) -> None:
        """A member's answer."""
        entry = self._rounds.get(message.index)
        if entry is None or message.attempt != entry.attempt:
            return
        entry.answers[message.node_rank] = message
        if set(entry.answers) >= set(self._host.node_of_rank().values()):
            entry.all_answered.set()

    def again(self, node_rank: int) -> None:
        """A member has come back and lost what it was told: its part of the running attempt fails."""
        for entry in self._rounds.values():
            if entry.outcome is None and node_rank not in entry.answers and entry.attempt:
                entry.errors.append(f"node {node_rank} lost its connection")
                self.prepared(Prepared(node_rank=node_rank, index=entry.index, attempt=entry.attempt,
                                       errors=("connection lost",)))  # fmt: skip

    async def _run(self, entry: _Round) -> Go:
        try:
            view = await self._host.look()
        except EasyckptError as error:
            _LOG.warning("storage cannot be looked at: %s", error)
            entry.errors.append(str(error))
            view = DiskView(lost=(f"storage: {error}",))
        held = await self._host.gather()
        while True:
            plan = self._choose(entry, held, view)
            if plan is None:
                return self._nothing(entry, view)
            if await self._attempt(entry, plan, view):
                if any(item.step > plan.step for item in view.on_disk):
                    try:
                        await self._host.record_life(plan.step)
                    except EasyckptError as error:
                        return Go(index=entry.index, step=None, failure=make_failure(error), asked=entry.step)
                self.loaded = True
                self._host.settle_restore(plan)
                return Go(index=entry.index, step=plan.step, durable=plan.durable, asked=entry.step)
            if entry.refusal is not None:
                _LOG.error("load %d: %s", entry.index, entry.refusal.what)
                return Go(index=entry.index, step=None, failure=entry.refusal, asked=entry.step)

    def _choose(self, entry: _Round, held: Mapping[int, tuple[Held, ...]], view: DiskView) -> Plan | None:
        """The best plan. Where all steps are set aside the oldest is better than none."""
        find = partial(
            choose,
            held,
            view.on_disk,
            node_of_rank=self._host.node_of_rank(),
            step=entry.step,
            bad=frozenset(entry.bad),
        )
        below = self._host.begin.restore_below
        if entry.step is not None or below is None:
            return find()
        plan = find(below=below)
        if plan is None:  # the farthest from what is in doubt
            older = find()
            while older is not None:
                plan, older = older, find(below=older.step)
        _LOG.warning("steps from %d on are set aside; resuming from %s", below, plan and f"step {plan.step}")
        return plan

    async def _attempt(self, entry: _Round, plan: Plan, view: DiskView) -> bool:
        if not plan.reshaped:
            return await self._order(entry, plan, view)
        in_memory = any(source.tier != DISK for source in plan.sources)
        if in_memory and not await self._order(entry, plan, view):
            return False
        return await self._order(entry, plan, view, assemble=True)

    async def _order(self, entry: _Round, plan: Plan, view: DiskView, *, assemble: bool = False) -> bool:
        """Tell all members what to get ready, and wait until all have answered; whether all have it."""
        for _ in range(ORDERS_MAX):
            entry.attempt += 1
            entry.answers.clear()
            entry.all_answered.clear()
            _LOG.info(
                "load %d, attempt %d: step %d from %s", entry.index, entry.attempt, plan.step, _tiers(plan)
            )
            self._send_orders(entry, plan, view, assemble=assemble)
            await entry.all_answered.wait()
            answers = tuple(entry.answers.values())
            failed = [source for answer in answers for source in answer.failed]
            texts = [text for answer in answers for text in answer.errors]
            for text in texts:
                _LOG.warning("load %d: %s", entry.index, text)
            entry.errors.extend(texts)
            del entry.errors[:-ERRORS_KEPT]
            entry.bad.update(failed)
            entry.refusal = next((answer.refusal for answer in answers if answer.refusal is not None), None)
            if failed or entry.refusal is not None or not texts:
                return not failed and entry.refusal is None
            # a member came back and lost what it was told: the same plan again
        return False

    def _send_orders(self, entry: _Round, plan: Plan, view: DiskView, *, assemble: bool) -> None:
        nodes = self._host.node_of_rank()
        manifest = b""
        if any(source.tier == DISK for source in plan.sources) and plan.on_disk is not None:
            found = view.manifests[(plan.on_disk.step, plan.on_disk.generation)]
            manifest = msgspec.json.encode(found)
        for node_rank in sorted(set(nodes.values())):
            sources = plan.sources
            if not plan.reshaped:
                sources = tuple(source for source in sources if nodes[source.rank] == node_rank)
            order = Prepare(
                index=entry.index,
                attempt=entry.attempt,
                key=Key(self._host.begin.generation, plan.step),
                from_key=plan.memory_key,
                sources=sources,
                manifest=manifest,
                root=self._host.root,
                saved_ranks=plan.world_size if plan.reshaped else 0,
                assemble=assemble,
            )
            self._host.send(node_rank, order)

    def _nothing(self, entry: _Round, view: DiskView) -> Go:
        error = self._why_nothing(entry, view)
        if error is None:
            self.loaded = True
            self._host.settle_restore(None)
            return Go(index=entry.index, step=None, asked=entry.step)
        _LOG.error("load %d: %s", entry.index, error)
        return Go(index=entry.index, step=None, failure=make_failure(error), asked=entry.step)

    def _why_nothing(self, entry: _Round, view: DiskView) -> EasyckptError | None:
        """The error that is due when no step can be restored; None when there never was one."""
        where = self._host.root
        said = "; ".join(entry.errors[-3:] + list(view.lost[:3]))
        if entry.step is not None:
            return NothingToLoad(
                f"step {entry.step} cannot be loaded" + (f": {said}" if said else ""),
                where=where,
                hint="`easyckpt ls` shows the steps that can",
            )
        if self._host.begin.progress_expected or view.lost or entry.bad:
            return NothingToLoad(
                "training had progressed, and no step of it can be loaded" + (f": {said}" if said else ""),
                where=where,
                hint="`easyckpt why` says more; use an empty folder to start from the beginning",
            )
        return None


def _tiers(plan: Plan) -> str:
    counts: dict[str, int] = {}
    for source in plan.sources:
        counts[source.tier] = counts.get(source.tier, 0) + 1
    text = ", ".join(f"{tier} ({count} ranks)" for tier, count in counts.items())
    if plan.lost:
        text += f", but for the pieces of ranks {list(plan.lost[:ERRORS_KEPT])}, whose tensors others have"
    return f"{text}, saved by {plan.world_size} ranks" if plan.reshaped else text
