"""Who may still speak: the checks that every event about a node passes before it changes anything.

An event of an earlier life of the agent, of an older generation, or of a node that is gone is *stale*:
messages cross, so it is expected, said and ignored. An event of a node that never joined, or of a
generation that does not exist yet, is an error.
"""

from __future__ import annotations

from typing import Protocol

from aimaster.core.commands import Reason
from aimaster.core.events import NodeEvent
from aimaster.core.state import GONE, LIVE_PHASES, OVER, NodeRecord, NodeState
from aimaster.core.transitions import IllegalEvent
from aimaster.core.turn import Turn
from aimaster.ids import Generation, Incarnation, NodeId


class GenerationEvent(Protocol):
    """An event about a node in one generation."""

    @property
    def node(self) -> NodeId:
        """Whom it is about."""

    @property
    def incarnation(self) -> Incarnation:
        """Which life of its agent said it."""

    @property
    def generation(self) -> Generation:
        """To which generation it belongs."""


def stale(turn: Turn, event: NodeEvent | GenerationEvent) -> None:
    """Say that the event is too old to matter."""
    turn.say(Reason.STALE, node=event.node, event=type(event).__name__, generation=turn.job.generation)


def known(turn: Turn, event: NodeEvent | GenerationEvent) -> NodeRecord | None:
    """The record of the node that speaks, or None (and said) if this life of it is over.

    Raises:
        IllegalEvent: if no such node ever joined.
    """
    node = turn.state.nodes.get(event.node)
    if node is None:
        raise IllegalEvent(turn.job.phase, type(event).__name__, f"node {event.node}", "it never joined")
    if node.incarnation != event.incarnation or node.state in GONE:
        stale(turn, event)
        return None
    return node


def current(turn: Turn, event: GenerationEvent) -> NodeRecord | None:
    """Like `known`; None (and said) also if the generation, the node or the job is over.

    The generation of a node that was started again alone is newer than that of the others.

    Raises:
        IllegalEvent: if the generation does not exist yet.
    """
    node = known(turn, event)
    if node is None:
        return None
    if event.generation > turn.job.generation:
        detail = f"generation {event.generation} is not yet"
        raise IllegalEvent(node.state, type(event).__name__, f"node {node.id}", detail)
    old = event.generation < turn.generation_of(node)
    if old or turn.job.phase in OVER or node.state is NodeState.ENDING:
        stale(turn, event)
        return None
    return node


def is_needed(turn: Turn, node: NodeRecord) -> bool:
    """Whether the generation cannot go on without this node."""
    return (
        turn.job.phase in LIVE_PHASES
        and turn.is_member(node.id)
        and node.state not in GONE
        and node.state is not NodeState.FINISHED
    )
