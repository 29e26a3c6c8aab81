"""One node's workers started again while the others go on (`RestartScope.NODE`).

The job has declared that no process group crosses nodes, so that the smallest unit is one node:

    running ─▶ (a worker fails, the node is lost, …) renew ─▶ prepared ─▶ start ─▶ running

The job stays `JobPhase.RUNNING` meanwhile. The generation is raised, but only the node that starts again is
told, so that each member counts by its own (`Turn.generation_of`). A seat whose node cannot go on is taken by
a spare with as many workers. Where there is none, and before the whole job has run once, what is done is what
is done for any job: all members start again, or wait.

Restarts and charges are counted for the job, since they are what it costs; progress and errors by seat
(`Unit.trail`), since one that gets nowhere is not helped by the steps of another. One timer serves all:
each unit knows when it is due, and the timer stands at the earliest.
"""

from __future__ import annotations

from dataclasses import replace

from aimaster.core.commands import Reason
from aimaster.core.events import TimerKind
from aimaster.core.orders import next_generation, release, start_command, tell_to_prepare
from aimaster.core.policy import Cause, History
from aimaster.core.state import NO_RANK, UNUSABLE, JobPhase, NodeRecord, NodeState, Unit
from aimaster.core.transitions import NodeTrigger
from aimaster.core.turn import Turn
from aimaster.ids import NodeId

ROUNDING_S = 1e-6
"""A timer stands at a difference of times, which may fall short of the moment itself."""


def unit_of(turn: Turn, node: NodeId) -> Unit | None:
    """The unit of a member that can be started again alone now; None where the whole job counts."""
    if not turn.by_node or turn.job.phase is not JobPhase.RUNNING or not turn.is_member(node):
        return None
    return turn.state.nodes[node].unit


def change(turn: Turn, node: NodeRecord, unit: Unit | None) -> None:
    """Put another unit in the place of a node's."""
    node.unit = unit
    turn.state.touch(node)


def history_before(unit: Unit, base: History) -> History:
    """What a failure of this seat is judged by: the job's charges, the seat's own progress and errors."""
    return replace(unit.trail, charges=base.charges, restarts=base.restarts)


def keep(turn: Turn, node: NodeId, judged: History) -> None:
    """Note a judgement: the charge for the job, the rest for the seat."""
    job, record = turn.job, turn.state.nodes[node]
    assert record.unit is not None
    job.history = replace(job.history, charges=judged.charges, restarts=judged.restarts)
    change(turn, record, replace(record.unit, trail=replace(judged, charges=(), restarts=0)))


def renew(turn: Turn, node: NodeId, *, cause: Cause, reason: Reason) -> bool:
    """Start one seat again, with its node or a spare; False (and nothing done) where that is not possible."""
    unit = unit_of(turn, node)
    if unit is None:
        return False
    job, old = turn.job, turn.state.nodes[node]
    taker = _taker(turn, old, cause)
    if taker is None:
        return False
    seat = (old.node_rank, old.first_rank)
    generation = next_generation(turn)
    due_s = turn.now + turn.policy.timeouts.prepare_s
    job.awaited.discard(old.id)
    _leave(turn, old)
    if taker is not old:
        job.members = tuple(taker.id if name == old.id else name for name in job.members)
        if old.state not in UNUSABLE:
            release(turn, old)
    taker.node_rank, taker.first_rank = seat
    fresh = replace(unit, due_s=due_s, begun=False, first_step_at_s=None, attempt_step=None)
    change(turn, taker, fresh)
    tell_to_prepare(turn, taker, reason)
    job.awaited.add(taker.id)
    arm(turn)
    turn.say(reason, generation=generation, unit=taker.id)
    return True


def start(turn: Turn, node: NodeRecord) -> None:
    """The seat's node is prepared: tell it to start its workers."""
    job, unit = turn.job, node.unit
    assert unit is not None
    expected = unit.restorable
    due_s = turn.now + turn.policy.timeouts.start_s
    change(turn, node, replace(unit, due_s=due_s, begun=True, attempt=job.starts, expected=expected))
    turn.move_node(node, NodeTrigger.START)
    turn.send(start_command(turn, node, lead=node))
    job.starts += 1
    job.seats = {name: rank for name, rank in job.seats.items() if rank != node.node_rank} | {
        node.id: node.node_rank
    }
    job.uncharged, job.blamed = None, frozenset()
    arm(turn)
    turn.say(
        Reason.GENERATION_PREPARED,
        generation=node.generation,
        attempt=job.starts - 1,
        nodes=1,
        world_size=node.workers,
    )


