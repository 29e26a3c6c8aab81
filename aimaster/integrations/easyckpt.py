"""The agent's hold on its node's checkpoint saver. The only file of this package that knows easyckpt.

The saver is a helper: a job that never checkpoints must not notice when it is missing. So trouble with it is
said once and shown in `status`, and training starts all the same; a script that does use easyckpt meets the
error where it saves or loads.

The saver's client blocks, so each question is asked in one worker thread, in order. A saver that died is
started again and told of the generation; what it held in memory is on the peers, or comes with the next save.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from aimaster.core.commands import StartWorkers
from aimaster.core.events import NodeEvent, Restored, StepCommitted, Tier
from aimaster.ids import Generation, JobId, NodeId
from aimaster.rpc.messages import Identity
from easyckpt.errors import EasyckptError
from easyckpt.saver.client import SaverClient, SaverOptions, SaverProcess, SaverStatus, spawn
from easyckpt.saver.protocol import Begin

END_S = 10.0
"""How long a drained saver may take to be gone."""
RESTARTS_MAX = 20
"""A saver that dies more often in one life of an agent is left dead."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverPlan:
    """How a node's saver is started."""

    job: JobId
    node: NodeId
    socket: Path
    log: Path
    listen_host: str
    advertise: str
    """Address at which the savers of other nodes reach this one."""
    secret_file: Path | None
    linger_s: float
    memory_limit_bytes: int | None
    workers: int
    """Training processes of this node, whose checkpoints it holds."""
    own_world: bool = False
    """Whether this node's ranks are a world of their own, whose checkpoints it leads itself."""
    sweep: tuple[str, ...]
    """What a saver that nobody came back to becomes, so that nothing is left behind."""

    def options(self, *, port: str) -> SaverOptions:
        """In the saver's own words; port 0 takes a free one."""
        return SaverOptions(
            socket_path=str(self.socket),
            job_id=self.job,
            node_id=self.node,
            linger_s=self.linger_s,
            listen=f"{self.listen_host}:{port}",
            advertise=self.advertise,
            secret_file=str(self.secret_file) if self.secret_file is not None else "",
            memory_limit=self.memory_limit_bytes,
            log_path=str(self.log),
            then=self.sweep,
        )


