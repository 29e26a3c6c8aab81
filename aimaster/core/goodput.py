"""Where the wall time of a job went: every second of it belongs to exactly one phase.

Fed with the journal's events and decisions, so that a replay gives the same times, and a job that ended long
ago can still be asked. What the machine decided says when a phase begins (its timers tell apart preparing,
starting, waiting and ending); what the events carry says how a stretch is shared out:

* the stretch before a fault was noticed (`WorkersHung.stalled_s`, `NodeDied.silent_s`) is detection;
* from workers that run to their first step, `FirstStepDone` says how long they loaded, and how long it took
  from there to the first step; what is before that is rendezvous. Where nothing was loaded all is warm-up;
* what saving held the training (`StepCommitted.stalled_s`, `WorkerExited.stalled_s`) is taken off it;
* steps that an earlier attempt had finished are done again until `CaughtUp`, or any newer event, names the
  step that was reached before. Without checkpoints of easyckpt nobody knows which steps those are.

Where a node's workers start again alone (`RestartScope.NODE`) the others go on, and so does the job's
training: such a restart is no phase of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from aimaster.core.commands import ENDED_GENERATION, CancelTimer, Decision, FinishJob, Reason, SetTimer
from aimaster.core.events import (
    CaughtUp,
    Event,
    FirstStepDone,
    NodeDied,
    Restored,
    StepCommitted,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkersHung,
)
from aimaster.ids import NO_GENERATION, Generation

__all__ = ["Goodput", "Phase", "Span", "Spent"]


class Phase(Enum):
    """What wall time can go to."""

    TRAINING = "training"  # steps that nobody had done before
    STALL = "checkpoint_stall"  # the training thread was held by a save
    DETECT = "detect"  # a fault was there and not noticed yet
    STOP = "stop"  # old workers end, and are proved gone
    REPLACE = "replace"  # too few nodes: waiting for another one
    RENDEZVOUS = "rendezvous"  # nodes and workers come together
    LOAD = "load"  # a checkpoint is loaded
    WARM_UP = "warm_up"  # from there to the first step
    RECOMPUTE = "recompute"  # steps that an earlier attempt had done
    UNKNOWN = "unattributed"  # workers ran and no step of theirs was ever seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of wall time, on the job's clock."""

    phase: Phase
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Where the time went, up to one moment."""

    wall_s: float
    """Since the job was declared."""
    phases: Mapping[Phase, float]
    """All of them; together they are `wall_s`."""

    @property
    def goodput(self) -> float | None:
        """Share of the wall time that went into new steps; None before any time has passed."""
        return self.phases[Phase.TRAINING] / self.wall_s if self.wall_s > 0 else None


_STEPPING = frozenset({Phase.TRAINING, Phase.RECOMPUTE})
_STARTING = frozenset({Phase.RENDEZVOUS, Phase.WARM_UP})


class Goodput:
    """The time of one job. Not thread-safe.

    Args:
        keep: told each stretch once it is settled, in their order; they never overlap.
    """

    def __init__(self, keep: Callable[[Span], None] | None = None) -> None:
        self._keep = keep
        self._spent = dict.fromkeys(Phase, 0.0)
        self._begun_s: float | None = None
        self._over_s: float | None = None
        self._open = Phase.RENDEZVOUS
        self._since_s = 0.0
        self._started = False
        """Whether workers were ever started."""
        self._generation: Generation = NO_GENERATION
        """Whose workers were started last."""
        self._checkpoints = False
        """Whether easyckpt is at work, so that steps have numbers that last."""
        self._best: int | None = None
        self._first = 0
        """The step that the newest attempt was first seen to finish."""
        self._stall_told_s = 0.0
        self._stall_due_s = 0.0
        """Of this attempt: what it was told, and what is not taken off a stretch yet."""
        self.goal: int | None = None
        """The step from which on everything is new, while older ones are done again; else None."""

    @property
    def generation(self) -> Generation:
        """Whose workers were started last."""
        return self._generation

    @property
    def is_over(self) -> bool:
        """Whether the job has ended and nobody is left."""
        return self._over_s is not None

    def take(self, event: Event, decision: Decision, at_s: float) -> None:
        """One step of the machine, as the journal has it."""
        if self._over_s is not None:
            return
        if self._begun_s is None:
            self._begun_s = self._since_s = at_s
        self._note(event, at_s)
        if decision.reason is Reason.STALE:
            return
        if isinstance(event, FirstStepDone) and event.generation == self._generation:
            self._stepping(event, at_s)
        elif decision.reason is Reason.WORKERS_RUNNING and self._open is Phase.RENDEZVOUS:
            self._turn_to(Phase.WARM_UP, at_s)
        facts = decision.facts
        if ENDED_GENERATION in facts and "unit" not in facts:
            self._broken(event, at_s)
        self._follow(event, decision, at_s)

    def spent(self, now_s: float) -> Spent:
        """Where the time went until now, or until the job was over.

        Args:
            now_s: on the job's clock.
        """
        phases = dict(self._spent)
        if self._begun_s is None:
            return Spent(wall_s=0.0, phases=phases)
        end_s = self._over_s if self._over_s is not None else max(now_s, self._since_s)
        for span in self.unsettled(end_s):
            phases[span.phase] += span.end_s - span.begin_s
        return Spent(wall_s=end_s - self._begun_s, phases=phases)

    def unsettled(self, now_s: float) -> tuple[Span, ...]:
        """The stretch that is open, as it looks now."""
        return () if self._over_s is not None else self._split(self._open, now_s)

    # What events say ----------------------------------------------------------------------------------------

    def _note(self, event: Event, at_s: float) -> None:
        """Steps and stalls that the event tells of; also of an older generation, which had come so far."""
        if isinstance(event, Restored | StepCommitted):
            self._checkpoints = True
        if isinstance(event, StepCommitted | WorkerExited | WorkersHung | CaughtUp):
            mine = event.generation == self._generation
            if mine and isinstance(event, StepCommitted | WorkerExited):
                self._stall_due_s += max(0.0, event.stalled_s - self._stall_told_s)
                self._stall_told_s = max(self._stall_told_s, event.stalled_s)
            if event.step is None:
                return
            if mine and self.goal is not None and event.step >= self.goal:
                # It was reached a while ago, if the step that is named now lies beyond it.
                share = (self.goal - self._first) / max(1, event.step - self._first)
                self._turn_to(Phase.TRAINING, self._since_s + share * (at_s - self._since_s))
            self._best = max(event.step, self._best or 0)

    def _stepping(self, event: FirstStepDone, at_s: float) -> None:
        """The first node has made a step: the others have, too, or are about to."""
        if self._open not in _STARTING:
            return
        warm_s = min(event.warm_up_s, at_s - self._since_s)
        load_s = min(event.load_s, at_s - self._since_s - warm_s)
        if warm_s or load_s:
            self._settle(Phase.RENDEZVOUS, at_s - warm_s - load_s)
            self._settle(Phase.LOAD, at_s - warm_s)
        self._settle(Phase.WARM_UP, at_s)
        again = self._checkpoints and self._best is not None and event.step < self._best
        self._open, self.goal = (Phase.RECOMPUTE, self._best) if again else (Phase.TRAINING, None)
        self._first = event.step
        self._best = max(event.step, self._best or 0)

    def _broken(self, event: Event, at_s: float) -> None:
        """The generation ended: what was before is closed, and so is the time until it was noticed."""
        unnoticed_s = 0.0
        if isinstance(event, WorkersHung):
            unnoticed_s = event.stalled_s
        elif isinstance(event, NodeDied):
            unnoticed_s = event.silent_s
        self._settle(self._open, max(self._since_s, at_s - unnoticed_s))
        self._settle(Phase.DETECT, at_s)
        self._open, self.goal = Phase.STOP, None

    def _follow(self, event: Event, decision: Decision, at_s: float) -> None:
        """What the machine asked for says where the job stands now."""
        finished = drains = False
        for command in decision.commands:
            if isinstance(command, FinishJob):
                finished = True
            elif isinstance(command, CancelTimer) and command.timer is TimerKind.DRAIN:
                self._end(at_s)
            elif isinstance(command, SetTimer):
                drains = drains or command.timer is TimerKind.DRAIN
                self._armed(command, at_s)
        if finished and not drains:
            self._end(at_s)
        if isinstance(event, TimerFired) and event.timer is TimerKind.DRAIN:
            self._end(at_s)

    def _armed(self, command: SetTimer, at_s: float) -> None:
        """Each state of the job arms a timer of its own."""
        if command.timer is TimerKind.START:
            self._turn_to(Phase.RENDEZVOUS, at_s)
            self._generation, self._started = command.generation, True
            self._stall_told_s = self._stall_due_s = 0.0
        elif command.timer is TimerKind.PREPARE and self._open is Phase.REPLACE:
            self._turn_to(Phase.RENDEZVOUS, at_s)
        elif command.timer is TimerKind.REPLACEMENT and self._started:
            self._turn_to(Phase.REPLACE, at_s)
        elif command.timer is TimerKind.DRAIN:
            if self._open is Phase.WARM_UP:
                # They ended, and not for a fault: nobody counted their steps.
                self._open = Phase.UNKNOWN
            self._turn_to(Phase.STOP, at_s)

    def _end(self, at_s: float) -> None:
        self._settle(self._open, at_s)
        self._over_s = at_s

    # Stretches ----------------------------------------------------------------------------------------------

    def _turn_to(self, phase: Phase, at_s: float) -> None:
        self._settle(self._open, at_s)
        self._open = phase
        if phase is not Phase.RECOMPUTE:
            self.goal = None

    def _settle(self, phase: Phase, end_s: float) -> None:
        """Close the stretch that is open, as this phase."""
        for span in self._split(phase, end_s):
            self._spent[span.phase] += span.end_s - span.begin_s
            if span.phase is Phase.STALL:
                self._stall_due_s -= span.end_s - span.begin_s
            if self._keep is not None:
                self._keep(span)
        self._since_s = max(self._since_s, end_s)

    def _split(self, phase: Phase, end_s: float) -> tuple[Span, ...]:
        """The open stretch, and what saving held of it; when exactly is not known, so it is put last."""
        begin_s = self._since_s
        if end_s <= begin_s:
            return ()
        held_s = min(self._stall_due_s, end_s - begin_s) if phase in _STEPPING else 0.0
        if held_s <= 0.0:
            return (Span(phase=phase, begin_s=begin_s, end_s=end_s),)
        return (
            Span(phase=phase, begin_s=begin_s, end_s=end_s - held_s),
            Span(phase=Phase.STALL, begin_s=end_s - held_s, end_s=end_s),
        )
