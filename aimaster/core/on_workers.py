"""What the machine does when workers start, restore, step, commit and end.

The first failure of a generation that counts ends it; those that follow it carry an older generation then,
and are recorded without being charged. A node whose workers all ended well is not needed any more: it may
be lost without harm to the others.
"""

from __future__ import annotations

from aimaster.core import generation as gen
from aimaster.core import units
from aimaster.core.commands import CheckNode, Reason
from aimaster.core.events import (
    CaughtUp,
    FirstStepDone,
    HangKind,
    RankSlow,
    Restored,
    StepCommitted,
    Suspicion,
    Tier,
    TimerKind,
    WorkerExited,
    WorkersHung,
    WorkersStarted,
)
from aimaster.core.guards import current, known
from aimaster.core.policy import EXIT_USER_ERROR, Cause
from aimaster.core.stacks import ranges
from aimaster.core.state import JobPhase, NodeRecord, NodeState
from aimaster.core.transitions import IllegalEvent, JobTrigger, NodeTrigger
from aimaster.core.turn import Turn


def started(turn: Turn, event: WorkersStarted) -> None:
    """A node forked its workers."""
    node = current(turn, event)
    if node is None or node.state is NodeState.RUNNING:
        return
    turn.move_node(node, NodeTrigger.STARTED)
    node.strikes = 0
    turn.say(Reason.NODE_STARTED, node=node.id, generation=event.generation)
    _no_longer_awaited(turn, node)


def _no_longer_awaited(turn: Turn, node: NodeRecord) -> None:
    turn.job.awaited.discard(node.id)
    turn.say(turn.reason, awaited=len(turn.job.awaited))
    if turn.job.phase is JobPhase.STARTING and not turn.job.awaited:
        turn.move_job(JobTrigger.STARTED)
        turn.cancel_timers(TimerKind.START)
        turn.say(Reason.WORKERS_RUNNING, attempt=turn.job.starts - 1, world_size=turn.job.world_size)
    units.answered(turn, node)


def exited(turn: Turn, event: WorkerExited) -> None:
    """A worker ended, well or not."""
    node = current(turn, event)
    if node is None:
        return
    has_workers = node.state in (NodeState.STARTING, NodeState.RUNNING, NodeState.FINISHED)
    is_its_rank = event.local_rank < node.workers and event.rank == node.first_rank + event.local_rank
    if not (has_workers and is_its_rank):
        detail = f"rank {event.rank}, local rank {event.local_rank}, first rank {node.first_rank}"
        raise IllegalEvent(node.state, "WorkerExited", f"node {node.id}", detail)
    if event.local_rank in node.finished:
        return
    _note_step(turn, event.step)
    units.note_step(turn, node, step=event.step)
    if event.ok:
        _finished(turn, node, event)
        return
    turn.say(
        Reason.WORKER_FAILED,
        node=node.id,
        rank=event.rank,
        signal=event.signal,
        worker_exit_code=event.exit_code,
        last_step=event.step,
    )
    gen.broken(
        turn,
        Reason.WORKER_FAILED,
        cause=Cause.WORKER_FAILED,
        node=node.id,
        step=event.step,
        error_digest=event.error_digest,
    )


def hung(turn: Turn, event: WorkersHung) -> None:
    """No rank steps any more. A script that has finished but for its end is not started again."""
    node = turn.state.nodes.get(event.node)
    counts = turn.job.generation if node is None else turn.generation_of(node)
    if event.generation != counts or turn.job.phase not in (JobPhase.STARTING, JobPhase.RUNNING):
        turn.say(Reason.STALE, event="WorkersHung", generation=turn.job.generation)
        return
    _note_step(turn, event.step)
    turn.say(
        Reason.WORKERS_HUNG,
        kind=event.kind.value,
        culprits=ranges(event.culprits) or None,
        node=event.node,
        stalled_s=event.stalled_s,
        limit_s=event.limit_s,
        last_step=event.step,
    )
    if event.kind is HangKind.EXIT:
        turn.say(Reason.EXIT_HUNG, ended_generation=turn.job.generation)
        gen.end_job(turn, EXIT_USER_ERROR, Reason.EXIT_HUNG)
        return
    if event.culprits and node is not None:
        # Said before the order to prepare, which then waits for the answer.
        turn.send(CheckNode(node=node.id, generation=event.generation, why=Suspicion.HANG))
    gen.broken(turn, Reason.WORKERS_HUNG, cause=Cause.WORKERS_HUNG, node=event.node, step=event.step)