class NodeSaver:
    """One node's saver as its agent sees it. All methods run on the agent's event loop."""

    def __init__(self, plan: SaverPlan, *, say: Callable[[str], None], own: Callable[[int], None]) -> None:
        """Nothing is started.

        Args:
            plan: How to start it.
            say: For trouble, in a sentence.
            own: Told the pid of every saver, which is a helper and no leftover of a worker.
        """
        self._plan = plan
        self._say = say
        self._own = own
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saver-client")
        self._client: SaverClient | None = None
        self._process: SaverProcess | None = None
        self._order: StartWorkers | None = None
        self._told: set[tuple[Generation, str, int]] = set()
        self._restored: dict[Generation, int] = {}
        self._restarts = 0
        self._life = secrets.token_hex(8)
        """The next agent of this node may find the same saver, and count its generations from 1 again."""
        self._slot_bytes = 0
        self.trouble = ""
        """Why there is no working saver, for people; empty when there is one."""

    @property
    def pid(self) -> int | None:
        """Of the saver, as far as it is known to live."""
        return self._process.pid if self._process is not None and self._client is not None else None

    @property
    def holds_steps(self) -> bool:
        """Whether there is something in its memory that a next life could use."""
        return self.pid is not None and self._slot_bytes > 0

    @property
    def address(self) -> str:
        """``host:port`` for the savers of other nodes; empty when there is none."""
        return self._process.listen_address if self._process is not None else ""

    async def start(self) -> None:
        """Start the saver, or adopt the one that an earlier agent of this node has left."""
        try:
            await self._ask(self._connect)
        except (EasyckptError, OSError) as error:
            self._in_trouble(f"no checkpoint saver: {error}")
        else:
            assert self._process is not None
            if self._process.adopted:
                self._say(f"adopted the checkpoint saver of an earlier life (pid {self._process.pid})")

    async def begin(self, order: StartWorkers) -> None:
        """Tell the saver of a generation."""
        self._order = order
        if self._client is None:
            await self._revive()
            return
        try:
            await self._ask(lambda: self._begin(order))
        except EasyckptError as error:
            self._in_trouble(f"checkpoints of generation {order.generation} have no lead: {error}")
            await self._revive()

    async def news(self, identity: Identity) -> list[NodeEvent]:
        """What became true since the last call: restores, and committed steps if this node leads."""
        if self._client is None:
            await self._revive()
            return []
        client = self._client
        try:
            status = await self._ask(client.status)
        except EasyckptError as error:
            self._in_trouble(f"the checkpoint saver does not answer: {error}")
            return []
        self._slot_bytes = status.slot_bytes
        self._note_degraded(status.degraded or "")
        return self._facts(status, identity)

    def step_of(self, generation: Generation, steps: int | None) -> int | None:
        """The training's own step after so many steps of an attempt; None where none is known.

        Where easyckpt restored a step, the count goes on from there; else it is the count itself.
        """
        base = self._restored.get(generation)
        return base if not steps else (base or 0) + steps

    async def persist_now(self, timeout_s: float) -> int | None:
        """Make durable what memory holds, as far as time allows; the newest durable step."""
        client = self._client
        if client is None:
            return None
        try:
            return (await self._ask(lambda: client.persist_now(timeout_s))).durable_step
        except EasyckptError as error:
            self._say(f"the newest step in memory did not become durable: {error}")
            return None

    async def finish(self, drain_s: float) -> None:
        """Drain the saver for `drain_s` at most, and see it gone: nobody will come back to it."""
        client, process = self._client, self._process
        self._client = None
        if client is not None and process is not None:
            try:
                await self._ask(lambda: client.shutdown(drain_s))
                await self._ask(lambda: _wait_gone(process, drain_s + END_S))
            except (EasyckptError, TimeoutError) as error:
                self._say(f"the checkpoint saver was left to end by itself: {error}")
        self._thread.shutdown(wait=False)

    async def release(self) -> None:
        """Leave the saver to the next agent of this node; it ends by itself after its linger."""
        client = self._client
        self._client = None
        if client is not None:
            with contextlib.suppress(EasyckptError):  # gone already: nothing to leave
                await self._ask(client.release)
        self._thread.shutdown(wait=False)

    async def _ask(self, question: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, question)

    def _connect(self) -> None:
        # A saver that takes the place of a dead one is found by the others where that one was.
        port = self.address.rpartition(":")[2] or "0"
        self._process = spawn(self._plan.options(port=port))
        self._own(self._process.pid)
        self._client = SaverClient(str(self._plan.socket), job_id=self._plan.job)
        self.trouble = ""

    def _begin(self, order: StartWorkers) -> None:
        assert self._client is not None
        own = self._plan.own_world
        self._client.begin(
            Begin(
                generation=order.generation,
                node_rank=0 if own else order.node_rank,
                nodes=1 if own else order.nodes,
                first_rank=0 if own else order.first_rank,
                ranks=self._plan.workers,
                world_size=self._plan.workers if own else order.world_size,
                lead_address=order.saver_lead,
                progress_expected=order.progress_expected,
                restore_below=order.restore_below,
                life=self._life,
            )
        )

    async def _revive(self) -> None:
        """Start a dead saver again and tell it where it is."""
        if self._restarts >= RESTARTS_MAX:
            return
        self._restarts += 1
        try:
            await self._ask(self._connect)
            if self._order is not None:
                order = self._order
                await self._ask(lambda: self._begin(order))
        except (EasyckptError, OSError) as error:
            self._in_trouble(f"no checkpoint saver: {error}")
        else:
            assert self._process is not None
            how = "was cut off and is back" if self._process.adopted else "was started again"
            self._say(f"the checkpoint saver {how} (pid {self.pid})")

    def _note_degraded(self, degraded: str) -> None:
        """Training goes on while steps do not get as safe as they should: said when it begins and when it
        ends."""
        if bool(degraded) != bool(self.trouble):
            said = (
                f"checkpoints are degraded: {degraded}" if degraded else "checkpoints are no longer degraded"
            )
            self._say(said)
        self.trouble = f"checkpoints are degraded: {degraded}" if degraded else ""

    def _in_trouble(self, sentence: str) -> None:
        if sentence != self.trouble:
            self.trouble = sentence
            self._say(sentence)
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None and self._process.process is not None:
            self._process.process.poll()  # reaps it if it has died

    def _facts(self, status: SaverStatus, identity: Identity) -> list[NodeEvent]:
        order = self._order
        if order is None or status.generation != order.generation:
            return []
        generation = order.generation
        facts: list[NodeEvent] = []
        for rank, step, tier in status.restored:
            if step is None:
                continue  # it asked, and there was nothing
            self._restored[generation] = step
            if self._first_time(generation, f"rank{rank}", step):
                facts.append(
                    Restored(
                        node=identity.node,
                        incarnation=identity.incarnation,
                        generation=generation,
                        rank=rank + (order.first_rank if self._plan.own_world else 0),
                        step=step,
                        tier=Tier(tier),
                    )
                )
        if order.node_rank != 0 and not self._plan.own_world:
            return facts
        for committed, durable in ((status.memory_step, False), (status.durable_step, True)):
            if committed is not None and self._first_time(generation, f"durable{durable}", committed):
                facts.append(
                    StepCommitted(
                        node=identity.node,
                        incarnation=identity.incarnation,
                        generation=generation,
                        step=committed,
                        durable=durable,
                    )
                )
        return facts

    def _first_time(self, generation: Generation, what: str, step: int) -> bool:
        key = (generation, what, step)
        if key in self._told:
            return False
        # Only the newest of each is compared again, so the set stays small.
        self._told = {known for known in self._told if known[:2] != key[:2]} | {key}
        return True


def _wait_gone(process: SaverProcess, timeout_s: float) -> None:
    if process.process is None:
        return  # adopted: not ours to wait for, and it was told to end
    try:
        process.process.wait(timeout_s)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"pid {process.pid} is still there after {timeout_s:g} s") from error
