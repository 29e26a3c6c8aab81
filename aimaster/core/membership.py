"""Who forms the next generation, or why there is none yet.

A pure function of the usable nodes, the job's size and whether the last call is over:

- the maximum is there: form at once, with the best of them; the rest are spares. More agents than the maximum
  never close, delay or break anything;
- the minimum is there: give the others a last call, then form with what came. A job that broke and still has
  its minimum does not wait: it runs on smaller rather than not at all;
- fewer: wait. Waiting for capacity is charged to nobody.

Best first: trusted before suspect, fewer strikes, members of the last generation, then order of arrival.
A suspect is taken before the job shrinks, because its silence is settled within seconds either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from aimaster.core.state import NodeRecord
from aimaster.ids import NodeId


class Readiness(Enum):
    """Whether a generation can be formed."""

    FORM = "form"
    LAST_CALL = "last_call"
    SHORT = "short"


def readiness(usable: int, *, min_nodes: int, max_nodes: int, last_call_over: bool) -> Readiness:
    """What `usable` nodes are enough for. Constant time, for a burst of arrivals."""
    if usable >= max_nodes:
        return Readiness.FORM
    if usable < min_nodes:
        return Readiness.SHORT
    return Readiness.FORM if last_call_over else Readiness.LAST_CALL


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The nodes of a new generation in order of arrival, and those that it does without."""

    members: tuple[NodeRecord, ...]
    left_out: tuple[NodeRecord, ...]


def choose(usable: Iterable[NodeRecord], *, seats: Mapping[NodeId, int], max_nodes: int) -> Choice:
    """Take the best nodes, at most `max_nodes`.

    Args:
        usable: nodes that can be members.
        seats: node ranks of the last generation: its members come before others.
        max_nodes: the job's maximum.
    """

    def merit(node: NodeRecord) -> tuple[bool, int, bool, int]:
        return (node.suspect, node.strikes, node.id not in seats, node.order)

    ranked = sorted(usable, key=merit)
    members = sorted(ranked[:max_nodes], key=lambda node: node.order)
    return Choice(members=tuple(members), left_out=tuple(ranked[max_nodes:]))
