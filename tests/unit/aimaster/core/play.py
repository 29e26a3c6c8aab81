"""Plays a job against the machine in short words; every step is checked from inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from aimaster.core.commands import Command, Decision, EndNode, Prepare, StartWorkers
from aimaster.core.events import (
    Event,
    FirstStepDone,
    JobDeclared,
    NodeDied,
    NodeFailed,
    NodeJoined,
    NodeLeft,
    NodePrepared,
    RestartScope,
    Restored,
    StepCommitted,
    StopKind,
    StopRequested,
    Tier,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkersStarted,
)
from aimaster.core.invariants import violations
from aimaster.core.machine import Machine
from aimaster.core.policy import Policy
from aimaster.core.state import JobView
from aimaster.ids import Generation, Incarnation, JobId, NodeId

C = TypeVar("C", bound=Command)


class Play:
    """One job; time goes on by a tenth of a second with each event."""

    def __init__(
        self,
        nodes: tuple[int, int] = (2, 2),
        *,
        max_restarts: int | None = None,
        policy: Policy | None = None,
        scope: RestartScope = RestartScope.JOB,
    ) -> None:
        self.machine = Machine(policy)
        self.now = 0.0
        self.lives: dict[str, str] = {}
        self.seen: list[tuple[Event, Decision, float]] = []
        low, high = nodes
        self.tell(
            JobDeclared(job=JobId("j"), min_nodes=low, max_nodes=high, max_restarts=max_restarts, scope=scope)
        )

    def tell(self, event: Event) -> Decision:
        """One step."""
        self.now += 0.1
        decision = self.machine.step(event, self.now)
        self.seen.append((event, decision, self.now))
        assert violations(self.machine.state, self.machine.policy) == ()
        return decision

    def view(self) -> JobView:
        return self.machine.view(self.now)

    def about(self, node: str) -> dict[str, Any]:
        """The fields that say who speaks."""
        return {"node": NodeId(node), "incarnation": Incarnation(self.lives[node])}

    def current(self, node: str) -> dict[str, Any]:
        return {**self.about(node), "generation": self.view().generation}

    def join(self, node: str, *, life: str = "1", workers: int = 1, **more: Any) -> Decision:
        self.lives[node] = life
        address = {"address": f"{node}.net", "saver_address": f"{node}.net:7"}
        return self.tell(NodeJoined(**self.about(node), workers=workers, **{**address, **more}))

    def prepared(self, *nodes: str) -> Decision:
        for node in nodes:
            last = self.tell(NodePrepared(**self.current(node), rendezvous_port=1000 + ord(node[-1])))
        return last

    def started(self, *nodes: str) -> Decision:
        for node in nodes:
            last = self.tell(WorkersStarted(**self.current(node)))
        return last

    def run(self, *nodes: str, workers: int = 1) -> Decision:
        """From nothing to running workers on these nodes."""
        for node in nodes:
            self.join(node, workers=workers)
        return self.restart()

    def restart(self) -> Decision:
        """All members do what they are told."""
        members = self.view().members
        self.prepared(*members)
        return self.started(*members)

    def exited(self, node: str, *, local_rank: int = 0, code: int | None = None, **more: Any) -> Decision:
        seen = self.view().node(NodeId(node))
        assert seen is not None
        signal = 9 if code is None else None
        fields = {
            **self.current(node),
            "local_rank": local_rank,
            "rank": seen.first_rank + local_rank,
            "exit_code": code,
            "signal": signal,
            "step": None,
            **more,
        }
        return self.tell(WorkerExited(**fields))

    def died(self, node: str) -> Decision:
        return self.tell(NodeDied(**self.about(node), silent_s=6.0))

    def left(self, node: str) -> Decision:
        return self.tell(NodeLeft(**self.about(node), exit_code=0))

    def failed(self, node: str, what: str = "a worker does not end") -> Decision:
        return self.tell(NodeFailed(**self.current(node), what=what))

    def committed(self, node: str, step: int, *, durable: bool = False) -> Decision:
        return self.tell(StepCommitted(**self.current(node), step=step, durable=durable))

    def restored(self, node: str, step: int, tier: Tier) -> Decision:
        seen = self.view().node(NodeId(node))
        assert seen is not None
        return self.tell(Restored(**self.current(node), rank=seen.first_rank, step=step, tier=tier))

    def stepped(self, node: str, step: int) -> Decision:
        return self.tell(FirstStepDone(**self.current(node), step=step))

    def stop(self, node: str, kind: StopKind) -> Decision:
        return self.tell(StopRequested(**self.about(node), kind=kind, signal=15))

    def timer(self, kind: TimerKind) -> Decision:
        """The timer runs out, at the time that it was set for."""
        generation, deadline_s = next(
            (timer.generation, timer.deadline_s) for name, timer in self.view().timers if name is kind
        )
        self.now = max(self.now, deadline_s)
        return self.tell(TimerFired(timer=kind, generation=generation))


def of(decision: Decision, kind: type[C]) -> list[C]:
    """The commands of that kind."""
    return [command for command in decision.commands if isinstance(command, kind)]


def told_to_prepare(decision: Decision) -> list[str]:
    return sorted(command.node for command in of(decision, Prepare))


def told_to_start(decision: Decision) -> dict[str, StartWorkers]:
    return {command.node: command for command in of(decision, StartWorkers)}


def told_to_end(decision: Decision) -> dict[str, int]:
    return {command.node: command.exit_code for command in of(decision, EndNode)}


def generation(number: int) -> Generation:
    return Generation(number)


def names(items: Iterable[Any]) -> list[str]:
    return [str(item) for item in items]
