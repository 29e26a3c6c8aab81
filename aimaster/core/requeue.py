"""What a job that its scheduler starts again keeps from before: charges, brakes, its place in the count.

A job that was preempted, or ran out of nodes, ends with a code that asks for another start. That start is a
new journal, but the same job: what it has spent stays spent, else a job that fails every few minutes on a
busy cluster would never be stopped. Its generations go on counting, too, so that nothing an earlier one left
behind can be taken for a later one's. A job that ended for good, or that a person stopped, begins with
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from aimaster.core.commands import Reason
from aimaster.core.events import Event
from aimaster.core.policy import EXIT_NO_NODES, EXIT_PREEMPTED, NO_HISTORY, History
from aimaster.core.state import JobPhase, State
from aimaster.core.transitions import IllegalEvent
from aimaster.core.turn import Turn
from aimaster.ids import Generation

ASK_FOR_ANOTHER_START = frozenset({EXIT_PREEMPTED, EXIT_NO_NODES})
"""Exit codes after which a start under the same name goes on with the same job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Requeued(Event):
    """The first event of a journal that follows another one of the same job."""

    history: History
    """With times on the job's clock, which goes on over the two journals."""
    generation: Generation
    """The newest of before."""


def left_behind(state: State) -> Requeued | None:
    """What the next start of a job that is over has to know; None where it begins with nothing."""
    job = state.job
    if job.exit_code not in ASK_FOR_ANOTHER_START:
        return None
    generation = Generation(max(job.generation, job.seen_generation))
    return Requeued(history=job.history, generation=generation)


def requeued(turn: Turn, event: Requeued) -> None:
    """Only before anything else is known."""
    job = turn.job
    if job.phase is not JobPhase.UNDECLARED or job.history != NO_HISTORY:
        raise IllegalEvent(job.phase, "Requeued", "the job", "it has begun already")
    job.history = event.history
    job.seen_generation = event.generation
    turn.say(Reason.JOB_REQUEUED, restarts=event.history.restarts, generation=event.generation)
