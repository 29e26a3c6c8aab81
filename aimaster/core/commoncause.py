"""The same fault on many nodes is no node's fault: storage that all share, a bad setting, a wrong release.

A node that cannot do what it is told gets a strike, and is set aside when it has too many. Where the cause
is common, that would set aside one good node after the other until none is left. So each node keeps its
newest fault, as a mark of what it said; where at least `Policy.common_cause_nodes_min` nodes bear the same
mark within `Policy.common_cause_window_s`, nobody gets a strike for it, and those that were set aside for it
earlier are used again: the next generation asks them to prepare, as it asks everyone.

The job itself stays bounded: each broken preparation is charged to the budget of failed nodes as before.
A node that is late says nothing, so nothing is compared; it returns by itself when it is prepared.

A report of a generation that is over changes nothing, here as elsewhere. So of many nodes that fail at the
same moment only the first is heard, and one that is always first may be set aside before the others have
spoken: it is used again once they have.
"""

from __future__ import annotations

from aimaster.core.events import NodeFailed
from aimaster.core.state import NodeRecord, NodeState, fingerprint
from aimaster.core.transitions import NodeTrigger
from aimaster.core.turn import Turn


def mark(event: NodeFailed) -> str:
    """What was said, without what differs from node to node: its own name, and every word with a digit."""
    text = "".join(c if c.isalnum() or c in "-_." else " " for c in event.what)
    words = (word.strip(".") for word in text.split())
    kept = [word for word in words if word != event.node and not any(c.isdigit() for c in word)]
    return f"{fingerprint(' '.join(kept)):032x}"


def note(turn: Turn, node: NodeRecord, event: NodeFailed) -> None:
    """Keep a node's newest fault."""
    node.fault, node.fault_at_s = mark(event), turn.now
    turn.state.touch(node)


def bearers(turn: Turn, node: NodeRecord) -> list[NodeRecord]:
    """The nodes that show this node's fault, itself among them, where they are too many for a chance.

    Returns:
        The nodes by order of arrival; none where the fault is a single node's or that of a few.
    """
    since_s = turn.now - turn.policy.common_cause_window_s
    same = [n for n in turn.state.nodes.values() if n.fault == node.fault and n.fault_at_s >= since_s]
    return same if len(same) >= turn.policy.common_cause_nodes_min else []


def acquit(turn: Turn, nodes: list[NodeRecord]) -> None:
    """Forget the strikes of those that show a common fault; who was set aside for it is used again."""
    for node in nodes:
        node.strikes = 0
        turn.state.touch(node)
        if node.state is NodeState.ASIDE:
            turn.move_node(node, NodeTrigger.RELEASE)
