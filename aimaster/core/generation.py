"""How generations are formed, started, broken and ended: the moves that are about many nodes at once.

    consider ─▶ form ─▶ (all prepared) start ─▶ (all started) running
        ▲        │                                   │
        │        └────────── broken ◀────────────────┘   charge, then consider again, or end
        └─ hold: too few nodes; the survivors stop their workers, and everyone waits

Every call of `form` and `hold` raises the generation, so that whatever still comes from the old one is known
as old. A hold tells the survivors to prepare although nobody knows yet for which ranks: their old workers
have lost a partner, and hold devices that the next start needs.
"""

from __future__ import annotations

from aimaster.core import units
from aimaster.core.commands import EndNode, FinishJob, Prepare, Reason
from aimaster.core.events import TimerKind
from aimaster.core.membership import Readiness, choose, readiness
from aimaster.core.orders import next_generation, release, start_command, tell_to_prepare
from aimaster.core.placement import Guest, place
from aimaster.core.policy import EXIT_BUDGET, EXIT_USER_ERROR, Cause, Failure, judge
from aimaster.core.sentences import last_words
from aimaster.core.state import GONE, NO_RANK, JobPhase, NodeRecord, NodeState
from aimaster.core.transitions import JobTrigger, NodeTrigger
from aimaster.core.turn import Turn
from aimaster.ids import NO_GENERATION, NodeId

_SPARES_END_WELL = frozenset({0, EXIT_USER_ERROR, EXIT_BUDGET})
"""Exit codes that say something about the training, which a node outside of it had no part in."""


def consider(turn: Turn, *, last_call_over: bool = False) -> None:
    """While waiting: form a generation, call for more nodes, or go on waiting."""
    job = turn.job
    ready = readiness(
        len(turn.state.usable),
        min_nodes=turn.min_nodes,
        max_nodes=turn.max_nodes,
        last_call_over=last_call_over,
    )
    if ready is Readiness.FORM:
        form(turn, Reason.ENOUGH_NODES)
        return
    have = len(turn.state.usable)
    turn.say(Reason.WAITING_FOR_NODES, have=have, min=turn.min_nodes, max=turn.max_nodes)
    if ready is Readiness.SHORT:
        turn.cancel_timers(TimerKind.LAST_CALL)
        if TimerKind.REPLACEMENT not in job.timers:
            _wait_for_capacity(turn)
    elif TimerKind.LAST_CALL not in job.timers:
        turn.cancel_timers(TimerKind.REPLACEMENT)
        timeouts = turn.policy.timeouts
        turn.set_timer(TimerKind.LAST_CALL, timeouts.regroup_s if job.starts else timeouts.last_call_s)


def form(turn: Turn, reason: Reason) -> None:
    """Choose members, raise the generation and tell them to prepare."""
    job = turn.job
    choice = choose(turn.state.usable.values(), seats=job.seats, max_nodes=turn.max_nodes)
    turn.move_job(JobTrigger.FORMED)
    generation = next_generation(turn)
    guests = [
        Guest(node=n.id, workers=n.workers, wanted_node_rank=n.wanted_node_rank) for n in choice.members
    ]
    seats = place(guests, job.seats)
    _clear_ranks(turn)
    for seat in seats:
        node = turn.state.nodes[seat.node]
        node.node_rank, node.first_rank = seat.node_rank, seat.first_rank
        tell_to_prepare(turn, node, reason)
    for node in choice.left_out:
        release(turn, node)
        units.change(turn, node, None)
    job.members = tuple(seat.node for seat in seats)
    job.world_size = sum(seat.workers for seat in seats)
    job.awaited = set(job.members)
    job.unfinished = len(job.members)
    turn.cancel_timers(TimerKind.LAST_CALL, TimerKind.REPLACEMENT, TimerKind.START, TimerKind.UNIT)
    turn.set_timer(TimerKind.PREPARE, turn.policy.timeouts.prepare_s)
    turn.say(reason, generation=generation, nodes=len(seats), world_size=job.world_size)


def start(turn: Turn) -> None:
    """All members are prepared: tell them to start their workers."""
    job = turn.job
    turn.move_job(JobTrigger.PREPARED)
    job.progress_expected = job.restored or _newest_committed(turn) is not None
    members = turn.members()
    lead = members[0]
    for node in members:
        turn.move_node(node, NodeTrigger.START)
        if turn.by_node:
            units.begin(turn, node)
        turn.send(start_command(turn, node, lead=lead))
    job.starts += 1
    job.seats = {node.id: node.node_rank for node in members}
    job.awaited = set(job.members)
    job.uncharged, job.blamed = None, frozenset()
    job.first_step_at_s, job.attempt_step, job.resumed_step = None, None, None
    turn.cancel_timers(TimerKind.PREPARE)
    turn.set_timer(TimerKind.START, turn.policy.timeouts.start_s)
    turn.say(
        Reason.GENERATION_PREPARED,
        generation=job.generation,
        attempt=job.starts - 1,
        nodes=len(members),
        world_size=job.world_size,
    )


