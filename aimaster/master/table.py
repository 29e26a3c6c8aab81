"""What heartbeats say, by node: never journalled, gone with the master, back one heartbeat later."""

from __future__ import annotations

from dataclasses import dataclass

from aimaster.core.events import AgentPhase
from aimaster.ids import Incarnation, NodeId
from aimaster.rpc.messages import Heartbeat, Hello, Identity, ProcessInfo, RankProgress


@dataclass(slots=True)
class NodeRow:
    """The newest that one node has said."""

    incarnation: Incarnation
    heard_s: float
    phase: AgentPhase
    processes: tuple[ProcessInfo, ...] = ()
    progress: tuple[RankProgress, ...] = ()
    notes: tuple[str, ...] = ()


class NodeTable:
    """One row per node that has spoken to this life of the master. A heartbeat costs constant time."""

    def __init__(self) -> None:
        self._rows: dict[NodeId, NodeRow] = {}

    def hello(self, identity: Identity, hello: Hello, *, now: float) -> None:
        """A node joined: what it said before counts no more."""
        self._rows[identity.node] = NodeRow(
            incarnation=identity.incarnation,
            heard_s=now,
            phase=hello.phase,
            processes=hello.processes,
            notes=hello.notes,
        )

    def beat(self, identity: Identity, beat: Heartbeat, *, now: float) -> None:
        """A heartbeat of the life that said hello; another one's is dropped."""
        row = self._rows.get(identity.node)
        if row is None or row.incarnation != identity.incarnation:
            return
        row.heard_s = now
        row.phase = beat.phase
        row.progress = beat.progress
        if beat.processes is not None:
            row.processes, row.notes = beat.processes, beat.notes

    def row(self, node: NodeId, incarnation: Incarnation) -> NodeRow | None:
        """What that life of the node said."""
        row = self._rows.get(node)
        return row if row is not None and row.incarnation == incarnation else None

    def gone(self, node: NodeId, incarnation: Incarnation) -> None:
        """That life of the node has no processes any more, as far as anybody knows."""
        row = self.row(node, incarnation)
        if row is not None:
            row.processes, row.progress = (), ()
