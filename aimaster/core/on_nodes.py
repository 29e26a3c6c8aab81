"""What the machine does when nodes come, go, fall silent, or do not do what they were told.

Each handler first checks who speaks (`aimaster.core.guards`), then changes the node, then lets
`aimaster.core.generation` draw the conclusion for the job.
"""

from __future__ import annotations

from aimaster.core import commoncause, units
from aimaster.core import generation as gen
from aimaster.core.commands import CheckNode, Reason
from aimaster.core.events import (
    AgentPhase,
    NodeChecked,
    NodeDied,
    NodeFailed,
    NodeJoined,
    NodeLeft,
    NodePrepared,
    NodeRecovered,
    NodeSuspected,
    StopKind,
    StopRequested,
    Suspicion,
    TimerKind,
)
from aimaster.core.guards import current, is_needed, known, stale
from aimaster.core.orders import clean_spare
from aimaster.core.policy import EXIT_INTERRUPTED, EXIT_PREEMPTED, Cause
from aimaster.core.state import (
    GONE,
    LIVE_PHASES,
    OVER,
    RETIRED_INCARNATIONS_MAX,
    JobPhase,
    NodeRecord,
    NodeState,
)
from aimaster.core.transitions import (
    IllegalEvent,
    JobTrigger,
    NodeTrigger,
    SuspicionTrigger,
    move_suspicion,
)
from aimaster.core.turn import Turn
from aimaster.ids import Generation

_HAS_SAID_PREPARED = frozenset(
    {NodeState.PREPARED, NodeState.STARTING, NodeState.RUNNING, NodeState.FINISHED}
)
"""A master that died before it could acknowledge hears things of the current generation twice."""


def joined(turn: Turn, event: NodeJoined) -> None:
    """A new node, a new life of a known one, one that was given up and is back, or the end of a cut."""
    node = turn.state.nodes.get(event.node)
    if node is not None and event.incarnation in node.retired:
        stale(turn, event)
        return
    turn.job.seen_generation = Generation(max(turn.job.seen_generation, event.generation))
    if node is not None and node.incarnation == event.incarnation and node.state not in GONE:
        _rejoined(turn, node, event)
        return
    lost_workers = node is not None and is_needed(turn, node)
    node = _welcome(turn, node, event)
    turn.say(Reason.NODE_IS_SPARE, node=node.id, incarnation=node.incarnation, workers=node.workers)
    if turn.job.phase in OVER:
        gen.tell_to_end(turn, node)
        turn.say(turn.job.end_reason or Reason.JOB_FINISHED)
    elif lost_workers:
        gen.broken(turn, Reason.NODE_RESTARTED, cause=Cause.NODE_LOST, node=node.id)
    elif turn.job.phase is JobPhase.WAITING:
        gen.consider(turn)
    has_workers = event.phase in (AgentPhase.PREPARED, AgentPhase.RUNNING)
    if node.state is NodeState.SPARE and has_workers and event.generation <= turn.job.generation:
        clean_spare(turn, node)


def _welcome(turn: Turn, node: NodeRecord | None, event: NodeJoined) -> NodeRecord:
    """A node that is new, starts anew, or is back from the lost: its record, as a spare."""
    if node is None:
        node = NodeRecord(
            id=event.node,
            incarnation=event.incarnation,
            address=event.address,
            workers=event.workers,
            saver_address=event.saver_address,
            wanted_node_rank=event.wanted_node_rank,
            order=turn.job.arrivals,
        )
        turn.state.nodes[event.node] = node
        turn.job.arrivals += 1
    else:
        turn.move_node(node, NodeTrigger.JOINED)
        if node.incarnation != event.incarnation:
            node.retired = (*node.retired, node.incarnation)[-RETIRED_INCARNATIONS_MAX:]
            node.incarnation = event.incarnation
        node.workers = event.workers
        node.wanted_node_rank = event.wanted_node_rank
        node.end_code = None
        _refresh(node, event)
    turn.state.touch(node)
    return node


def _refresh(node: NodeRecord, event: NodeJoined) -> None:
    node.address, node.saver_address, node.suspect = event.address, event.saver_address, False


def _rejoined(turn: Turn, node: NodeRecord, event: NodeJoined) -> None:
    if node.workers != event.workers:
        detail = f"{event.workers} workers, {node.workers} before, in one life"
        raise IllegalEvent(node.state, "NodeJoined", f"node {node.id}", detail)
    _refresh(node, event)
    turn.state.touch(node)
    turn.say(Reason.RESENT, node=node.id, state=node.state.value)
    gen.resend(turn, node)


def gone(turn: Turn, event: NodeLeft | NodeDied) -> None:
    """A node said goodbye or was given up."""
    node = known(turn, event)
    if node is None:
        return
    left = isinstance(event, NodeLeft)
    lost_workers = is_needed(turn, node)
    turn.move_node(node, NodeTrigger.LEFT if left else NodeTrigger.DIED)
    node.suspect = False
    reason = Reason.NODE_LEFT if left else Reason.NODE_LOST
    turn.say(reason, node=node.id, node_rank=node.node_rank)
    if isinstance(event, NodeDied):
        turn.say(reason, silent_s=event.silent_s)
    if lost_workers:
        gen.broken(turn, reason, cause=Cause.NODE_LOST, node=node.id)
    elif turn.job.phase is JobPhase.WAITING:
        gen.consider(turn)
        turn.say(reason)
    elif turn.job.phase is JobPhase.ENDING and gen.all_gone(turn):
        turn.move_job(JobTrigger.EMPTY)
        turn.cancel_timers(TimerKind.DRAIN)


