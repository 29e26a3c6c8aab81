"""Which facts of which agent were taken in, so that each is taken once.

A fact's number is accepted when it enters the queue and acknowledged when it is in the journal. The two
differ while it waits, and a fact that comes again meanwhile (over a new connection) is dropped, but not yet
acknowledged. After a restart both are what the journal holds.

Only the present life of each node is remembered: an earlier one has nothing to say any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from aimaster.core.events import Event, NodeEvent, NodeJoined
from aimaster.ids import Incarnation, NodeId


@dataclass(slots=True)
class _Taken:
    incarnation: Incarnation
    accepted: int = 0
    journalled: int = 0


class Intake:
    """One number per node. Not thread-safe."""

    def __init__(self) -> None:
        self._taken: dict[NodeId, _Taken] = {}

    def remember(self, event: Event) -> None:
        """What an earlier life of the master has journalled, in order."""
        if isinstance(event, NodeJoined):
            self.open(event.node, event.incarnation)
        elif isinstance(event, NodeEvent) and event.seq:
            self.accept(event.node, event.incarnation, seq=event.seq)
            self.journalled(event.node, event.incarnation, seq=event.seq)

    def open(self, node: NodeId, incarnation: Incarnation) -> None:
        """This life of the node has joined; facts of another one are not taken any more."""
        taken = self._taken.get(node)
        if taken is None or taken.incarnation != incarnation:
            self._taken[node] = _Taken(incarnation)

    def accept(self, node: NodeId, incarnation: Incarnation, *, seq: int) -> bool:
        """Whether the fact is new and of the present life; from now on it is not new."""
        taken = self._present(node, incarnation)
        if taken is None or seq <= taken.accepted:
            return False
        taken.accepted = seq
        return True

    def journalled(self, node: NodeId, incarnation: Incarnation, *, seq: int) -> None:
        """The fact is in the journal."""
        taken = self._present(node, incarnation)
        if taken is not None:
            taken.journalled = max(taken.journalled, seq)

    def acknowledged(self, node: NodeId, incarnation: Incarnation) -> int:
        """Highest number that is in the journal."""
        taken = self._present(node, incarnation)
        return 0 if taken is None else taken.journalled

    def _present(self, node: NodeId, incarnation: Incarnation) -> _Taken | None:
        taken = self._taken.get(node)
        return taken if taken is not None and taken.incarnation == incarnation else None
