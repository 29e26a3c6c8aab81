"""The master: what agents say becomes events, events become decisions, decisions become commands.

```
sessions ──facts, arrivals──▶ ledger (one writer): machine → journal ──▶ commands, timers, acknowledgements
    └────heartbeats──▶ failure detector, table          ▲
                            └──suspected, died──────────┘
```

Heartbeats never enter the queue: they cost constant time and write nothing. Everything else goes through the
ledger, so there is one order of events, and the journal holds it.

The master measures how late it is itself (a tick that comes late, because the process was stopped or the
machine is overloaded) and takes that off every node's silence. After a restart, nodes that have not come back
are watched only after a grace, since they first have to notice.

It ends when the job is over and every agent has gone, or after a bound.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

from aimaster.core.commands import (
    CancelTimer,
    CheckNode,
    Command,
    EndNode,
    FinishJob,
    Prepare,
    SetTimer,
    StartWorkers,
)
from aimaster.core.detector import Detector
from aimaster.core.events import (
    JobDeclared,
    NodeDied,
    NodeEvent,
    NodeJoined,
    NodeLeft,
    StepCommitted,
)
from aimaster.core.state import JobPhase
from aimaster.core.transitions import IllegalEvent
from aimaster.ids import Generation, NodeId
from aimaster.journal.base import Entry
from aimaster.master.commits import HeldCommits
from aimaster.master.hangs import Hangs
from aimaster.master.ledger import Ledger, Outcome
from aimaster.master.options import MasterOptions
from aimaster.master.picture import draw
from aimaster.master.recovery import Standing
from aimaster.master.slow import Slowness
from aimaster.master.table import NodeTable
from aimaster.master.timers import Timers
from aimaster.rpc import limits
from aimaster.rpc.messages import Heartbeat, Hello, Identity, RefusalKind, Refused, Welcome
from aimaster.rpc.server import AgentServer
from aimaster.rpc.status import JobStatus
from aimaster.rpc.transport import Bound
from aimaster.rpc.version import software
from aimaster.rpc.waiting import within

TICK_S = 0.5
"""How often the failure detector looks; also how finely lateness is measured."""
RECONNECT_GRACE_S = 5.0
"""After a restart, the head start of nodes that have not come back yet: longer than a link's back-off."""
FAREWELL_S = 10.0
"""Once the job is over, how long agents that are still connected may take to hang up."""
END_MAX_S = 120.0
"""Once the end is decided, how long the master lives at most."""

log = logging.getLogger(__name__)


