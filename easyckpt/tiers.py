"""Which step to restore, and from where each rank takes its piece. Pure: facts in, plan out.

A step that another number of ranks saved is restored too: its plan names, for each saved rank, everything
that can be had (`Plan.reshaped`); who needs which bytes of it is found later, by `easyckpt.catalog`.

A *candidate* is a step in memory (one generation's save) or a step that is visible on storage. It is *whole*
if every rank's piece is somewhere: in a saver's memory or on storage. Pieces of different origin
are used together only if they are proved to be of the same save: every piece in memory that storage also
has must have the digest that storage says. So a restore never mixes steps or generations, whatever survived.

A step of which pieces are lost can be restored all the same if ranks that had equal tensors have theirs
(`easyckpt.saver.shares.roster_of`): its tensors are all there. What is lost are the plain values of the ranks
in question (`Plan.lost`), which take another rank's, and begin their random numbers anew.

The newest step wins; of equal ones that of the higher generation; per rank the nearest tier: the memory of
the node where the rank runs, another node's memory, storage. A step that is not whole wins only over storage:
a whole one in memory is at most one save older, and training goes on from it bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from easyckpt.saver.peering import Source
from easyckpt.saver.protocol import Held, Key
from easyckpt.saver.shares import roster_of

__all__ = ["DISK", "MEMORY", "PEER", "OnDisk", "Plan", "choose"]

MEMORY, PEER, DISK = "memory", "peer", "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnDisk:
    """A step that storage shows."""

    step: int
    generation: int
    """Of the storage's count of lives, which is another one than the launcher's."""
    world_size: int
    digests: Mapping[int, str]
    """Rank → digest of its body; empty when they are not known, then the step stands for itself alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to restore."""

    step: int
    memory_key: Key | None
    """Of the pieces that come from memory; None when all come from storage."""
    on_disk: OnDisk | None
    """The step on storage that belongs to it, if any."""
    sources: tuple[Source, ...]
    """One per rank, by rank. If `reshaped`: of each saved rank all that can be had, memory first."""
    world_size: int
    """Number of ranks that saved the step."""
    reshaped: bool = False
    """Whether that was another number than now, or pieces are lost."""

    @property
    def lost(self) -> tuple[int, ...]:
        """Saved ranks whose pieces are nowhere; other ranks have equal tensors."""
        there = {source.rank for source in self.sources}
        return tuple(rank for rank in range(self.world_size) if rank not in there)

    def holders(self, nodes: int) -> tuple[tuple[int, ...], ...]:
        """By node: the saved ranks whose pieces it has in memory, each rank at one node only."""
        found: list[list[int]] = [[] for _ in range(nodes)]
        seen: set[int] = set()
        for source in self.sources:
            if source.tier != DISK and source.rank not in seen and source.node_rank < nodes:
                seen.add(source.rank)
                found[source.node_rank].append(source.rank)
        return tuple(map(tuple, found))

    @property
    def durable(self) -> bool:
        """Whether storage has all of the step."""
        return self.on_disk is not None


def choose(
    held: Mapping[int, Iterable[Held]],
    on_disk: Iterable[OnDisk],
    *,
    node_of_rank: Mapping[int, int],
    step: int | None = None,
    below: int | None = None,
    bad: frozenset[Source] = frozenset(),
) -> Plan | None:
    """The best plan, or None if no step is covered.

    Args:
        held: node rank → sealed pieces in its saver's memory.
        on_disk: steps that storage shows.
        node_of_rank: where each rank runs now; its length is the world size.
        step: only this step.
        below: only older steps than this one.
        bad: sources that were tried and failed.
    """

    def wanted(one: int) -> bool:
        return step in (None, one) and (below is None or one < below)

    world_size = len(node_of_rank)
    stored = [item for item in on_disk if wanted(item.step)]
    memory: dict[tuple[Key, int], dict[int, dict[int, str]]] = {}  # key, ranks → rank → node → digest
    pieces_of: dict[tuple[Key, int], list[tuple[int, Held]]] = {}
    for node, pieces in held.items():
        for piece in pieces:
            if wanted(piece.key.step):
                name = (piece.key, piece.world_size)
                memory.setdefault(name, {}).setdefault(piece.rank, {})[node] = piece.digest
                pieces_of.setdefault(name, []).append((node, piece))
    plans: list[Plan | None] = []
    covered: list[Plan | None] = []
    for (key, saved_ranks), ranks in memory.items():
        twins = [item for item in stored if item.world_size == saved_ranks]
        if saved_ranks == world_size:
            plan = _from_memory(key, ranks, twins, node_of_rank, bad)
        else:
            plan = _reshaped(key, ranks, twins, saved_ranks, bad)
        plans.append(plan)
        if plan is None:
            covered.append(_by_equals(key, pieces_of[key, saved_ranks], saved_ranks, bad))
    for item in stored:
        if item.world_size == world_size:
            plans.append(_from_disk(item, node_of_rank, bad))
        else:
            plans.append(_reshaped(None, {}, [item], item.world_size, bad))
    best = max((plan for plan in plans if plan is not None), key=_preference, default=None)
    instead = max((plan for plan in covered if plan is not None), key=_preference, default=None)
    if instead is None or (best is not None and (best.memory_key is not None or best.step >= instead.step)):
        return best
    return instead


def _preference(plan: Plan) -> tuple[int, int, int]:
    generation = plan.memory_key.generation if plan.memory_key is not None else -1
    stored = plan.on_disk.generation if plan.on_disk is not None else -1
    return (plan.step, generation, stored)


def _reshaped(
    key: Key | None,
    ranks: Mapping[int, Mapping[int, str]],
    stored: list[OnDisk],
    saved_ranks: int,
    bad: frozenset[Source],
) -> Plan | None:
    same = [item for item in stored if key is None or (item.step == key.step and _same_save(ranks, item))]
    twin = max(same, key=lambda item: item.generation, default=None)
    sources: list[Source] = []
    for rank in range(saved_ranks):
        options = [
            Source(rank=rank, tier=MEMORY, node_rank=node, digest=digest)
            for node, digest in sorted(ranks.get(rank, {}).items())
        ]
        if twin is not None and (key is None or rank in twin.digests):
            options.append(Source(rank=rank, tier=DISK, digest=twin.digests.get(rank, "")))
        usable = [option for option in options if option not in bad]
        if not usable:
            return None
        sources += usable
    if key is None and twin is None:
        return None
    step = key.step if key is not None else twin.step if twin is not None else 0
    return Plan(
        step=step,
        memory_key=key,
        on_disk=twin,
        sources=tuple(sources),
        world_size=saved_ranks,
        reshaped=True,
    )


def _by_equals(
    key: Key, pieces: list[tuple[int, Held]], saved_ranks: int, bad: frozenset[Source]
) -> Plan | None:
    """A step of which pieces are lost, if the tensors of all ranks are among those that are there."""
    there = {
        Source(rank=piece.rank, tier=MEMORY, node_rank=node, digest=piece.digest): piece
        for node, piece in pieces
    }
    usable = {
        source: piece for source, piece in there.items() if source not in bad and not _failed(source, bad)
    }
    roster = next((piece.roster for piece in there.values() if piece.roster), "")
    if not roster or roster_of(piece.data for piece in usable.values()) != roster:
        return None
    return Plan(
        step=key.step,
        memory_key=key,
        on_disk=None,
        sources=tuple(sorted(usable, key=lambda source: (source.rank, source.node_rank))),
        world_size=saved_ranks,
        reshaped=True,
    )


def _failed(source: Source, bad: frozenset[Source]) -> bool:
    """Whether it failed as the piece that a peer was to give."""
    return Source(rank=source.rank, tier=PEER, node_rank=source.node_rank, digest=source.digest) in bad


def _from_memory(
    key: Key,
    ranks: Mapping[int, Mapping[int, str]],
    stored: list[OnDisk],
    node_of_rank: Mapping[int, int],
    bad: frozenset[Source],
) -> Plan | None:
    same = [item for item in stored if item.step == key.step and _same_save(ranks, item)]
    twin = max(same, key=lambda item: item.generation, default=None)
    sources = []
    for rank, home in sorted(node_of_rank.items()):
        options = []
        for node, digest in sorted(ranks.get(rank, {}).items(), key=lambda item: (item[0] != home, item[0])):
            tier = MEMORY if node == home else PEER
            options.append(Source(rank=rank, tier=tier, node_rank=node, digest=digest))
        if twin is not None and rank in twin.digests:
            options.append(Source(rank=rank, tier=DISK, digest=twin.digests[rank]))
        usable = [option for option in options if option not in bad]
        if not usable:
            return None
        sources.append(usable[0])
    return Plan(
        step=key.step,
        memory_key=key,
        on_disk=twin,
        sources=tuple(sources),
        world_size=len(node_of_rank),
    )


def _same_save(ranks: Mapping[int, Mapping[int, str]], item: OnDisk) -> bool:
    """Whether memory and storage have at least one rank in common, and agree on all that they have in
    common."""
    common = [
        (rank, digest) for rank, nodes in ranks.items() for digest in nodes.values() if rank in item.digests
    ]
    return bool(common) and all(item.digests[rank] == digest for rank, digest in common)


def _from_disk(item: OnDisk, node_of_rank: Mapping[int, int], bad: frozenset[Source]) -> Plan | None:
    sources = tuple(
        Source(rank=rank, tier=DISK, digest=item.digests.get(rank, "")) for rank in sorted(node_of_rank)
    )
    if any(source in bad for source in sources):
        return None
    return Plan(step=item.step, memory_key=None, on_disk=item, sources=sources, world_size=len(node_of_rank))
