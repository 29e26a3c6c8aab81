"""What workers do, seen from far: they start together, restore, step together, commit, fail, finish.

Ranks of one generation can only step while all of them are there, as in a synchronous training. Where one is
gone, the others fail with a broken connection soon after; where one is frozen, they hang.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from aimaster.core.commands import StartWorkers
from aimaster.core.events import FirstStepDone, Restored, StepCommitted, Tier, WorkerExited
from aimaster.ids import Generation, NodeId
from aimaster.simulation.clock import Timeline

if TYPE_CHECKING:
    from aimaster.simulation.nodes import SimNode


DURABLE_EVERY = 5
"""Of so many checkpoints in memory one reaches the storage."""

SPOILT_STEPS = 2
"""A state that went bad breaks the training so many steps later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What the script does."""

    steps: int = 60
    step_s: float = 0.5
    first_step_s: float | None = None
    """From the start of the workers to their first step: rendezvous, load, compile. None: as any step."""
    commit_every: int = 5
    """0: it writes no checkpoints."""
    alone: bool = False
    """Each node trains for itself: no step waits for another node (`RestartScope.NODE`)."""
    bug_at_step: int | None = None
    """At this step rank 0 always raises the same exception."""
    spoilt_at_step: int | None = None
    """Here the state goes bad, once: each checkpoint from then on is bad, and breaks who resumes from it."""


@dataclass(slots=True)
class _Group:
    needed: int
    seat: int = 0
    step: int = 0
    first_step: int = 0
    spoilt_at: int | None = None
    """From which step on its state is bad."""
    over: bool = False
    members: dict[NodeId, tuple[SimNode, StartWorkers, str]] = field(default_factory=dict)


_Key = tuple[Generation, "NodeId | None"]
"""A generation, and the node where each trains for itself."""


class Training:
    """All workers of the job."""

    def __init__(self, timeline: Timeline, random: Random, options: TrainingOptions) -> None:
        self._timeline = timeline
        self._random = random
        self._options = options
        self._groups: dict[_Key, _Group] = {}
        self._committed: dict[int, dict[int, bool]] = {}
        """Committed step → whether it is bad, by seat; the whole job's are at seat 0."""
        self._spoilt = False
        """Whether a state has gone bad already."""
        self._done: set[int] = set()
        """Seats that have finished."""
        self.stepping: list[tuple[float, Generation]] = []
        """Which generation made a step when, for checkers."""
        self.finished = False
        self.reached = 0
        """The newest step that was ever made."""

    def join(self, node: SimNode, command: StartWorkers) -> None:
        """A node's workers run; the last of a generation lets all begin."""
        key = self._key(node, command.generation)
        alone = self._options.alone
        group = self._groups.setdefault(key, _Group(needed=1 if alone else command.nodes))
        group.seat = command.node_rank if alone else 0
        group.members[node.id] = (node, command, node.incarnation)
        if len(group.members) == group.needed:
            committed = self._resume(group, command.restore_below)
            self._done.discard(group.seat)
            group.step = group.first_step = committed or 0
            if committed is not None:
                for member, started, _ in group.members.values():
                    tier = self._random.choice(tuple(Tier))
                    member.report(
                        Restored,
                        generation=command.generation,
                        rank=started.first_rank,
                        step=committed,
                        tier=tier,
                    )
            first_s = self._options.first_step_s
            delay_s = first_s if first_s is not None else self._options.step_s
            self._timeline.after(delay_s, lambda: self._tick(key))

    def _resume(self, group: _Group, below: int | None) -> int | None:
        """The step that is restored; what is newer is gone then."""
        steps = self._committed.setdefault(group.seat, {})
        older = [step for step in steps if below is None or step < below]
        found = max(older) if older else min(steps, default=None)
        if found is not None:
            group.spoilt_at = found if steps[found] else None
            self._committed[group.seat] = {step: bad for step, bad in steps.items() if step <= found}
        return found

    def worker_died(self, node: SimNode, generation: Generation) -> None:
        """Somebody of that generation is gone: the others fail soon, each in its own time."""
        group = self._groups.get(self._key(node, generation))
        if group is None or group.over:
            return
        group.over = True
        for member, command, incarnation in group.members.values():
            if member is not node:
                delay_s = self._random.uniform(0.001, 0.5)
                self._timeline.after(delay_s, lambda m=member, c=command, i=incarnation: _reset(m, c, i))  # type: ignore[misc]

    def _key(self, node: SimNode, generation: Generation) -> _Key:
        return (generation, node.id if self._options.alone else None)

    def _tick(self, key: _Key) -> None:
        generation, group = key[0], self._groups[key]
        if group.over:
            return
        here = [m.runs(generation) and m.incarnation == life for m, _, life in group.members.values()]
        if not all(here):
            group.over = True
            return
        if any(m.frozen for m, _, _ in group.members.values()):
            self._timeline.after(self._options.step_s, lambda: self._tick(key))
            return
        group.step += 1
        self.reached = max(self.reached, group.step)
        self.stepping.append((self._timeline.now_s, generation))
        self._step_done(generation, group)
        if not group.over:
            self._timeline.after(self._options.step_s, lambda: self._tick(key))

    def _step_done(self, generation: Generation, group: _Group) -> None:
        options = self._options
        lead, _, _ = min(group.members.values(), key=lambda m: m[1].node_rank)
        if group.step == options.spoilt_at_step and not self._spoilt:
            self._spoilt, group.spoilt_at = True, group.step
        broken = group.spoilt_at is not None and group.step == group.spoilt_at + SPOILT_STEPS
        if group.step == options.bug_at_step or broken:
            lead.worker_exits(local_rank=0, exit_code=1, step=group.step - 1, digest="bug")
            self.worker_died(lead, generation)
            return
        if group.step == group.first_step + 1:
            for member, _, _ in group.members.values():
                member.report(FirstStepDone, generation=generation, step=group.step)
        if options.commit_every and group.step % options.commit_every == 0:
            self._committed.setdefault(group.seat, {})[group.step] = group.spoilt_at is not None
            durable = group.step % (DURABLE_EVERY * options.commit_every) == 0
            lead.report(StepCommitted, generation=generation, step=group.step, durable=durable)
        if group.step >= options.steps:
            group.over = True
            self._done.add(group.seat)
            seats = next(iter(group.members.values()))[1].nodes if options.alone else 1
            self.finished = self._done >= set(range(seats))
            for member, command, _ in group.members.values():
                for local_rank in range(member.workers):
                    member.report(
                        WorkerExited,
                        generation=generation,
                        local_rank=local_rank,
                        rank=command.first_rank + local_rank,
                        exit_code=0,
                        signal=None,
                        step=group.step,
                    )


def _reset(node: SimNode, command: StartWorkers, incarnation: str) -> None:
    """A worker finds its partner gone."""
    if node.runs(command.generation) and node.incarnation == incarnation:
        node.worker_exits(local_rank=0, exit_code=1, step=None, digest="")
