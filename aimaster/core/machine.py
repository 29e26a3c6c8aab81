"""The machine: ``step(event, now) -> Decision``.

It answers one event at a time and remembers. It does no I/O, reads no clock and draws nothing by chance, so
that the same events at the same times always give the same decisions: a journal of events *is* the state.

Who calls it journals the event and the decision first and carries out the commands second. Commands may be
carried out twice (after a crash between the two), which is why each names its generation and an agent does
each once. What must be done again after a restart of the master is `Machine.outstanding`; what one agent may
have missed is sent again when it joins again.

Three kinds of answers do not change anything: `Reason.STALE` (of an older generation or an earlier life of
the agent: expected, since messages cross), `Reason.NOTHING_TO_DO` (known already), and the error
`IllegalEvent` (cannot be true; nothing is to be journalled).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from aimaster.core import generation as gen
from aimaster.core import on_nodes, on_workers
from aimaster.core.commands import Command, Decision, FinishJob, Reason, SetTimer
from aimaster.core.events import (
    CaughtUp,
    Event,
    FirstStepDone,
    JobDeclared,
    NodeChecked,
    NodeDied,
    NodeFailed,
    NodeJoined,
    NodeLeft,
    NodePrepared,
    NodeRecovered,
    NodeSuspected,
    RankSlow,
    Restored,
    StepCommitted,
    StopRequested,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkersHung,
    WorkersStarted,
)
from aimaster.core.policy import EXIT_NO_NODES, Policy
from aimaster.core.requeue import Requeued, requeued
from aimaster.core.state import GONE, JobView, State
from aimaster.core.transitions import IllegalEvent, JobTrigger
from aimaster.core.turn import Turn
from aimaster.core.views import job_view


class Machine:
    """One job's decisions. Not thread-safe: one owner calls it."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy if policy is not None else Policy()
        self._state = State()

    def step(self, event: Event, now: float) -> Decision:
        """Answer one event.

        Args:
            event: what was seen.
            now: seconds on a clock that never goes back, not even when the master is started again.

        Raises:
            IllegalEvent: if the event cannot be true in this state; the state is unchanged.
        """
        # A journal keeps floats: an integer here would give another digest after a replay.
        turn = Turn(self._state, self.policy, float(now))
        if self._state.job.declared is None and not isinstance(event, JobDeclared | Requeued):
            raise IllegalEvent(self._state.job.phase, type(event).__name__, "the job")
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise IllegalEvent(self._state.job.phase, type(event).__name__, "the job", "no such event")
        handler(turn, event)
        return turn.decision()

    def digest(self) -> str:
        """32 hexadecimal digits, equal for machines that were told the same story."""
        return self._state.digest()

    def view(self, now: float) -> JobView:
        """What readers may know."""
        return job_view(self._state, self.policy, now)

    def outstanding(self, now: float) -> tuple[Command, ...]:
        """What a master that starts again has to do before anything else: arm timers, finish the job."""
        job = self._state.job
        commands: list[Command] = [
            SetTimer(timer=kind, generation=timer.generation, after_s=max(0.0, timer.deadline_s - now))
            for kind, timer in job.timers.items()
        ]
        if job.exit_code is not None and job.end_reason is not None:
            commands.append(FinishJob(exit_code=job.exit_code, reason=job.end_reason))
        return tuple(commands)

    @property
    def state(self) -> State:
        """For invariants and tests only: nobody may change it."""
        return self._state


def _declared(turn: Turn, event: JobDeclared) -> None:
    if turn.job.declared is not None:
        if turn.job.declared != event:
            raise IllegalEvent(turn.job.phase, "JobDeclared", "the job", "declared differently before")
        return
    turn.job.declared = event
    turn.move_job(JobTrigger.DECLARED)
    gen.consider(turn)
    turn.say(Reason.JOB_DECLARED, job=event.job, min=event.min_nodes, max=event.max_nodes)


def _timer(turn: Turn, event: TimerFired) -> None:
    job = turn.job
    timer = job.timers.get(event.timer)
    if timer is None or timer.generation != event.generation:
        turn.say(Reason.STALE, timer=event.timer.value, generation=job.generation)
        return
    del job.timers[event.timer]
    _TIMERS[event.timer](turn)


def _last_call_over(turn: Turn) -> None:
    gen.consider(turn, last_call_over=True)


def _drained(turn: Turn) -> None:
    """Whoever has not said goodbye by now is not waited for."""
    late = [node for node in turn.state.nodes.values() if node.state not in GONE]
    turn.move_job(JobTrigger.EMPTY)
    turn.say(turn.job.end_reason or Reason.JOB_FINISHED, late=len(late))


def _no_replacement(turn: Turn) -> None:
    turn.say(Reason.NO_HEALTHY_NODES, have=len(turn.state.usable), min=turn.min_nodes)
    gen.end_job(turn, EXIT_NO_NODES, Reason.NO_HEALTHY_NODES)


_TIMERS: Mapping[TimerKind, Callable[[Turn], None]] = {
    TimerKind.LAST_CALL: _last_call_over,
    TimerKind.PREPARE: on_nodes.members_late,
    TimerKind.START: on_nodes.members_late,
    TimerKind.DRAIN: _drained,
    TimerKind.REPLACEMENT: _no_replacement,
    TimerKind.UNIT: on_nodes.unit_late,
}

_HANDLERS: Mapping[type[Event], Callable[[Turn, Any], None]] = {
    Requeued: requeued,
    JobDeclared: _declared,
    NodeJoined: on_nodes.joined,
    NodeLeft: on_nodes.gone,
    NodeDied: on_nodes.gone,
    NodeSuspected: on_nodes.suspicion,
    NodeRecovered: on_nodes.suspicion,
    NodePrepared: on_nodes.prepared,
    NodeFailed: on_nodes.failed,
    NodeChecked: on_nodes.checked,
    StopRequested: on_nodes.stop_requested,
    WorkersStarted: on_workers.started,
    WorkerExited: on_workers.exited,
    WorkersHung: on_workers.hung,
    RankSlow: on_workers.slow,
    Restored: on_workers.restored,
    FirstStepDone: on_workers.first_step_done,
    CaughtUp: on_workers.caught_up,
    StepCommitted: on_workers.step_committed,
    TimerFired: _timer,
}
