"""Simulated agents on real connections: the client processes of `benchmarks.master_scale`.

    python -m benchmarks.scale_agents ENDPOINT AGENTS PERIOD WORKERS CLIENT

Reads words from stdin, a line each, and answers with JSON lines: ``wait`` (until all agents train),
``measure``, ``report``, ``fail N``, ``reconnect N``.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from aimaster.core.commands import Prepare, StartWorkers
from aimaster.core.events import (
    AgentPhase,
    FirstStepDone,
    NodeEvent,
    NodePrepared,
    WorkerExited,
    WorkersStarted,
)
from aimaster.core.sights import Activity, Sight, WorkerPhase
from aimaster.ids import NO_GENERATION, Incarnation, JobId, NodeId
from aimaster.rpc.convert import AgentBody, decode_from_master, encode_from_agent
from aimaster.rpc.limits import clip
from aimaster.rpc.messages import Ack, Header, Heartbeat, Hello, RankProgress, Welcome
from aimaster.rpc.security import Credentials
from aimaster.rpc.transport import END_OF_STREAM, Endpoint, open_channel, open_session

JOB = JobId("scale")
CLIENTS = 4
ERROR_TEXT = "RuntimeError: something went wrong in the middle of a step\n" * 18_000  # 1 MB
RETRY_S = 0.2


@dataclass(frozen=True)
class Crowd:
    """What all agents have in common."""

    endpoint: Endpoint
    agents: int
    period_s: float
    workers: int


@dataclass
class Tally:
    """What the agents of one client process saw."""

    answers_s: list[float] = field(default_factory=list)
    errors: int = 0
    trouble: str = ""
    measuring: bool = False


class Agent:
    """One simulated agent on a connection of its own."""

    def __init__(self, number: int, crowd: Crowd, tally: Tally) -> None:
        self.node = NodeId(f"n{number}")
        self._crowd = crowd
        self._tally = tally
        self._incarnation = Incarnation(f"n{number}-1")
        self._generation = NO_GENERATION
        self._command: StartWorkers | None = None
        self._phase = AgentPhase.IDLE
        self._seq = 0
        self._facts: list[NodeEvent] = []
        self._acknowledged = 0
        self._sent: list[float] = []
        """When the beats were sent that have no answer yet."""
        self._call: Any = None
        self._steps = 0
        self._random = random.Random(number)
        self._writing = asyncio.Lock()
        self.trains = asyncio.Event()

    async def live(self, endpoint: Endpoint) -> None:
        """Connect, and again whenever the connection is gone."""
        while True:
            try:
                async with open_channel(endpoint, Credentials.insecure()) as channel:
                    self._call = open_session(channel)
                    await self._session()
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, EOFError) as error:
                self._tally.errors += 1
                self._tally.trouble = f"{type(error).__name__}: {error}"[:300]
            await asyncio.sleep(RETRY_S)

    async def _session(self) -> None:
        self._sent.clear()
        crowd = self._crowd
        hello = Hello(
            software="benchmark",
            address="127.0.0.1",
            workers=crowd.workers,
            phase=self._phase,
            generation=self._generation,
            min_nodes=crowd.agents,
            max_nodes=crowd.agents,
        )
        await self._write(hello)
        _, welcome = await self._read()
        if not isinstance(welcome, Welcome):
            raise EOFError(f"{welcome}")
        for fact in self._facts:
            await self._write(fact)
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                header, body = await self._read()
                self._acknowledged = header.ack
                self._facts = [fact for fact in self._facts if fact.seq > header.ack]
                if isinstance(body, Ack):
                    self._answered()
                elif isinstance(body, Prepare):
                    await self._prepare(body)
                elif isinstance(body, StartWorkers):
                    await self._start(body)
        finally:
            beating.cancel()

    def _answered(self) -> None:
        now = time.monotonic()
        if self._tally.measuring:
            self._tally.answers_s += [now - sent for sent in self._sent]
        self._sent.clear()

    async def _prepare(self, command: Prepare) -> None:
        if command.generation <= self._generation:
            return
        self._generation, self._command = command.generation, None
        self.trains.clear()
        self._phase = AgentPhase.PREPARED
        await self._tell(NodePrepared, rendezvous_port=20_000)

    async def _start(self, command: StartWorkers) -> None:
        if command.generation != self._generation or self._command is not None:
            return
        self._command, self._phase, self._steps = command, AgentPhase.RUNNING, 0
        self.trains.set()
        await self._tell(WorkersStarted)
        await self._tell(FirstStepDone, step=1)

    async def _beat(self) -> None:
        period_s = self._crowd.period_s
        await asyncio.sleep(self._random.uniform(0, period_s))
        while True:
            begin = time.monotonic()
            self._steps += 10
            self._sent.append(begin)
            await self._write(
                Heartbeat(
                    phase=self._phase,
                    progress=tuple(self._progress(rank) for rank in range(self._crowd.workers)),
                    generation=self._generation,
                    clock_s=begin,
                )
            )
            await asyncio.sleep(max(0.0, begin + period_s - time.monotonic()))

    def _progress(self, local_rank: int) -> RankProgress:
        first = self._command.first_rank if self._command is not None else 0
        return RankProgress(
            local_rank=local_rank,
            rank=first + local_rank,
            phase=WorkerPhase.TRAINING,
            steps=self._steps,
            saved_step=None,
            age_s=0.1,
            sight=Sight(still_s=0.1, activity=Activity.ACTIVE),
        )

    async def _tell(self, kind: type[NodeEvent], **fields: Any) -> None:
        self._seq += 1
        fact = kind(
            node=self.node,
            incarnation=self._incarnation,
            seq=self._seq,
            generation=self._generation,
            **fields,
        )
        self._facts.append(fact)
        await self._write(fact)

    async def fail(self) -> None:
        """A worker of this node has failed."""
        if self._command is None:
            return
        self.trains.clear()
        await self._tell(
            WorkerExited,
            local_rank=0,
            rank=self._command.first_rank,
            exit_code=1,
            signal=None,
            step=self._steps,
            error=clip(ERROR_TEXT),
        )

    def cut(self) -> None:
        """The connection is gone."""
        self._call.cancel()

    async def _write(self, body: AgentBody) -> None:
        header = Header(
            job=JOB,
            node=self.node,
            incarnation=self._incarnation,
            generation=self._generation,
            seq=body.seq if isinstance(body, NodeEvent) else 0,
        )
        async with self._writing:  # gRPC takes one message at a time
            await self._call.write(encode_from_agent(header, body))

    async def _read(self) -> tuple[Header, Any]:
        data = await self._call.read()
        if data is END_OF_STREAM:
            raise EOFError("the master ended the session")
        return decode_from_master(data)


async def serve(crowd: Crowd, client: int) -> None:
    """The agents of one client process."""
    tally = Tally()
    agents = [Agent(number, crowd, tally) for number in range(client, crowd.agents, CLIENTS)]
    tasks = []
    for agent in agents:
        tasks.append(asyncio.create_task(agent.live(crowd.endpoint)))
        await asyncio.sleep(0.001)
    loop = asyncio.get_running_loop()
    try:
        while True:
            word = (await loop.run_in_executor(None, sys.stdin.readline)).split()
            if not word:
                return
            await _obey(word, agents, tally)
    finally:
        for task in tasks:
            task.cancel()


async def _obey(word: list[str], agents: list[Agent], tally: Tally) -> None:
    if word[0] == "wait":
        await asyncio.gather(*(agent.trains.wait() for agent in agents))
        _say({"ready": len(agents)})
    elif word[0] == "measure":
        tally.measuring, tally.errors, tally.trouble = True, 0, ""
    elif word[0] == "report":
        _say({"answers_s": tally.answers_s, "errors": tally.errors, "trouble": tally.trouble})
    elif word[0] == "fail":
        chosen = agents[: int(word[1]) // CLIENTS]
        await asyncio.gather(*(agent.fail() for agent in chosen))
    elif word[0] == "reconnect":
        for agent in agents[: int(word[1]) // CLIENTS]:
            agent.cut()


def _say(line: dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


def raise_open_files() -> None:
    """Every connection is a descriptor."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> int:
    endpoint, agents, period, workers, client = sys.argv[1:]
    raise_open_files()
    crowd = Crowd(
        endpoint=Endpoint.parse(endpoint), agents=int(agents), period_s=float(period), workers=int(workers)
    )
    asyncio.run(serve(crowd, int(client)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
