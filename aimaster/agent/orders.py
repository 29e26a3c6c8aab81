"""What the agent still has to do: the newest order wins.

Commands may come twice, late or while an older one is being carried out (after a cut, after a master's
restart). They are idempotent by generation, so the rule is short: an order of an older generation than the
newest seen is dropped, a newer `Prepare` replaces whatever still waits, and `EndNode` replaces everything and
is never replaced. Pure; the agent's loop carries the orders out one at a time.
"""

from __future__ import annotations

from aimaster.core.commands import Command, EndNode, Prepare, StartWorkers
from aimaster.ids import NO_GENERATION, Generation


class Orders:
    """The orders that wait, at most one `Prepare` and one `StartWorkers`, or one `EndNode`."""

    def __init__(self) -> None:
        self._waiting: list[Prepare | StartWorkers | EndNode] = []
        self.newest: Generation = NO_GENERATION
        """Highest generation that any order named."""
        self.ending = False
        """Whether an `EndNode` was seen: nothing is taken after it."""

    @property
    def waiting(self) -> bool:
        """Whether there is something to take: the newest order is not the one being carried out."""
        return bool(self._waiting)

    def give(self, command: Command) -> bool:
        """Take a command in.

        Returns:
            Whether it changes what the agent has to do.
        """
        if self.ending:
            return False
        if isinstance(command, EndNode):
            self.ending = True
            self._waiting = [command]
            return True
        if not isinstance(command, Prepare | StartWorkers) or command.generation < self.newest:
            return False
        self.newest = command.generation
        kept = [order for order in self._waiting if _still_counts(order, command)]
        if command in kept:
            return False
        self._waiting = [*kept, command]
        return True

    def take(self) -> Prepare | StartWorkers | EndNode | None:
        """The next order, or None if there is none."""
        return self._waiting.pop(0) if self._waiting else None


def _still_counts(waiting: Prepare | StartWorkers | EndNode, newer: Prepare | StartWorkers) -> bool:
    return not isinstance(waiting, EndNode) and waiting.generation == newer.generation
