"""Which node gets which ranks.

Stable for survivors: who was a member of the last generation keeps its node rank, so that its checkpoint
pieces in memory stay where they are needed. A replacement takes the place of the one that was lost. Only
when the job shrinks do the highest ranks move down into the holes. Ranks are counted through in order of
node rank, so nodes may have different numbers of workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aimaster.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A node's place in a generation."""

    node: NodeId
    node_rank: int
    first_rank: int
    workers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Guest:
    """A node that is to be placed."""

    node: NodeId
    workers: int
    wanted_node_rank: int | None


def place(guests: Sequence[Guest], previous: Mapping[NodeId, int]) -> tuple[Seat, ...]:
    """Give every guest a node rank and its ranks.

    Args:
        guests: all members of the generation, in order of arrival.
        previous: node ranks of the last generation; nodes that are not among the guests are ignored.

    Returns:
        Seats by node rank, which run from 0 without holes.
    """
    size = len(guests)
    seats: list[Guest | None] = [None] * size
    survivors = sorted((g for g in guests if g.node in previous), key=lambda g: previous[g.node])
    newcomers = [g for g in guests if g.node not in previous]
    homeless: list[Guest] = []
    for guest in survivors:
        rank = previous[guest.node]
        if rank < size and seats[rank] is None:
            seats[rank] = guest
        else:
            homeless.append(guest)
    without_wish: list[Guest] = []
    for guest in (*homeless, *newcomers):
        wish = guest.wanted_node_rank
        if wish is not None and 0 <= wish < size and seats[wish] is None:
            seats[wish] = guest
        else:
            without_wish.append(guest)
    rest = iter(without_wish)
    filled = [seat if seat is not None else next(rest) for seat in seats]
    placed: list[Seat] = []
    first_rank = 0
    for node_rank, guest in enumerate(filled):
        placed.append(
            Seat(node=guest.node, node_rank=node_rank, first_rank=first_rank, workers=guest.workers)
        )
        first_rank += guest.workers
    return tuple(placed)
