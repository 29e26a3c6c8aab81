"""Which ranks hold equal bytes, and which of them stores these for all. Pure.

With data parallelism many ranks have the same weights and the same optimizer state; only their plain state
(of random numbers, say) is their own. Nothing is guessed from how a job is set up: each seal comes with a
digest of everything before the plain state, and ranks of equal digests are a group. One of the group, chosen
by the digest so that the load goes round, writes its body; the others write their plain state and refer to it
(`easyckpt.piece.Extent`). The same bytes give the same choice, however often a step is tried.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from easyckpt.digest import bytes_digest
from easyckpt.saver.peering import Sealed, Share

__all__ = ["Shares", "roster_of"]

STEPS_KEPT = 8
"""Steps whose seals are remembered: those in slots, and those that are tried again."""

_LOG = logging.getLogger("easyckpt.saver")


def roster_of(datas: Iterable[str]) -> str:
    """One digest for the data of all ranks, each value once.

    Who has the pieces of a few ranks, and the roster of their step, knows whether all tensors of all ranks
    are among them: then the roster of what is there is the step's. Which rank had what need not be known.
    """
    return bytes_digest(" ".join(sorted(set(datas))).encode())


class Shares:
    """The seals of the newest steps. Used by the lead."""

    def __init__(self) -> None:
        self._steps: OrderedDict[int, dict[int, Sealed]] = OrderedDict()
        self._said = False

    def sealed(self, message: Sealed) -> None:
        """A rank's seal."""
        self._steps.setdefault(message.step, {})[message.rank] = message
        while len(self._steps) > STEPS_KEPT:
            self._steps.popitem(last=False)

    def forget(self) -> None:
        """History was cut: a step of the same number may be saved again, with other bytes."""
        self._steps.clear()

    def roster(self, step: int, world_size: int) -> str:
        """See `easyckpt.saver.protocol.Held`."""
        datas = [seal.data for seal in self._steps.get(step, {}).values()]
        known = len(datas) == world_size and all(datas)
        return roster_of(datas) if known and len(set(datas)) < world_size else ""

    def of(self, step: int, node_of_rank: Mapping[int, int]) -> tuple[Share, ...]:
        """Who stores whose bytes; ranks that are not named store their own."""
        groups: dict[str, list[int]] = {}
        seals = self._steps.get(step, {})
        for rank, seal in sorted(seals.items()):
            if seal.data and rank in node_of_rank:
                groups.setdefault(seal.data, []).append(rank)
        self._say_if_replicas_differ(seals)
        shares = []
        for data, ranks in groups.items():
            writer = ranks[int(data[:8], 16) % len(ranks)]
            shares += [
                Share(rank=rank, by_rank=writer, by_node=node_of_rank[writer])
                for rank in ranks
                if rank != writer
            ]
        return tuple(sorted(shares, key=lambda share: share.rank))

    def _say_if_replicas_differ(self, seals: Mapping[int, Sealed]) -> None:
        first: dict[str, Sealed] = {}
        for seal in seals.values():
            other = first.setdefault(seal.layout, seal)
            if seal.layout and seal.data != other.data and not self._said:
                self._said = True
                _LOG.info(
                    "ranks %d and %d have the same tensors with other values: each is stored",
                    other.rank,
                    seal.rank,
                )
