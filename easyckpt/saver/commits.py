"""The lead's side of storage: which step is written when, by whom, and when it exists.

The ledger decides which step is due. Its writing is ordered from all members, each answers with its fragment,
and when all have, the manifest is created. Trouble goes back to the ledger, which tries again with growing
pauses; training never waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from easyckpt.errors import EasyckptError, StorageUnavailable
from easyckpt.interval import Pacer
from easyckpt.lanes import cores
from easyckpt.saver.disk import DiskView, Life, Vault, decode_ref
from easyckpt.saver.ledger import Change, Ledger, PersistPolicy
from easyckpt.saver.peering import Persisted, PersistStep
from easyckpt.saver.protocol import Begin, Key, Message, Open
from easyckpt.saver.shares import Shares
from easyckpt.tiers import Plan

__all__ = ["FINISH_TIMEOUT_S", "CommitHost", "Commits", "Foreign", "Spawn", "Threads"]

PERSIST_TIMEOUT_S = 3600.0
"""Until a node that has not reported its pieces counts as failed for this step."""

SLOW_AFTER_S = 60.0
"""From then on a step that is still being written is shown as trouble."""

LOOK_TIMEOUT_S = 30.0
"""A dead mount must not keep ranks from what memory holds."""

TIDY_S = 30.0
TIDY_COMMITS = 8
"""Retention reads a step back before it takes older ones away, so it runs for several at once: after so many
commits, or at the first one after so many seconds, and at the end."""

FINISH_TIMEOUT_S = 30.0

HASHING_THREADS_MIN, HASHING_THREADS_MAX = 2, 8
"""A quarter of the processors, within these."""

STORAGE_THREADS = 8
"""They wait: for lanes (`easyckpt.lanes`), which do the work, and for storage."""

_LOG = logging.getLogger("easyckpt.saver")

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """Where blocking work is done. Apart, so that storage that hangs never holds up a hash."""

    hashing: Executor
    storage: Executor

    @classmethod
    def make(cls) -> Threads:
        """For one saver."""
        hashing = max(HASHING_THREADS_MIN, min(HASHING_THREADS_MAX, cores() // 4))
        return cls(
            hashing=ThreadPoolExecutor(hashing, thread_name_prefix="hash"),
            storage=ThreadPoolExecutor(STORAGE_THREADS, thread_name_prefix="storage"),
        )

    def end(self) -> None:
        """Begin nothing more. Not waited for: storage that hangs must not keep the process."""
        for pool in (self.hashing, self.storage):
            pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """The restored step, where another number of ranks saved it."""

    step: int
    world_size: int
    ranks: tuple[tuple[int, ...], ...]
    """By node: the saved ranks whose pieces it writes; each stands once."""

    @classmethod
    def of(cls, plan: Plan | None, *, nodes: int) -> Foreign | None:
        """None if this many ranks saved it, or if pieces of it are lost."""
        if plan is None or not plan.reshaped or plan.lost:
            return None
        return cls(step=plan.step, world_size=plan.world_size, ranks=plan.holders(nodes))


class CommitHost(Protocol):
    """What the commits need from the lead."""

    def broadcast(self, message: Message) -> None: ...

    async def confirm(self) -> None:
        """Return when all members have just answered, and so still follow this lead."""
        ...

    def node_of_rank(self) -> Mapping[int, int]:
        """Where each rank runs."""
        ...

    def after(self, changes: tuple[Change, ...]) -> None:
        """Tell what changed, begin what is due."""
        ...


class Commits:
    """See the module. Runs in the lead's event loop."""

    def __init__(
        self,
        begin: Begin,
        *,
        ledger: Ledger,
        threads: Threads,
        spawn: Spawn,
        clock: Callable[[], float],
        host: CommitHost,
    ) -> None:
        self._begin = begin
        self._ledger = ledger
        self._threads = threads
        self._spawn = spawn
        self._clock = clock
        self._host = host
        self.shares = Shares()
        """Told of every seal."""
        self._options: Open | None = None
        self._vault: Vault | None = None
        self._life: Life | None = None
        self._fresh_life: Life | None = None
        """Recorded for a restore that is about to be settled."""
        self._life_lock = asyncio.Lock()
        self._resumed: int | None = None
        self._foreign: Foreign | None = None
        self._order: PersistStep | None = None
        self._work: asyncio.Task[None] | None = None
        self._began_at = 0.0
        self._fragments: dict[int, Persisted] = {}
        self._fragment_came = asyncio.Event()
        self._tidying = False
        self._tidied_at = 0.0
        self._untidied = 0
        self._closed = False

    @property
    def options(self) -> Open | None:
        """What the ranks' checkpointers said; None until the first did."""
        return self._options

    def open(self, options: Open) -> None:
        """The first rank's checkpointer says where and how."""
        self._options = options
        self._vault = Vault(options.root)
        self._ledger.policy = PersistPolicy(
            every_steps=options.disk_interval_steps,
            every_s=options.disk_interval_s,
            max_unprotected_s=options.max_unprotected_s,
        )
        self._ledger.pacer = Pacer(
            every_s=options.interval_s,
            auto=options.interval_auto,
            nodes=self._begin.nodes,
            failures=max(self._begin.generation - 1, 0),
        )

    @property
    def trouble(self) -> str:
        """What is wrong with storage, as far as it shows."""
        waited = self._clock() - self._began_at
        if self._order is not None and waited > SLOW_AFTER_S:
            return f"step {self._order.key.step} has been on its way to storage for {int(waited // 60)} min"
        return ""

    async def look(self) -> DiskView:
        """What storage offers.

        Raises:
            EasyckptError: the storage refuses or does not answer in time.
        """
        vault = self._opened()
        try:
            return await asyncio.wait_for(self._blocking(vault.look), LOOK_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise StorageUnavailable(f"no answer within {LOOK_TIMEOUT_S:g} s", where=vault.root) from None

    def settle(self, resumed: int | None, *, foreign: Foreign | None = None) -> None:
        """All ranks resume from this step: what was being written is history; storage learns of this life."""
        self._foreign = foreign
        self.shares.forget()
        if self._work is not None:
            self._work.cancel()
        self._order = None
        fresh, self._fresh_life = self._fresh_life, None
        self._life = fresh  # every restore is a life of its own: no name on storage is written twice
        if fresh is None:
            self._resumed = resumed
            self._spawn(self._try_begin_life(), "the record of this life")

    async def record(self, resumed: int) -> None:
        """Make this life known before it goes on from a step that leaves newer ones on storage behind.

        Raises:
            EasyckptError: storage refuses, so that the newer steps would come back at the next restart.
        """
        async with self._life_lock:
            self._life = None
            self._resumed = resumed
        self._fresh_life = await self._ensure_life()

    def take_over(self, resumed: int | None) -> None:
        """An earlier lead of this generation was lost: go on as a life of our own."""
        self._resumed = resumed

    def start_if_due(self) -> None:
        """Begin to write the step that the ledger says is due, if any."""
        step = self._ledger.next_persist(self._clock())
        if step is not None:
            self._began_at = self._clock()
            self._work = self._spawn(self._persist(step), "a persist")

    def persisted(self, message: Persisted) -> None:
        """A member has written, or says why not."""
        order = self._order
        if order is not None and (message.key, message.life) == (order.key, order.life):
            self._fragments[message.node_rank] = message
            self._fragment_came.set()

    def outstanding(self, node_rank: int) -> PersistStep | None:
        """What a member that came back has to be told again."""
        return self._order if node_rank not in self._fragments else None

    async def _persist(self, step: int) -> None:
        try:
            error = await asyncio.wait_for(self._write_and_commit(step), PERSIST_TIMEOUT_S)
        except asyncio.TimeoutError:
            lacking = sorted(set(range(self._begin.nodes)) - set(self._fragments))
            error = f"step {step}: nodes {lacking} did not write within {PERSIST_TIMEOUT_S:g} s"
        except (EasyckptError, OSError) as trouble:
            error = f"step {step}: {trouble}"
        except asyncio.CancelledError:  # history was cut, or the generation is over: nobody asks any more
            raise
        except BaseException:
            self._ended(step, "an error that nobody foresaw; see the saver's log on node 0")
            raise
        self._ended(step, error)

    def _ended(self, step: int, error: str) -> None:
        if error:
            _LOG.warning("not durable: %s", error)
        self._order = None
        self._host.after(self._ledger.persisted(step, error=error, now=self._clock()))
        # After a failure too: what was taken back long enough ago may be all that a full disk needs.
        self._untidied += 1
        if self._untidied >= TIDY_COMMITS or self._clock() - self._tidied_at >= TIDY_S:
            self._spawn(self.tidy(), "retention")

    async def _write_and_commit(self, step: int) -> str:
        life = await self._ensure_life()
        foreign = self._foreign if self._foreign is not None and self._foreign.step == step else None
        order = PersistStep(
            key=Key(self._begin.generation, step),
            life=life.generation,
            run_id=life.run_id,
            root=self._opened().root,
            ranks=foreign.ranks if foreign is not None else (),
            shares=() if foreign is not None else self.shares.of(step, self._host.node_of_rank()),
        )
        self._fragments.clear()
        self._order = order
        self._host.broadcast(order)
        while len(self._fragments) < self._begin.nodes:
            self._fragment_came.clear()
            await self._fragment_came.wait()
        failed = [message for message in self._fragments.values() if message.error]
        if failed:
            return f"node {failed[0].node_rank}: {failed[0].error}"
        commit = partial(
            self._opened().commit,
            tuple(decode_ref(message.fragment) for message in self._fragments.values() if message.fragment),
            life=life,
            step=step,
            world_size=self._begin.world_size if foreign is None else foreign.world_size,
            metrics=dict(self._ledger.metrics_of(step)),
        )
        return await self._blocking(commit)

    async def _ensure_life(self) -> Life:
        async with self._life_lock:
            if self._life is None:
                # A lead that was left behind by its members must not fence the life that replaced it.
                await self._host.confirm()
                begin = partial(
                    self._opened().begin_life,
                    world_size=self._begin.world_size,
                    resumed_step=self._resumed,
                    wanted=lambda: not self._closed,
                )
                self._life = await self._blocking(begin)
            return self._life

    def close(self) -> None:
        """The generation is over. What threads still do on storage is fenced, or harmless."""
        self._closed = True
        if self._work is not None:
            self._work.cancel()

    async def _try_begin_life(self) -> None:
        try:
            await self._ensure_life()
        except (EasyckptError, OSError) as error:
            _LOG.warning("this life is not recorded on storage yet: %s", error)

    async def tidy(self) -> None:
        """Have retention remove what is not kept."""
        if self._tidying or not self._untidied or self._life is None or self._options is None:
            return
        self._tidying = True
        self._untidied = 0
        self._tidied_at = self._clock()
        try:
            await self._blocking(
                partial(self._opened().tidy, keep=self._options.keep, generation=self._life.generation)
            )
        finally:
            self._tidying = False

    def _opened(self) -> Vault:
        assert self._vault is not None, "nothing reaches storage before a rank has opened its checkpointer"
        return self._vault

    async def _blocking(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads.storage, work)
