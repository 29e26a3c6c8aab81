"""What single nodes are told, and what is noted about it: the parts that generations and units share."""

from __future__ import annotations

from aimaster.core.commands import Prepare, Reason, StartWorkers
from aimaster.core.state import NodeRecord, NodeState
from aimaster.core.transitions import NodeTrigger
from aimaster.core.turn import Turn
from aimaster.ids import Generation


def next_generation(turn: Turn) -> Generation:
    """Raise the generation: whatever still comes from the old one is known as old."""
    turn.job.generation = Generation(max(turn.job.generation, turn.job.seen_generation) + 1)
    return turn.job.generation


def tell_to_prepare(turn: Turn, node: NodeRecord, reason: Reason) -> None:
    """Tell a node to stop what runs and to get ready for the newest generation."""
    node.generation = turn.job.generation
    node.port = 0
    turn.move_node(node, NodeTrigger.PREPARE)
    turn.send(Prepare(node=node.id, generation=node.generation, reason=reason))


def release(turn: Turn, node: NodeRecord) -> None:
    """Let a node go without a seat; what it ran is stopped."""
    if node.state is NodeState.SPARE:
        return
    turn.move_node(node, NodeTrigger.RELEASE)
    clean_spare(turn, node)


def clean_spare(turn: Turn, node: NodeRecord) -> None:
    """Make a node that may still run workers of an old generation stop them."""
    node.generation = turn.job.generation
    turn.state.touch(node)
    turn.send(Prepare(node=node.id, generation=node.generation, reason=Reason.NODE_IS_SPARE))


def start_command(turn: Turn, node: NodeRecord, *, lead: NodeRecord, again: bool = False) -> StartWorkers:
    """What a member needs to start its workers; `again` when it was already counted as a start.

    Where a node's workers may be started again alone, it leads itself: its workers meet at its own address
    and its saver commits alone, so that no other node's end touches them.
    """
    job, unit = turn.job, node.unit
    if turn.by_node:
        lead = node
    attempt = job.starts - 1 if again else job.starts
    return StartWorkers(
        node=node.id,
        generation=node.generation,
        attempt=unit.attempt if again and unit is not None else attempt,
        node_rank=node.node_rank,
        nodes=len(job.members),
        first_rank=node.first_rank,
        world_size=job.world_size,
        master_addr=lead.address,
        master_port=lead.port,
        saver_lead=lead.saver_address,
        progress_expected=unit.expected if unit is not None else job.progress_expected,
        restore_below=job.history.below,
    )
