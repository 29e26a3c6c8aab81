"""The shell around the core, simulated: journal first, commands second, and it may die between the two."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from aimaster.core.commands import (
    CancelTimer,
    CheckNode,
    Command,
    Decision,
    EndNode,
    FinishJob,
    Prepare,
    Reason,
    SetTimer,
    StartWorkers,
)
from aimaster.core.detector import Detector, DetectorConfig
from aimaster.core.events import (
    Event,
    HangKind,
    JobDeclared,
    NodeDied,
    NodeEvent,
    NodeJoined,
    NodeLeft,
    TimerFired,
    TimerKind,
    WorkersHung,
)
from aimaster.core.machine import Machine
from aimaster.core.policy import Policy
from aimaster.core.state import JobPhase
from aimaster.ids import Generation, Incarnation, NodeId
from aimaster.journal.base import Record
from aimaster.journal.memory import MemoryJournal
from aimaster.journal.replay import recover
from aimaster.simulation.clock import Due, Timeline
from aimaster.simulation.nodes import SimNode


class Witness(Protocol):
    """Who looks at every step."""

    def before(self, event: Event, machine: Machine) -> None:
        """An event is about to be given to the machine."""

    def after(self, event: Event, decision: Decision, *, machine: Machine, at_s: float) -> None:
        """The machine has answered."""


class SimMaster:
    """A master that can be killed, stalled and started again."""

    def __init__(
        self,
        timeline: Timeline,
        declared: JobDeclared,
        *,
        policy: Policy,
        config: DetectorConfig,
        witness: Witness,
    ) -> None:
        self.up = False
        self.journal = MemoryJournal()
        self.machine = Machine(policy)
        self.lives = 0
        self.finished = False
        self.crash_before_effects_of: set[int] = set()
        """Numbers of journal entries after which it dies with the commands still in its hand."""
        self._timeline = timeline
        self._declared = declared
        self._policy = policy
        self._config = config
        self._witness = witness
        self._detector = Detector(config)
        self._ahead_s = 0.0
        """How far the job's clock is ahead of the timeline."""
        self._connections: dict[NodeId, SimNode] = {}
        self._sessions: dict[NodeId, SimNode] = {}
        """Connections whose node has been heard to join."""
        self._taken: dict[Incarnation, int] = {}
        self._timers: dict[TimerKind, Due] = {}
        self._busy_until_s = 0.0

    @property
    def heartbeat_interval_s(self) -> float:
        """How often agents beat."""
        return self._config.heartbeat_interval_s

    def boot(self) -> None:
        """Begin a life: replay, watch everyone who should be there, arm what was armed."""
        self.lives += 1
        self.up, self._busy_until_s = True, 0.0
        self.journal = self.journal.reopen()
        recovered = recover(
            self.journal,
            incarnation=Incarnation(f"master-{self.lives}"),
            policy=self._policy,
            wall_s=self._timeline.wall(),
        )
        self.machine = recovered.machine
        self._ahead_s = recovered.at_s - self._timeline.now_s
        self._detector = Detector(self._config)
        self._sessions, self._taken, self._timers = {}, {}, {}
        now = self._now()
        for node in self.machine.view(now).nodes:
            if not node.gone:
                self._detector.watch(node.node, node.incarnation, now)
        if recovered.replayed == 0:
            self._step(self._declared)
        self._carry_out(self.machine.outstanding(now))
        self._plan_scan(self.lives)

    def _now(self) -> float:
        """The job's clock."""
        return self._timeline.now_s + self._ahead_s

    def crash(self) -> None:
        """SIGKILL. Agents notice that the connection is gone."""
        if not self.up:
            return
        self.up = False
        for due in self._timers.values():
            due.cancel()
        self._sessions = {}
        connections, self._connections = self._connections, {}
        for node in connections.values():
            node.link.cut()
            self._timeline.after(0.01, node.lose_connection)

    def stall(self, seconds: float) -> None:
        """Do nothing for a while, as on an overloaded machine; everything waits in its order."""
        self._busy_until_s = max(self._busy_until_s, self._timeline.now_s + seconds)

    def cut(self, node: SimNode) -> None:
        """The connection to a node breaks, and both notice."""
        node.link.cut()
        self._detector.connection_lost(node.id, node.incarnation)
        self._timeline.after(0.01, node.lose_connection)

    def hear(self, node: SimNode, event: NodeEvent, *, seq: int) -> None:
        """A node sends a fact, or that it joins (number 0)."""
        life = node.incarnation
        self._connections[node.id] = node
        node.link.send("up", lambda: self._when_free(lambda: self._receive(node, life, event, seq)))

    def hear_beat(self, node: SimNode, life: Incarnation) -> None:
        """A node sends a heartbeat."""
        node.link.send("up", partial(self._when_free, partial(self._beat, node, life)))

    def find_hang(self, node: SimNode, generation: Generation) -> None:
        """What the hang detection would say, if that generation runs and the master is there to look."""
        job = self.machine.state.job
        if self.up and job.phase is JobPhase.RUNNING:
            self._step(
                WorkersHung(
                    generation=generation,
                    kind=HangKind.DEADLOCK,
                    node=node.id,
                    culprits=(),
                    stalled_s=4.0,
                    limit_s=3.0,
                    step=None,
                )
            )

    def _when_free(self, action: Callable[[], None]) -> None:
        if self._timeline.now_s < self._busy_until_s:
            self._timeline.at(self._busy_until_s, partial(self._if_lives, self.lives, action))
        elif self.up:
            action()

    def _if_lives(self, master_life: int, action: Callable[[], None]) -> None:
        if self.up and self.lives == master_life:
            action()

    def _receive(self, node: SimNode, life: Incarnation, event: NodeEvent, seq: int) -> None:
        if isinstance(event, NodeJoined):
            self._sessions[node.id] = node
        if seq == 0 or seq > self._taken.get(life, 0):
            decision = self._step(event)
            if decision is None:
                return
            self._follow(event, decision)
            self._taken[life] = max(seq, self._taken.get(life, 0))
        if seq:
            node.link.send("down", lambda: node.acknowledged(life, seq))

    def _follow(self, event: NodeEvent, decision: Decision) -> None:
        """Let the detector know who is there and who is not."""
        if decision.reason is Reason.STALE:
            return
        if isinstance(event, NodeJoined):
            self._detector.watch(event.node, event.incarnation, self._now())
        elif isinstance(event, NodeLeft):
            self._detector.forget(event.node)

    def _beat(self, node: SimNode, life: Incarnation) -> None:
        if not self._detector.watches(node.id, life):
            self.cut(node)  # it was given up and does not know it
            return
        recovered = self._detector.heartbeat(node.id, life, self._now())
        if recovered is not None:
            self._step(recovered)

    def _plan_scan(self, master_life: int) -> None:
        planned_s = self._timeline.now_s + self._config.heartbeat_interval_s

        def scan() -> None:
            if not self.up or self.lives != master_life:
                return
            if self._timeline.now_s < self._busy_until_s:
                self._timeline.at(self._busy_until_s, scan)
                return
            late_s = self._timeline.now_s - planned_s
            for event in self._detector.scan(self._now(), late_s=late_s):
                if isinstance(event, NodeDied):
                    self._sessions.pop(event.node, None)
                self._step(event)
            self._plan_scan(master_life)

        self._timeline.at(planned_s, scan)

    def _step(self, event: Event) -> Decision | None:
        """Step, journal, carry out; None if it died before it could carry out."""
        if not self.up:
            return None
        at_s = self._now()
        self._witness.before(event, self.machine)
        decision = self.machine.step(event, at_s)
        record = Record(
            event=event,
            decision=decision,
            digest=self.machine.digest(),
            at_s=at_s,
            wall_s=self._timeline.wall(),
        )
        seq = self.journal.append([record])
        self._witness.after(event, decision, machine=self.machine, at_s=at_s)
        if seq in self.crash_before_effects_of:
            self.crash()
            self._timeline.after(2.0, self._boot_if_down)
            return None
        self._carry_out(decision.commands)
        return decision

    def _boot_if_down(self) -> None:
        if not self.up:
            self.boot()

    def _carry_out(self, commands: tuple[Command, ...]) -> None:
        for command in commands:
            if isinstance(command, Prepare | StartWorkers | CheckNode | EndNode):
                node = self._sessions.get(command.node)
                if node is not None:
                    node.link.send("down", lambda n=node, c=command: n.obey(c))  # type: ignore[misc]
            elif isinstance(command, SetTimer):
                self._arm(command.timer, command.generation, command.after_s)
            elif isinstance(command, CancelTimer):
                self._disarm(command.timer)
            elif isinstance(command, FinishJob):
                self.finished = True

    def _disarm(self, timer: TimerKind) -> None:
        due = self._timers.pop(timer, None)
        if due is not None:
            due.cancel()

    def _arm(self, timer: TimerKind, generation: Generation, after_s: float) -> None:
        self._disarm(timer)
        event = TimerFired(timer=timer, generation=generation)
        self._timers[timer] = self._timeline.after(
            after_s, lambda: self._when_free(lambda: self._fire(event))
        )

    def _fire(self, event: TimerFired) -> None:
        self._timers.pop(event.timer, None)
        self._step(event)