def broken(
    turn: Turn,
    reason: Reason,
    *,
    cause: Cause,
    node: NodeId,
    step: int | None = None,
    error_digest: str = "",
) -> None:
    """A generation cannot go on: charge it, then form another one, wait, or end the job.

    `reason` and the facts that the caller said go into the decision unless the judgement overrules them.
    """
    job = turn.job
    unit = units.unit_of(turn, node)
    started = job.phase in (JobPhase.STARTING, JobPhase.RUNNING) if unit is None else unit.begun
    attempted = started
    ended_generation = turn.state.nodes[node].generation if unit is not None else job.generation
    explains = job.uncharged is not None and cause is Cause.NODE_LOST and node in job.blamed
    base = before = job.history if unit is None else units.history_before(unit, job.history)
    if explains and job.uncharged is not None:
        # Workers of other nodes fail within milliseconds of a lost partner; the loss is known seconds later.
        base, attempted, cause = job.uncharged, True, Cause.NODE_LOST
    first_step_at_s = job.first_step_at_s if unit is None else unit.first_step_at_s
    failure = Failure(
        cause=cause if attempted else Cause.NODE_FAILED,
        attempted=attempted,
        at_s=turn.now,
        step=step,
        error_digest=error_digest,
        committed=_newest_committed(turn) if unit is None else unit.committed,
        attempt_step=job.attempt_step if unit is None else unit.attempt_step,
        stepped_s=0.0 if first_step_at_s is None else turn.now - first_step_at_s,
        resumed=job.resumed_step if unit is None else None,
    )
    assert job.declared is not None
    judgement = judge(
        turn.policy,
        base,
        failure=failure,
        max_nodes=job.declared.max_nodes,
        max_restarts=job.declared.max_restarts,
    )
    if started:
        job.uncharged = before
        job.blamed = frozenset(job.members) if unit is None else frozenset({node})
    if unit is None:
        job.history = judgement.history
    else:
        units.keep(turn, node, judgement.history)
    turn.say(reason, ended_generation=ended_generation, cause=failure.cause.value, **judgement.facts)
    if judgement.exit_code is not None and judgement.reason is not None:
        end_job(turn, judgement.exit_code, judgement.reason)
    elif units.renew(turn, node, cause=cause, reason=reason):
        return
    elif len(turn.state.usable) >= turn.min_nodes:
        form(turn, reason)
    else:
        hold(turn, reason)


def hold(turn: Turn, reason: Reason) -> None:
    """Too few nodes: raise the generation, let the survivors stop their workers, and wait for capacity."""
    job = turn.job
    turn.move_job(JobTrigger.SHORT)
    generation = next_generation(turn)
    _clear_ranks(turn)
    job.members, job.world_size, job.awaited, job.unfinished = (), 0, set(), 0
    for node in turn.state.usable.values():
        if node.state is not NodeState.SPARE:
            tell_to_prepare(turn, node, reason)
    turn.cancel_timers(TimerKind.PREPARE, TimerKind.START, TimerKind.LAST_CALL, TimerKind.UNIT)
    _wait_for_capacity(turn)
    turn.say(
        reason,
        generation=generation,
        have=len(turn.state.usable),
        min=turn.min_nodes,
        max=turn.max_nodes,
    )


def end_job(turn: Turn, exit_code: int, reason: Reason) -> None:
    """Tell everyone to end, with the code that fits each."""
    job = turn.job
    turn.move_job(JobTrigger.END)
    turn.say(reason, exit_code=exit_code, generation=job.generation)
    job.exit_code, job.end_reason = exit_code, reason
    job.sentence = last_words(reason, turn.facts)
    for node in turn.state.nodes.values():
        if node.state not in GONE:
            tell_to_end(turn, node)
    turn.cancel_timers(*TimerKind)
    job.awaited = set()
    turn.send(FinishJob(exit_code=exit_code, reason=reason))
    if all_gone(turn):
        turn.move_job(JobTrigger.EMPTY)
    else:
        turn.set_timer(TimerKind.DRAIN, turn.policy.timeouts.drain_s)


def resend(turn: Turn, node: NodeRecord) -> None:
    """An agent is back after a cut: send what it may have missed. It does each thing once."""
    job = turn.job
    if node.state in (NodeState.PREPARING, NodeState.ASIDE):
        turn.send(Prepare(node=node.id, generation=node.generation, reason=Reason.RESENT))
    elif node.state is NodeState.STARTING:
        lead = turn.state.nodes[job.members[0]]
        turn.send(start_command(turn, node, lead=lead, again=True))
    elif node.state is NodeState.ENDING:
        turn.send(_end_command(turn, node))


def all_gone(turn: Turn) -> bool:
    """Whether every node that was told to end is gone."""
    return not turn.state.present


def _clear_ranks(turn: Turn) -> None:
    """Take the seats of the old generation away. Lost members keep theirs only in `JobRecord.seats`."""
    for name in turn.job.members:
        node = turn.state.nodes[name]
        node.node_rank = node.first_rank = NO_RANK
        node.finished.clear()
        turn.state.touch(node)


def tell_to_end(turn: Turn, node: NodeRecord, *, exit_code: int | None = None) -> None:
    """Tell one node to end: with the job, or alone with a code of its own. Said once to each life of it."""
    if node.end_code is None:
        node.end_code = _end_code(turn, node) if exit_code is None else exit_code
        turn.move_node(node, NodeTrigger.END)
        turn.send(_end_command(turn, node))


def _end_code(turn: Turn, node: NodeRecord) -> int:
    job = turn.job
    assert job.exit_code is not None
    outside = bool(job.members) and not turn.is_member(node.id)
    return 0 if outside and job.exit_code in _SPARES_END_WELL else job.exit_code


def _end_command(turn: Turn, node: NodeRecord) -> EndNode:
    assert node.end_code is not None
    return EndNode(
        node=node.id,
        exit_code=node.end_code,
        reason=turn.job.end_reason or Reason.STOP_REQUESTED,
        sentence=turn.job.sentence,
    )


def _wait_for_capacity(turn: Turn) -> None:
    timeouts = turn.policy.timeouts
    first = turn.job.generation == NO_GENERATION
    turn.set_timer(TimerKind.REPLACEMENT, timeouts.join_s if first else timeouts.replacement_s)


def _newest_committed(turn: Turn) -> int | None:
    known = [step for step in (turn.job.memory_step, turn.job.durable_step) if step is not None]
    return max(known, default=None)
