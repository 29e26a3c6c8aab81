"""A simulated agent: says what a real one says, does what it is told once, and can be hurt in many ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from aimaster.core.commands import Command, EndNode, Prepare, StartWorkers
from aimaster.core.events import (
    AgentPhase,
    NodeEvent,
    NodeFailed,
    NodeJoined,
    NodeLeft,
    NodePrepared,
    WorkerExited,
    WorkersStarted,
)
from aimaster.ids import NO_GENERATION, Generation, Incarnation, NodeId
from aimaster.simulation.clock import Timeline
from aimaster.simulation.network import Link
from aimaster.simulation.training import Training

if TYPE_CHECKING:
    from aimaster.simulation.master import SimMaster

RECONNECT_S = (0.2, 1.5)
"""How long an agent waits before it tries to reach the master again."""


@dataclass(slots=True)
class Temper:
    """How a node behaves; faults change it."""

    prepare_s: float = 0.2
    start_s: float = 0.05
    fails_to_prepare: int = 0
    """So many times it says that it could not."""


class SimNode:
    """One machine with its agent."""

    def __init__(
        self, name: str, *, workers: int, timeline: Timeline, random: Random, link: Link, training: Training
    ) -> None:
        self.id = NodeId(name)
        self.workers = workers
        self.link = link
        self.temper = Temper()
        self.incarnation = Incarnation(f"{name}-0")
        self.alive = False
        self.frozen = False
        self.phase = AgentPhase.IDLE
        self.generation = NO_GENERATION
        self.command: StartWorkers | None = None
        self.exit_code: int | None = None
        self.connected = False
        self.pending: list[tuple[int, NodeEvent]] = []
        self._master: SimMaster | None = None
        self._timeline = timeline
        self._random = random
        self._training = training
        self._lives = 0
        self._seq = 0
        self._held: list[Callable[[], None]] = []

    def boot(self, master: SimMaster) -> None:
        """Start a new life of the agent: nothing of the last one is left."""
        self._lives += 1
        self.incarnation = Incarnation(f"{self.id}-{self._lives}")
        self._master = master
        self.alive, self.frozen, self.connected = True, False, False
        self.phase, self.generation, self.command = AgentPhase.IDLE, NO_GENERATION, None
        self.exit_code = None
        self.pending, self._held, self._seq = [], [], 0
        self.link.cut()
        self._connect(self.incarnation)
        self._beat(self.incarnation)

    def die(self) -> None:
        """Power off: workers, agent and whatever it had to say are gone."""
        was, self.alive = self.alive, False
        self.connected = False
        self.link.cut()
        if was and self.command is not None:
            self._training.worker_died(self, self.command.generation)

    def freeze(self) -> None:
        """Stop doing anything, without a sign."""
        self.frozen = self.alive

    def thaw(self) -> None:
        """Go on, with everything that came meanwhile."""
        self.frozen = False
        held, self._held = self._held, []
        for action in held:
            self._timeline.after(0.0, lambda a=action: self._live(a))  # type: ignore[misc]

    def runs(self, generation: Generation) -> bool:
        """Whether its workers of that generation run."""
        return (
            self.alive
            and self.phase is AgentPhase.RUNNING
            and self.command is not None
            and self.command.generation == generation
        )

    def lose_connection(self) -> None:
        """The session is over; try again until the agent ends."""
        if self.alive and self.connected:
            self.connected = False
            self._reconnect()

    def _reconnect(self) -> None:
        life = self.incarnation
        self._timeline.after(self._random.uniform(*RECONNECT_S), lambda: self._connect(life))

    def _live(self, action: Callable[[], None]) -> None:
        """Do it, or keep it while frozen, or drop it when dead."""
        if self.alive and self.frozen:
            self._held.append(action)
        elif self.alive:
            action()

    def _connect(self, life: Incarnation) -> None:
        if not self.alive or self.incarnation != life or self.connected or self._master is None:
            return
        if self.frozen:
            self._held.append(lambda: self._connect(life))
        elif self.link.broken or not self._master.up:
            self._reconnect()
        else:
            self.connected = True
            self.link.cut()
            joined = NodeJoined(
                node=self.id,
                incarnation=self.incarnation,
                address=f"{self.id}.sim",
                workers=self.workers,
                saver_address=f"{self.id}.sim:7000",
                phase=self.phase,
                generation=self.generation,
            )
            self._master.hear(self, joined, seq=0)
            for seq, event in self.pending:
                self._master.hear(self, event, seq=seq)

    def _beat(self, life: Incarnation) -> None:
        if not self.alive or self.incarnation != life or self._master is None:
            return
        if self.connected and not self.frozen:
            self._master.hear_beat(self, life)
        self._timeline.after(self._master.heartbeat_interval_s, partial(self._beat, life))

    def report(self, kind: type[NodeEvent], **fields: Any) -> None:
        """Say a fact; it is kept until the master has it."""
        self._live(lambda: self._say(kind, fields))

    def _say(self, kind: type[NodeEvent], fields: dict[str, Any]) -> None:
        event = kind(node=self.id, incarnation=self.incarnation, **fields)
        self._seq += 1
        self.pending.append((self._seq, event))
        if self.connected and self._master is not None:
            self._master.hear(self, event, seq=self._seq)

    def acknowledged(self, life: Incarnation, seq: int) -> None:
        """The master has everything up to there."""
        if self.incarnation == life:
            self.pending = [(number, event) for number, event in self.pending if number > seq]

    def worker_exits(
        self,
        *,
        local_rank: int,
        step: int | None,
        exit_code: int | None = None,
        signal: int | None = None,
        digest: str = "",
    ) -> None:
        """One worker ends badly; the agent sees it at once."""
        command = self.command
        if command is None or not self.alive:
            return
        self.report(
            WorkerExited,
            generation=command.generation,
            local_rank=local_rank,
            rank=command.first_rank + local_rank,
            exit_code=exit_code,
            signal=signal,
            step=step,
            error_digest=digest,
        )

    def kill_worker(self, local_rank: int) -> None:
        """SIGKILL to one of its workers."""
        if self.command is not None and self.runs(self.command.generation):
            self.worker_exits(local_rank=local_rank, signal=9, step=None)
            self._training.worker_died(self, self.command.generation)

    def obey(self, command: Command) -> None:
        """Do what the master says, once."""
        self._live(lambda: self._obey(command))

    def _obey(self, command: Command) -> None:
        life = self.incarnation
        if isinstance(command, Prepare) and command.generation > self.generation:
            old, self.command = self.command, None
            self.generation, self.phase = command.generation, AgentPhase.IDLE
            if old is not None:
                self._training.worker_died(self, old.generation)
            self._later(self.temper.prepare_s, life, lambda: self._prepared(command.generation))
        elif isinstance(command, StartWorkers) and command.generation == self.generation:
            if self.phase is AgentPhase.PREPARED:
                self.phase, self.command = AgentPhase.RUNNING, command
                self._later(self.temper.start_s, life, lambda: self._started(command))
        elif isinstance(command, EndNode) and self.exit_code is None:
            self.exit_code = command.exit_code
            self.phase, self.command = AgentPhase.ENDED, None
            self._say(NodeLeft, {"exit_code": command.exit_code})
            self._later(0.5, life, self._leave)

    def _leave(self) -> None:
        """The agent ends when the master has its goodbye, or after a while."""
        self.alive = False
        self.connected = False

    def _later(self, delay_s: float, life: Incarnation, action: Callable[[], None]) -> None:
        def due() -> None:
            if self.incarnation == life:
                self._live(action)

        self._timeline.after(delay_s, due)

    def _prepared(self, generation: Generation) -> None:
        if self.generation != generation or self.phase is AgentPhase.ENDED:
            return
        if self.temper.fails_to_prepare > 0:
            self.temper.fails_to_prepare -= 1
            self._say(NodeFailed, {"generation": generation, "what": "a worker does not end"})
            return
        self.phase = AgentPhase.PREPARED
        self._say(NodePrepared, {"generation": generation, "rendezvous_port": 20_000 + generation})

    def _started(self, command: StartWorkers) -> None:
        if self.command is command:
            self._say(WorkersStarted, {"generation": command.generation})
            self._training.join(self, command)
