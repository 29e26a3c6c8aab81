"""A master for tests of the wire alone: takes everything, remembers it, and decides nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

from aimaster.clock import SystemClock
from aimaster.core.commands import Command
from aimaster.core.events import AgentPhase, NodeEvent
from aimaster.ids import NO_GENERATION, Incarnation, JobId, NodeId
from aimaster.rpc.client import LinkCallbacks, LinkState, MasterLink
from aimaster.rpc.messages import Heartbeat, Hello, Identity, ProcessInfo, Refused, Role, Welcome
from aimaster.rpc.security import Credentials
from aimaster.rpc.server import AgentServer
from aimaster.rpc.status import JobStatus
from aimaster.rpc.transport import Endpoint, bind

JOB = JobId("job-1")
PATIENCE_S = 30.0
"""Longest wait for anything in these tests; a slow machine only makes them slow."""


class RecordingMaster:
    """Everything that the server handed over."""

    def __init__(self, *, interval_s: float = 0.05) -> None:
        self.welcome = Welcome(
            protocol=1, heartbeat_interval_s=interval_s, agent_orphan_timeout_s=60, software="test"
        )
        self.hellos: list[tuple[Identity, Hello]] = []
        self.facts: list[NodeEvent] = []
        self.beats: list[tuple[Identity, Heartbeat]] = []
        self.gone: list[Identity] = []
        self.refuse: Refused | None = None
        self.acked: dict[Identity, int] = {}
        self.silent = False

    async def admit(self, identity: Identity, hello: Hello) -> Refused | None:
        self.hellos.append((identity, hello))
        return self.refuse

    async def take(self, fact: NodeEvent) -> None:
        identity = Identity(job=JOB, node=fact.node, incarnation=fact.incarnation)
        if fact.seq > self.acked.get(identity, 0):
            self.facts.append(fact)
            if not self.silent:
                self.acked[identity] = fact.seq

    def acknowledged(self, identity: Identity) -> int:
        return self.acked.get(identity, 0)

    def beat(self, identity: Identity, beat: Heartbeat) -> None:
        self.beats.append((identity, beat))

    def disconnected(self, identity: Identity) -> None:
        self.gone.append(identity)

    def status(self) -> JobStatus:
        return JobStatus(
            job=JOB,
            phase="running",
            generation=NO_GENERATION,
            attempt=0,
            world_size=0,
            nodes=(),
            master=ProcessInfo(role=Role.MASTER, pid=1),
            master_node="",
            memory_step=None,
            durable_step=None,
            budgets=(),
            incidents=(),
            waiting_for="",
            epoch=1,
            software="test",
        )


def hello(**changes: object) -> Hello:
    fields: dict[str, object] = {
        "software": "test 1",
        "address": "127.0.0.1",
        "workers": 2,
        "min_nodes": 1,
        "max_nodes": 2,
        "processes": (ProcessInfo(role=Role.AGENT, pid=1),),
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


class Agent:
    """A link and what it has said and heard."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        node: str = "n1",
        incarnation: str = "i1",
        job: JobId = JOB,
        credentials: Credentials | None = None,
        said: Hello | None = None,
    ) -> None:
        self.identity = Identity(job=job, node=NodeId(node), incarnation=Incarnation(incarnation))
        self.commands: list[Command] = []
        self.states: list[LinkState] = []
        self.processes = (ProcessInfo(role=Role.AGENT, pid=1),)
        self.link = MasterLink(
            endpoint,
            credentials=credentials or Credentials.insecure(),
            identity=self.identity,
            callbacks=LinkCallbacks(
                hello=lambda: said or hello(processes=self.processes),
                heartbeat=lambda: Heartbeat(phase=AgentPhase.IDLE, processes=self.processes),
                on_command=self.commands.append,
                on_state=self.states.append,
            ),
            clock=SystemClock(),
            rng=random.Random(1),
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> Agent:
        self.task = asyncio.create_task(self.link.run())
        return self

    async def close(self) -> None:
        await self.link.close()
        if self.task is not None:
            await asyncio.wait_for(asyncio.gather(self.task, return_exceptions=True), PATIENCE_S)

    @property
    def connected(self) -> bool:
        return self.link.connected_since is not None


@contextlib.asynccontextmanager
async def serving(
    master: RecordingMaster,
    *,
    port: int = 0,
    credentials: Credentials | None = None,
    epoch: int = 1,
    job: JobId = JOB,
) -> AsyncIterator[tuple[AgentServer, Endpoint]]:
    bound = bind(Endpoint(host="127.0.0.1", port=port), credentials or Credentials.insecure())
    server = AgentServer(
        master,
        job=job,
        incarnation=Incarnation(f"m{epoch}"),
        epoch=epoch,
        bound=bound,
    )
    await server.start()
    try:
        yield server, bound.endpoint
    finally:
        await server.stop()


async def until(condition: Callable[[], object]) -> None:
    """Poll, since a remote peer gives no signal; fails after `PATIENCE_S`."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)