def suspicion(turn: Turn, event: NodeSuspected | NodeRecovered) -> None:
    """The detector's first verdict and its withdrawal: nothing is done yet, but a suspect is chosen last."""
    node = known(turn, event)
    if node is None:
        return
    silent = isinstance(event, NodeSuspected)
    suspect = move_suspicion(node.suspect, SuspicionTrigger.SILENT if silent else SuspicionTrigger.HEARD)
    if suspect == node.suspect:
        return
    node.suspect = suspect
    turn.state.touch(node)
    reason = Reason.NODE_SUSPECT if suspect else Reason.NODE_HEARD_AGAIN
    turn.say(reason, node=node.id, silent_s=event.silent_s)
    if not silent and turn.job.phase is JobPhase.RUNNING and turn.is_member(node.id):
        # While it was silent it could not be asked.
        turn.send(CheckNode(node=node.id, generation=node.generation, why=Suspicion.SILENCE))


def prepared(turn: Turn, event: NodePrepared) -> None:
    """A node is clean. The last member to say so starts the generation."""
    node = known(turn, event)
    if node is None:
        return
    if node.state is NodeState.ASIDE and event.generation == node.generation:
        turn.move_node(node, NodeTrigger.PREPARED)
        turn.say(Reason.NODE_IS_SPARE, node=node.id)
        if turn.job.phase is JobPhase.WAITING:
            gen.consider(turn)
        return
    node = current(turn, event)
    if node is None or node.state in _HAS_SAID_PREPARED:
        return
    turn.move_node(node, NodeTrigger.PREPARED)
    node.port = event.rendezvous_port
    if turn.job.phase is JobPhase.RUNNING and node.state is NodeState.PREPARED:
        units.start(turn, node)
        return
    turn.job.awaited.discard(node.id)
    turn.say(Reason.NODE_PREPARED, node=node.id, generation=event.generation, awaited=len(turn.job.awaited))
    if turn.job.phase is JobPhase.PREPARING and not turn.job.awaited:
        gen.start(turn)


def failed(turn: Turn, event: NodeFailed) -> None:
    """A node could not do what it was told. It is tried again, last of all, before it is set aside.

    What fails on many nodes in the same way is held against none of them.
    """
    node = current(turn, event)
    if node is None or node.failed_generation == event.generation:
        return
    turn.legal(node, NodeTrigger.SET_ASIDE)
    node.failed_generation = event.generation
    needed = is_needed(turn, node)
    commoncause.note(turn, node, event)
    same = commoncause.bearers(turn, node)
    if same:
        commoncause.acquit(turn, same)
    else:
        node.strikes += 1
        if node.strikes >= turn.policy.node_strikes_max:
            turn.move_node(node, NodeTrigger.SET_ASIDE)
    turn.say(Reason.NODE_FAILED, node=node.id, what=event.what, strikes=node.strikes)
    turn.say(Reason.NODE_FAILED, same_fault=len(same) or None)
    if needed:
        gen.broken(turn, Reason.NODE_FAILED, cause=Cause.NODE_FAILED, node=node.id)
    elif turn.job.phase is JobPhase.WAITING:
        gen.consider(turn)
        turn.say(Reason.NODE_FAILED)


def checked(turn: Turn, event: NodeChecked) -> None:
    """What was found where a suspicion fell: written down. A node that must not go on says so itself."""
    node = known(turn, event)
    if node is not None:
        found = ", ".join(event.findings) or "nothing found"
        turn.say(Reason.NODE_CHECKED, node=node.id, why=event.why.value, looked=event.looked, found=found)


def members_late(turn: Turn) -> None:
    """The time to prepare or to start is over: members that have not answered are set aside."""
    preparing = turn.job.phase is JobPhase.PREPARING
    late = [node for node in turn.members() if node.id in turn.job.awaited]
    for node in late:
        node.strikes += 1
        turn.move_node(node, NodeTrigger.SET_ASIDE)
    reason = Reason.PREPARE_TIMED_OUT if preparing else Reason.START_TIMED_OUT
    turn.say(reason, late=len(late), node=late[0].id)
    gen.broken(turn, reason, cause=Cause.NODE_FAILED, node=late[0].id)


def unit_late(turn: Turn) -> None:
    """A node that starts again beside the others has not answered in time: it is set aside.

    Each is an event of its own; where several are late, the timer is over again at once.
    """
    node = units.next_late(turn)
    if node is not None:
        preparing = node.state is NodeState.PREPARING
        node.strikes += 1
        turn.move_node(node, NodeTrigger.SET_ASIDE)
        reason = Reason.PREPARE_TIMED_OUT if preparing else Reason.START_TIMED_OUT
        turn.say(reason, late=1, node=node.id)
        gen.broken(turn, reason, cause=Cause.NODE_FAILED, node=node.id)
    if turn.job.phase is JobPhase.RUNNING:
        units.arm(turn)


def stop_requested(turn: Turn, event: StopRequested) -> None:
    """Somebody asked for the end. A scheduler that takes a spare back does not end the job."""
    node = known(turn, event)
    if node is None or turn.job.phase in OVER:
        return
    preempted = event.kind is StopKind.PREEMPTION
    code = EXIT_PREEMPTED if preempted else EXIT_INTERRUPTED
    turn.say(Reason.STOP_REQUESTED, node=node.id, signal=event.signal, kind=event.kind.value)
    outside = turn.job.phase in LIVE_PHASES and not turn.is_member(node.id)
    if preempted and outside:
        gen.tell_to_end(turn, node, exit_code=code)
    else:
        gen.end_job(turn, code, Reason.STOP_REQUESTED)