def slow(turn: Turn, event: RankSlow) -> None:
    """The others wait for somebody: said, and nothing done about it; a restart would cost more."""
    if event.generation != turn.job.generation:
        turn.say(Reason.STALE, event="RankSlow", generation=turn.job.generation)
    elif event.over:
        turn.say(Reason.RANK_SLOW_NO_MORE, ranks=ranges(event.ranks), node=event.node)
    else:
        turn.say(
            Reason.RANK_SLOW,
            ranks=ranges(event.ranks),
            node=event.node,
            awake=event.awake,
            starved=round(max(0.0, event.awake - event.running), 3) or None,
            others_awake=event.others_awake,
        )
        turn.send(CheckNode(node=event.node, generation=event.generation, why=Suspicion.SLOW))


def _finished(turn: Turn, node: NodeRecord, event: WorkerExited) -> None:
    node.finished.add(event.local_rank)
    turn.state.touch(node)
    turn.say(Reason.WORKER_FINISHED, node=node.id, rank=event.rank, last_step=event.step)
    if len(node.finished) < node.workers:
        return
    turn.move_node(node, NodeTrigger.FINISHED)
    turn.job.unfinished -= 1
    if turn.job.unfinished == 0:
        gen.end_job(turn, 0, Reason.JOB_FINISHED)
    else:
        _no_longer_awaited(turn, node)


def restored(turn: Turn, event: Restored) -> None:
    """A rank loaded a checkpoint. Newer steps in memory, if there were any, are gone then."""
    node = current(turn, event)
    if node is None:
        return
    job = turn.job
    job.restored, job.resumed_step = True, event.step
    if job.memory_step is not None:
        job.memory_step = min(event.step, job.memory_step)
    if event.tier is Tier.DISK:
        job.durable_step = max(event.step, job.durable_step or 0)
    units.note_checkpoint(turn, node, committed=None)
    turn.say(Reason.PROGRESS, node=node.id, rank=event.rank, step=event.step, tier=event.tier.value)


def first_step_done(turn: Turn, event: FirstStepDone) -> None:
    """The attempt is under way."""
    node = current(turn, event)
    if node is None:
        return
    if turn.job.first_step_at_s is None:
        turn.job.first_step_at_s = turn.now
    _note_step(turn, event.step)
    units.note_step(turn, node, step=event.step, first=True)
    turn.say(Reason.PROGRESS, node=node.id, step=event.step, attempt=turn.job.starts - 1)


def caught_up(turn: Turn, event: CaughtUp) -> None:
    """What had been done before is done again. Nothing follows from it but where the time went."""
    if event.generation != turn.job.generation:
        turn.say(Reason.STALE, event="CaughtUp", generation=turn.job.generation)
        return
    _note_step(turn, event.step)
    turn.say(Reason.PROGRESS, step=event.step)


def step_committed(turn: Turn, event: StepCommitted) -> None:
    """A checkpoint step is safe. One on storage stays so, whatever became of its generation."""
    node = known(turn, event) if event.durable else current(turn, event)
    if node is None:
        return
    job = turn.job
    if event.generation > job.generation:
        raise IllegalEvent(node.state, "StepCommitted", f"node {node.id}", f"generation {event.generation}")
    if event.durable:
        job.durable_step = max(event.step, job.durable_step or 0)
    else:
        job.memory_step = max(event.step, job.memory_step or 0)
    units.note_checkpoint(turn, node, committed=event.step)
    if event.generation == turn.generation_of(node):
        _note_step(turn, event.step)
        units.note_step(turn, node, step=event.step)
    turn.say(Reason.PROGRESS, node=node.id, step=event.step, durable=int(event.durable))


def _note_step(turn: Turn, step: int | None) -> None:
    if step is not None:
        turn.job.attempt_step = max(step, turn.job.attempt_step or 0)