def begin(turn: Turn, node: NodeRecord) -> None:
    """The node is started with the whole job: what its seat carries begins or goes on."""
    unit = node.unit if node.unit is not None else Unit()
    fresh = replace(
        unit,
        due_s=None,
        begun=True,
        attempt=turn.job.starts,
        first_step_at_s=None,
        attempt_step=None,
        expected=unit.restorable,
    )
    change(turn, node, fresh)


def answered(turn: Turn, node: NodeRecord) -> None:
    """The node's workers run, or have ended well already: nothing is due any more."""
    if node.unit is not None and node.unit.due_s is not None:
        change(turn, node, replace(node.unit, due_s=None))
        arm(turn)
        if turn.job.phase is JobPhase.RUNNING and not turn.job.awaited:
            turn.say(Reason.WORKERS_RUNNING, attempt=node.unit.attempt, world_size=turn.job.world_size)


def arm(turn: Turn) -> None:
    """Let the timer stand at the earliest moment at which a unit is due."""
    due = _due(turn)
    if not due:
        turn.cancel_timers(TimerKind.UNIT)
    else:
        turn.set_timer(TimerKind.UNIT, max(0.0, min(at_s for at_s, _ in due) - turn.now))


def next_late(turn: Turn) -> NodeRecord | None:
    """The member that is due, longest first."""
    late = [(at_s, name) for at_s, name in _due(turn) if at_s <= turn.now + ROUNDING_S]
    return turn.state.nodes[min(late)[1]] if late else None


def note_step(turn: Turn, node: NodeRecord, *, step: int | None, first: bool = False) -> None:
    """A step was seen in the node's newest start."""
    unit = node.unit
    if unit is None or step is None:
        return
    begun_s = turn.now if first and unit.first_step_at_s is None else unit.first_step_at_s
    newest = max(step, unit.attempt_step or 0)
    change(turn, node, replace(unit, attempt_step=newest, first_step_at_s=begun_s))


def note_checkpoint(turn: Turn, node: NodeRecord, *, committed: int | None) -> None:
    """The node committed a step, or (None) restored one."""
    unit = node.unit
    if unit is not None:
        newest = unit.committed if committed is None else max(committed, unit.committed or 0)
        change(turn, node, replace(unit, restorable=True, committed=newest))


def _due(turn: Turn) -> list[tuple[float, NodeId]]:
    nodes = turn.state.nodes
    units = [(nodes[name].unit, name) for name in turn.job.awaited]
    return [(unit.due_s, name) for unit, name in units if unit is not None and unit.due_s is not None]


def _taker(turn: Turn, old: NodeRecord, cause: Cause) -> NodeRecord | None:
    """Who has the seat from now on: the node itself if only its workers failed, else the best there is."""
    width = _width(turn, old)
    itself = old.state not in UNUSABLE and old.workers == width
    if itself and cause in (Cause.WORKER_FAILED, Cause.WORKERS_HUNG):
        return old
    there = [
        node
        for node in turn.state.usable.values()
        if node.workers == width and node.state is NodeState.SPARE and not turn.is_member(node.id)
    ]
    if itself:
        there.append(old)
    return min(there, key=lambda n: (n.suspect, n.strikes, n is not old, n.order), default=None)


def _width(turn: Turn, node: NodeRecord) -> int:
    """Ranks of the seat. A node that comes back with another number of workers does not fit into its own."""
    members = turn.job.members
    following = node.node_rank + 1
    end = turn.job.world_size
    if following < len(members):
        end = turn.state.nodes[members[following]].first_rank
    return end - node.first_rank


def _leave(turn: Turn, node: NodeRecord) -> None:
    node.node_rank = node.first_rank = NO_RANK
    node.finished.clear()
    change(turn, node, None)