class MasterService:
    """One life of a master. Implements `aimaster.rpc.server.Master`; used on one event loop."""

    def __init__(
        self,
        options: MasterOptions,
        standing: Standing,
        *,
        bound: Bound,
        told: Callable[[Entry], None] = lambda _: None,
    ) -> None:
        self._options = options
        self._told = told
        self._standing = standing
        self._machine = standing.machine
        self._clock = standing.clock
        self._detector = Detector(options.detector)
        self._hangs = Hangs(options.hang, standing.machine.state)
        self._slowness = Slowness(standing.machine.state)
        self._table = NodeTable()
        self._held = HeldCommits()
        self._ledger = Ledger(standing, carry_out=self._carry_out)
        self._timers = Timers(self._ledger.put)
        self._declared = standing.machine.state.job.declared
        self._ending = asyncio.Event()
        self._changed = asyncio.Event()
        self.welcome = Welcome(
            protocol=limits.PROTOCOL_MAX,
            heartbeat_interval_s=options.detector.heartbeat_interval_s,
            agent_orphan_timeout_s=options.orphan_timeout_s,
            software=software(),
        )
        self._server = AgentServer(
            self,
            job=options.job,
            incarnation=standing.life.incarnation,
            epoch=standing.life.epoch,
            bound=bound,
        )
        self._server.generation = standing.machine.state.job.generation

    async def start(self) -> None:
        """Begin to answer agents."""
        await self._server.start()

    async def run(self) -> None:
        """Lead the job until it is over.

        Raises:
            AimasterError: the journal cannot be written any more.
        """
        for command in self._machine.outstanding(self._clock.now()):
            self._do(command)
        tasks = [
            asyncio.create_task(self._ledger.run(), name="ledger"),
            asyncio.create_task(self._tick(), name="tick"),
            asyncio.create_task(self._until_over(), name="until-over"),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Hang up and give the journal back."""
        self._timers.close()
        await self._server.stop()
        self._ledger.close()

    # What the server hands over -----------------------------------------------------------------------------

    async def admit(self, identity: Identity, hello: Hello) -> Refused | None:
        """Journal an arrival; the first one says what the job is."""
        refused = await self._check_declaration(identity, hello)
        if refused is None and self._is_retired(identity):
            refused = _superseded(identity)
        if refused is not None:
            return refused
        # Watched from now on: its death must not be found out while its arrival waits in the queue.
        self._detector.watch(identity.node, identity.incarnation, self._clock.now())
        self._queue_commits()
        outcome = await self._ledger.settle(
            NodeJoined(
                node=identity.node,
                incarnation=identity.incarnation,
                address=hello.address,
                workers=hello.workers,
                saver_address=hello.saver_address,
                wanted_node_rank=hello.wanted_node_rank,
                phase=hello.phase,
                generation=hello.generation,
            )
        )
        if isinstance(outcome, IllegalEvent):
            return Refused(kind=RefusalKind.MISMATCH, message=str(outcome))
        if not self._is_current(identity):
            return _superseded(identity)
        self._standing.intake.open(identity.node, identity.incarnation)
        self._table.hello(identity, hello, now=self._clock.now())
        return None

    async def take(self, fact: NodeEvent) -> None:
        """Queue a fact that is new; say again how far the journal is if it is not."""
        await self._ledger.room()
        if not self._standing.intake.accept(fact.node, fact.incarnation, seq=fact.seq):
            self._server.acknowledge(fact.node)
        elif isinstance(fact, StepCommitted):
            self._held.hold(fact, self._clock.now())
            self._standing.times.ages.note(fact, self._clock.now())
        else:
            self._queue_commits()
            self._queue_fact(fact)

    def acknowledged(self, identity: Identity) -> int:
        """Highest number of this agent's facts that is journalled."""
        return self._standing.intake.acknowledged(identity.node, identity.incarnation)

    def beat(self, identity: Identity, beat: Heartbeat) -> None:
        """Constant time, whatever the size of the job."""
        now = self._clock.now()
        if not self._detector.watches(identity.node, identity.incarnation):
            # It was given up and does not know it: it has to join again.
            self._server.hang_up(identity)
            return
        recovered = self._detector.heartbeat(identity.node, identity.incarnation, now)
        if recovered is not None:
            self._ledger.put(recovered)
        self._table.beat(identity, beat, now=now)
        self._hangs.take(identity, beat, now)
        self._slowness.take(identity, beat)
        caught_up = self._standing.times.take(beat)
        if caught_up is not None:
            self._ledger.put(caught_up)

    def disconnected(self, identity: Identity) -> None:
        """A second witness for the detector, no verdict."""
        self._detector.connection_lost(identity.node, identity.incarnation)
        self._changed.set()

    def status(self) -> JobStatus:
        """All that people may know; costs time by the number of nodes."""
        now, times = self._clock.now(), self._standing.times
        view = self._machine.view(now)
        view = replace(
            view,
            memory_step=self._held.newest(view.memory_step, durable=False),
            durable_step=self._held.newest(view.durable_step, durable=True),
        )
        status = draw(
            view,
            options=self._options,
            epoch=self._standing.life.epoch,
            table=self._table,
            server=self._server,
            incidents=self._standing.incidents.told(),
            moment=(now, self._ledger.trouble),
        )
        return replace(
            status,
            hang=self._hangs.status(),
            slow=self._slowness.status(),
            goodput=times.status(now),
            memory_age_s=times.ages.age_s(view.memory_step, durable=False, now=now),
            durable_age_s=times.ages.age_s(view.durable_step, durable=True, now=now),
        )

    async def _check_declaration(self, identity: Identity, hello: Hello) -> Refused | None:
        said = JobDeclared(
            job=identity.job,
            min_nodes=hello.min_nodes,
            max_nodes=hello.max_nodes,
            max_restarts=hello.max_restarts,
            scope=hello.scope,
        )
        if self._declared is None:
            self._declared = said  # before the wait, so that nobody else declares it meanwhile
            await self._ledger.settle(said)
        if said == self._declared:
            return None
        ours = self._declared
        return Refused(
            kind=RefusalKind.MISMATCH,
            message=f"job {ours.job} was declared with --nnodes {ours.min_nodes}:{ours.max_nodes}, "
            f"--max-restarts {_cap(ours)} and --restart-scope {ours.scope.value}, node {identity.node} says "
            f"{said.min_nodes}:{said.max_nodes}, {_cap(said)} and {said.scope.value}; "
            "start every node with the same command line",
        )

    def _is_current(self, identity: Identity) -> bool:
        node = self._machine.state.nodes.get(identity.node)
        return node is not None and node.incarnation == identity.incarnation

    def _is_retired(self, identity: Identity) -> bool:
        node = self._machine.state.nodes.get(identity.node)
        return node is not None and identity.incarnation in node.retired

    def _queue_commits(self) -> None:
        for commit in self._held.take():
            self._queue_fact(commit)

    def _queue_fact(self, fact: NodeEvent) -> None:
        def done(_: Outcome) -> None:
            self._standing.intake.journalled(fact.node, fact.incarnation, seq=fact.seq)
            self._server.acknowledge(fact.node)

        self._ledger.put(fact, done)

    # What was decided ---------------------------------------------------------------------------------------

    def _carry_out(self, entry: Entry) -> None:
        """Called with each step once it is in the journal."""
        self._standing.incidents.add(entry)
        self._standing.times.add(entry)
        self._told(entry)
        event = entry.record.event
        if isinstance(event, NodeLeft | NodeDied):
            self._table.gone(event.node, event.incarnation)
        # Of the dead the detector itself has let go; they may have joined again since.
        if isinstance(event, NodeLeft) and self._detector.watches(event.node, event.incarnation):
            self._detector.forget(event.node)
        for command in entry.record.decision.commands:
            self._do(command)
        self._changed.set()

    def _do(self, command: Command) -> None:
        if isinstance(command, Prepare | StartWorkers | CheckNode | EndNode):
            if isinstance(command, Prepare):
                self._server.generation = Generation(max(self._server.generation, command.generation))
            self._server.send(command)
        elif isinstance(command, SetTimer):
            self._timers.set(command)
        elif isinstance(command, CancelTimer):
            self._timers.cancel(command)
        elif isinstance(command, FinishJob):
            log.info("the job is over: exit code %d (%s)", command.exit_code, command.reason.value)
            self._ending.set()
        else:
            raise TypeError(f"no way to carry out a {type(command).__name__}")

    # What happens by time -----------------------------------------------------------------------------------

    async def _tick(self) -> None:
        # The detector excuses lateness between two looks, so the first one is taken at once.
        self._detector.scan(self._clock.now())
        await self._give_grace()
        while True:
            planned = self._clock.now() + TICK_S
            await asyncio.sleep(TICK_S)
            now = self._clock.now()
            verdicts = self._detector.scan(now, late_s=max(0.0, now - planned))
            seen = (self._hangs.scan(now), self._slowness.scan())
            findings = [found for found in seen if found is not None]
            if verdicts or findings or self._held.due(now):
                self._queue_commits()
            for event in (*verdicts, *findings):
                self._ledger.put(event)

    async def _give_grace(self) -> None:
        """Begin to watch, later, the nodes that an earlier life knew and that have not come back."""
        view = self._machine.view(self._clock.now())
        known: list[NodeId] = [node.node for node in view.nodes if not node.gone]
        if not known:
            return
        log.info("%d nodes have %.0f s to come back", len(known), RECONNECT_GRACE_S)
        await asyncio.sleep(RECONNECT_GRACE_S)
        now = self._clock.now()
        for node in self._machine.view(now).nodes:
            if not node.gone and not self._detector.watches(node.node, node.incarnation):
                self._detector.watch(node.node, node.incarnation, now)

    async def _until_over(self) -> None:
        """Return when the job is over and everyone has hung up, or has had the time to."""
        await self._ending.wait()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + END_MAX_S
        farewell: float | None = None
        if self._machine.state.job.phase is JobPhase.ENDED:
            # Led again after the end: agents may still come to hear that their goodbye is in the journal.
            await asyncio.sleep(RECONNECT_GRACE_S)
        while loop.time() < deadline:
            if self._machine.state.job.phase is JobPhase.ENDED:
                if self._server.session_count == 0:
                    return
                if farewell is None:
                    farewell = loop.time() + FAREWELL_S
                    deadline = min(deadline, farewell)
            self._changed.clear()
            wait_s = max(0.0, deadline - loop.time())
            try:
                await within(wait_s, self._changed.wait())
            except asyncio.TimeoutError:
                break
        log.warning("%d agents have not hung up; ending without them", self._server.session_count)


def _superseded(identity: Identity) -> Refused:
    return Refused(
        kind=RefusalKind.NODE_ID, message=f"a newer agent has become node {identity.node} of this job"
    )


def _cap(declared: JobDeclared) -> str:
    return "not given" if declared.max_restarts is None else str(declared.max_restarts)
