"""Real master processes and agents that are nothing but a `MasterLink`, for tests of the two together."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from aimaster.clock import SystemClock
from aimaster.core.commands import Command, EndNode, Prepare, StartWorkers
from aimaster.core.events import (
    AgentPhase,
    FirstStepDone,
    NodeEvent,
    NodeLeft,
    NodePrepared,
    WorkerExited,
    WorkersStarted,
)
from aimaster.core.sights import WorkerPhase
from aimaster.ids import NO_GENERATION, Generation, Incarnation, JobId, NodeId
from aimaster.rpc.client import LinkCallbacks, LinkState, MasterLink
from aimaster.rpc.messages import Heartbeat, Hello, Identity, ProcessInfo, RankProgress, Role
from aimaster.rpc.security import Credentials
from aimaster.rpc.transport import Endpoint

JOB = JobId("job-1")
PATIENCE_S = 60.0
"""Longest wait for anything in these tests; a slow machine only makes them slow."""


class MasterProcess:
    """A child as an agent would start it."""

    def __init__(self, state_dir: Path, *, listen: str = "127.0.0.1:0", extra: tuple[str, ...] = ()) -> None:
        self.state_dir = state_dir
        self.listen = listen
        self.extra = extra
        self.process: asyncio.subprocess.Process | None = None
        self.word: dict[str, object] = {}

    async def start(self, *more: str) -> dict[str, object]:
        """Start it and give the line that it says."""
        self.state_dir.mkdir(parents=True, exist_ok=True)
        reader, writer = os.pipe()
        argv = [sys.executable, "-m", "aimaster.master", "--job-id", JOB, "--listen", self.listen]
        argv += ["--state-dir", str(self.state_dir), "--ready-fd", str(writer), "--last-call", "0.5"]
        try:
            with (self.state_dir / "master.log").open("ab") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *argv, *self.extra, *more, pass_fds=(writer,), stderr=log
                )
        finally:
            os.close(writer)
        loop = asyncio.get_running_loop()
        with os.fdopen(reader, "rb") as pipe:
            line = await asyncio.wait_for(loop.run_in_executor(None, pipe.readline), PATIENCE_S)
        self.word = json.loads(line or b"{}")
        if "endpoint" in self.word:
            self.listen = str(self.word["endpoint"])
        return self.word

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint.parse(self.listen)

    async def kill(self) -> None:
        """As `kill -9` does."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(self.process.wait(), PATIENCE_S)

    async def ended(self) -> int:
        """Wait until it ends by itself."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), PATIENCE_S)

    def log(self) -> str:
        return (self.state_dir / "master.log").read_text()


@contextlib.asynccontextmanager
async def master_at(
    state_dir: Path, *more: str, listen: str = "127.0.0.1:0", extra: tuple[str, ...] = ()
) -> AsyncIterator[MasterProcess]:
    master = MasterProcess(state_dir, listen=listen, extra=extra)
    word = await master.start(*more)
    assert "endpoint" in word, (word, master.log())
    try:
        yield master
    finally:
        await master.kill()


class FakeAgent:
    """Does what it is told as an agent would, with workers that are only numbers."""

    def __init__(
        self,
        endpoint: Endpoint,
        node: str,
        *,
        nnodes: tuple[int, int] = (1, 1),
        workers: int = 1,
        incarnation: str = "a",
        credentials: Credentials | None = None,
    ) -> None:
        self.identity = Identity(job=JOB, node=NodeId(node), incarnation=Incarnation(f"{node}-{incarnation}"))
        self.nnodes = nnodes
        self.workers = workers
        self.phase = AgentPhase.IDLE
        self.generation = NO_GENERATION
        self.start: StartWorkers | None = None
        self.starts: list[StartWorkers] = []
        self.ended: EndNode | None = None
        self.states: list[LinkState] = []
        self.prepares: list[Generation] = []
        self.link = MasterLink(
            endpoint,
            credentials=credentials or Credentials.insecure(),
            identity=self.identity,
            callbacks=LinkCallbacks(
                hello=self._hello,
                heartbeat=self._beat,
                on_command=self._obey,
                on_state=self.states.append,
            ),
            clock=SystemClock(),
        )
        self.task = asyncio.create_task(self.link.run())

    @property
    def connected(self) -> bool:
        return self.link.connected_since is not None

    @property
    def running(self) -> bool:
        return self.phase is AgentPhase.RUNNING

    def tell(self, kind: type[NodeEvent], **fields: object) -> None:
        """Report a fact of this agent."""
        fact = kind(node=self.identity.node, incarnation=self.identity.incarnation, **fields)  # type: ignore[arg-type]
        self.link.report(fact)

    def worker_ends(
        self, local_rank: int = 0, *, exit_code: int | None = 0, step: int = 0, error: str = ""
    ) -> None:
        """A worker of the present generation ends; None means by SIGKILL."""
        assert self.start is not None
        self.tell(
            WorkerExited,
            generation=self.start.generation,
            local_rank=local_rank,
            rank=self.start.first_rank + local_rank,
            exit_code=exit_code,
            signal=9 if exit_code is None else None,
            step=step,
            error=error,
        )

    def first_step(self, step: int) -> None:
        assert self.start is not None
        self.tell(FirstStepDone, generation=self.start.generation, step=step)

    async def vanish(self) -> None:
        """The link ends without a goodbye."""
        await self.link.close()
        await asyncio.wait_for(asyncio.gather(self.task, return_exceptions=True), PATIENCE_S)

    def _hello(self) -> Hello:
        return Hello(
            software="fake agent",
            address="127.0.0.1",
            workers=self.workers,
            phase=self.phase,
            generation=self.generation,
            min_nodes=self.nnodes[0],
            max_nodes=self.nnodes[1],
            processes=self._processes(),
        )

    def _beat(self) -> Heartbeat:
        progress: tuple[RankProgress, ...] = ()
        if self.start is not None:
            progress = tuple(
                RankProgress(
                    local_rank=local,
                    rank=self.start.first_rank + local,
                    phase=WorkerPhase.TRAINING,
                    steps=7,
                    saved_step=None,
                    age_s=0.0,
                )
                for local in range(self.workers)
            )
        return Heartbeat(phase=self.phase, progress=progress, processes=self._processes())

    def _processes(self) -> tuple[ProcessInfo, ...]:
        return (ProcessInfo(role=Role.AGENT, pid=os.getpid()),)

    def _obey(self, command: Command) -> None:
        if isinstance(command, Prepare):
            self.prepares.append(command.generation)
            self.generation, self.phase, self.start = command.generation, AgentPhase.PREPARED, None
            self.tell(NodePrepared, generation=command.generation, rendezvous_port=4000)
        elif isinstance(command, StartWorkers):
            self.start, self.phase = command, AgentPhase.RUNNING
            self.starts.append(command)
            self.tell(WorkersStarted, generation=command.generation)
        elif isinstance(command, EndNode):
            self.ended, self.phase = command, AgentPhase.ENDED
            self.tell(NodeLeft, exit_code=command.exit_code)
            self._leaving = asyncio.create_task(self._leave())

    async def _leave(self) -> None:
        await self.link.flush(PATIENCE_S)
        await self.link.close()


async def until(condition: Callable[[], object]) -> None:
    """Poll, since a remote peer gives no signal; fails after `PATIENCE_S`."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)
