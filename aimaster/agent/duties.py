"""What the agent does when the master says so: prepare, start, end. One order at a time, the newest first.

Every order is answered by a fact, and answered again if it comes again (the master may have lost the answer).
A look at a node under suspicion may take a minute; an order that comes meanwhile is not kept waiting.
Nothing here decides: what cannot be done is reported as `NodeFailed`, and the master draws the conclusion.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aimaster.agent.assignment import Assignment
from aimaster.agent.orders import Orders
from aimaster.agent.ports import HeldPort
from aimaster.agent.recheck import Rechecks
from aimaster.agent.reports import StopOutcome, WorkerExit
from aimaster.agent.spoken import say
from aimaster.agent.workers import Workers
from aimaster.core.commands import CheckNode, Command, EndNode, Prepare, Reason, StartWorkers
from aimaster.core.events import (
    AgentPhase,
    NodeEvent,
    NodeFailed,
    NodePrepared,
    WorkerExited,
    WorkersStarted,
)
from aimaster.errors import SetupError
from aimaster.ids import NO_GENERATION, Generation
from aimaster.integrations.easyckpt import NodeSaver
from aimaster.rpc.limits import clip
from aimaster.rpc.messages import Identity

HUNG_GRACE_S = 3.0
"""From SIGTERM to SIGKILL for workers that hang: what has not answered for so long seldom will."""

MEET_S = 15.0
"""How long a worker that can outlive its generation may take to leave it: a step or a save, not more."""
_NOBODY_STAYS = frozenset({Reason.NODE_IS_SPARE, Reason.RESENT})
"""A spare has no next generation to wait for; what an agent missed may have been that it is one."""


class Duties:
    """Carries out orders on this node. Used on the agent's event loop alone."""

    def __init__(
        self,
        identity: Identity,
        *,
        workers: Workers,
        saver: NodeSaver,
        rechecks: Rechecks,
        stop_grace_s: float,
        report: Callable[[NodeEvent], None],
        idle_on: Callable[[StartWorkers], bool],
    ) -> None:
        """Nothing happens yet.

        Args:
            identity: Who reports.
            workers: What is started and stopped.
            saver: The node's checkpoint saver, told of every generation.
            rechecks: Looks at the node where a suspicion falls on it.
            stop_grace_s: From SIGTERM to SIGKILL.
            report: Takes facts for the master.
            idle_on: Whether this node starts nothing in a generation (a command on another node).
        """
        self.phase = AgentPhase.IDLE
        self.generation: Generation = NO_GENERATION
        self.running: StartWorkers | None = None
        self.started = asyncio.Event()
        """Set when workers were started; whoever watches them clears it."""
        self._identity = identity
        self._workers = workers
        self._saver = saver
        self._rechecks = rechecks
        self._stop_grace_s = stop_grace_s
        self._report = report
        self._idle_on = idle_on
        self._orders = Orders()
        self._given = asyncio.Event()
        self._port: HeldPort | None = None

    def give(self, command: Command) -> None:
        """Take in what the master says."""
        if isinstance(command, CheckNode):
            self._rechecks.suspect(command.why, command.generation)
        elif self._orders.give(command):
            self._given.set()

    async def run(self) -> EndNode:
        """Carry out orders until one says that this node is done."""
        while True:
            order = self._orders.take()
            if order is None:
                self._given.clear()
                await self._given.wait()
            elif isinstance(order, Prepare):
                await self._prepare(order)
            elif isinstance(order, StartWorkers):
                await self._start(order)
            else:
                return order

    async def stop_workers(self, grace_s_max: float | None = None, *, meet_s: float = 0.0) -> StopOutcome:
        """Stop whatever runs and prove it gone, but for workers that outlive their generation in `meet_s`."""
        grace_s = self._stop_grace_s
        grace_s = grace_s if grace_s_max is None else min(grace_s, grace_s_max)
        outcome = await self._workers.stop(grace_s, meet_s=meet_s)
        self.running = None
        return outcome

    def close(self) -> None:
        """Give the held port back."""
        if self._port is not None:
            self._port.close()
            self._port = None

    def worker_ended(self, ended: WorkerExit) -> None:
        """A worker ended by itself: tell the master."""
        self._rechecks.worker_ended(ended)
        self._report(
            WorkerExited(
                node=self._identity.node,
                incarnation=self._identity.incarnation,
                generation=ended.generation,
                local_rank=ended.local_rank,
                rank=ended.rank,
                exit_code=ended.exit_code,
                signal=ended.signal,
                step=self._saver.step_of(ended.generation, ended.steps),
                error=clip(ended.error),
                error_digest=ended.error_digest,
                stalled_s=ended.held_s,
            )
        )

    async def _prepare(self, order: Prepare) -> None:
        if self.phase is not AgentPhase.PREPARED or self.generation != order.generation:
            hung = order.reason is Reason.WORKERS_HUNG
            meet_s = 0.0 if order.reason in _NOBODY_STAYS else HUNG_GRACE_S if hung else MEET_S
            outcome = await self.stop_workers(HUNG_GRACE_S if hung else None, meet_s=meet_s)
            if outcome.stayed:
                say(f"{outcome.stayed} workers outlive generation {self.generation} in their processes")
            self.phase = AgentPhase.IDLE
            self._report_ends(outcome)
            if not outcome.gone:
                self._fail(order.generation, "cannot be killed: " + "; ".join(outcome.unkillable))
                return
            if not self._orders.waiting:
                self._given.clear()
            against = await self._rechecks.settled(order.generation, unless=self._given)
            if against is None:
                return  # what was given meanwhile is the newer word
            if against:
                self._fail(order.generation, f"the node check found: {against}")
                return
            self.close()
            try:
                self._port = HeldPort()
            except OSError as error:
                self._fail(order.generation, f"no port for the workers' store ({error.strerror})")
                return
            self.phase, self.generation = AgentPhase.PREPARED, order.generation
        assert self._port is not None
        self._report(
            NodePrepared(
                node=self._identity.node,
                incarnation=self._identity.incarnation,
                generation=order.generation,
                rendezvous_port=self._port.port,
            )
        )

    def _report_ends(self, outcome: StopOutcome) -> None:
        """Those that failed by themselves while they were being stopped: one of them may be the first cause.

        Their generation is over, so the master only writes them down.
        """
        for ended in outcome.exits:
            if ended.exit_code and ended.error:
                self.worker_ended(ended)

    async def _start(self, order: StartWorkers) -> None:
        if (self.phase, self.generation) != (AgentPhase.RUNNING, order.generation):
            if (self.phase, self.generation) != (AgentPhase.PREPARED, order.generation):
                return  # never prepared for it: a Prepare of this or a newer generation is on its way
            try:
                await self._saver.begin(order)
                if not self._idle_on(order):
                    await self._workers.start(_assignment(order))
            except SetupError as error:
                say(str(error))
                self._fail(order.generation, str(error))
                return
            self.phase, self.running = AgentPhase.RUNNING, order
            self.started.set()
        self._report(
            WorkersStarted(
                node=self._identity.node,
                incarnation=self._identity.incarnation,
                generation=order.generation,
            )
        )
        if self._idle_on(order):
            self._report_idle_rank(order)

    def _report_idle_rank(self, order: StartWorkers) -> None:
        """A node that has nothing to start in this generation has finished with it."""
        self._report(
            WorkerExited(
                node=self._identity.node,
                incarnation=self._identity.incarnation,
                generation=order.generation,
                local_rank=0,
                rank=order.first_rank,
                exit_code=0,
                signal=None,
                step=None,
            )
        )

    def _fail(self, generation: Generation, what: str) -> None:
        self._report(
            NodeFailed(
                node=self._identity.node,
                incarnation=self._identity.incarnation,
                generation=generation,
                what=clip(what),
            )
        )


def _assignment(order: StartWorkers) -> Assignment:
    return Assignment(
        generation=order.generation,
        attempt=order.attempt,
        node_rank=order.node_rank,
        nodes=order.nodes,
        first_rank=order.first_rank,
        world_size=order.world_size,
        master_addr=order.master_addr,
        master_port=order.master_port,
        progress_expected=order.progress_expected,
    )
