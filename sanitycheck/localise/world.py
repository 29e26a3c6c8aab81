"""A fleet that is not there: nodes, links and faults, for proving the search and for comparing it.

A seed decides everything. A test's score is 1 for good, less for slow, with noise; None where it fails.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from sanitycheck.localise.evidence import Evidence, PairOutcome

__all__ = ["Fault", "World", "make_world"]

NOISE = 0.03
ALONE_TRIES = 3
DISTURBED = 0.005
"""Share of tests that something else slows down by up to a half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a node.

    Attributes:
        share: What is left of its speed in pairs; 0: it fails or hangs.
        alone_share: What is left of its speed alone.
        chance: How often the fault shows; below 1 it comes and goes.
    """

    share: float
    alone_share: float = 1.0
    chance: float = 1.0


@dataclass(slots=True, kw_only=True)
class World:
    """The fleet; asks its own random numbers, so that a run is repeatable."""

    nodes: tuple[str, ...]
    faults: dict[str, Fault] = field(default_factory=dict)
    links: frozenset[frozenset[str]] = frozenset()
    speed: float = 1.0
    rng: random.Random = field(default_factory=random.Random)

    def _noise(self) -> float:
        noise = 1.0 + NOISE * self.rng.gauss(0.0, 1.0)
        return noise * self.rng.uniform(0.5, 1.0) if self.rng.random() < DISTURBED else noise

    def _share(self, node: str, *, alone: bool = False) -> float:
        fault = self.faults.get(node)
        if fault is None or self.rng.random() >= fault.chance:
            return 1.0
        return fault.alone_share if alone else fault.share

    def alone(self) -> dict[str, float | None]:
        """Every node alone, the best of a few tries, as the checks do it."""
        scores: dict[str, float | None] = {}
        for node in self.nodes:
            tries = [self._share(node, alone=True) * self._noise() for _ in range(ALONE_TRIES)]
            scores[node] = max(tries) or None
        return scores

    def group(self, members: Sequence[str]) -> float | None:
        """A test of several nodes at once: as fast as the slowest, None if one fails."""
        share = min(self._share(node) for node in members)
        if len(members) == 2 and frozenset(members) in self.links:
            share = min(share, 0.3)
        return self.speed * share * self._noise() if share > 0 else None

    def round(self, pairs: Sequence[tuple[str, str]]) -> tuple[PairOutcome, ...]:
        """One round of disjoint pairs."""
        return tuple(
            PairOutcome(first=first, second=second, score=self.group((first, second)))
            for first, second in pairs
        )

    def start(self) -> Evidence:
        """The evidence that the search begins with."""
        return Evidence(nodes=self.nodes, alone=self.alone())


def make_world(
    count: int,
    *,
    seed: int,
    faulty_share: float = 0.01,
    rack: int = 0,
    intermittent: float = 0.0,
    bad_links: int = 0,
) -> World:
    """A fleet of ``count`` nodes.

    Args:
        count: Nodes.
        seed: Of everything.
        faulty_share: Share of nodes with a fault, at least one where it is above 0.
        rack: Nodes that share a switch; with it, faults come as whole racks until the share is reached.
        intermittent: Share of the faults that show in half of the tests only.
        bad_links: Pairs of good nodes whose way to each other is slow: half of them neighbours, half of them
            as far apart as can be, so that a search that starts with either meets some.
    """
    rng = random.Random(seed)
    nodes = tuple(f"n{number:05d}" for number in range(count))
    wanted = max(1, round(faulty_share * count)) if faulty_share > 0 else 0
    if rack and wanted:
        starts = list(range(0, count, rack))
        rng.shuffle(starts)
        chosen = [nodes[i] for start in starts for i in range(start, min(start + rack, count))][:wanted]
    else:
        chosen = rng.sample(nodes, wanted)
    faults: dict[str, Fault] = {}
    for node in chosen:
        share = 0.0 if rng.random() < 0.3 else rng.uniform(0.2, 0.65)
        alone = rng.uniform(0.3, 0.7) if rng.random() < 0.3 and not rack else 1.0
        chance = 0.5 if rng.random() < intermittent else 1.0
        faults[node] = Fault(share=share, alone_share=alone, chance=chance)
    links: set[frozenset[str]] = set()
    for place in rng.sample(range(count // 2), min(count // 2, 4 * bad_links)):
        near = (nodes[2 * place], nodes[2 * place + 1])
        far = (nodes[place], nodes[count - 1 - place])
        pair = near if len(links) % 2 else far
        if len(links) < bad_links and not set(pair) & set(faults) and len(set(pair)) == 2:
            links.add(frozenset(pair))
    return World(nodes=nodes, faults=faults, links=frozenset(links), rng=random.Random(seed + 1))
