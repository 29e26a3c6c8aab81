"""Which rank the others wait for, while the job steps: told from how little its main thread sleeps.

In a job whose ranks meet in collectives the fast ones sleep until the slow one comes. So it is counted how
much of the time each rank's main thread is *awake*: runs, or wants to run and is not let. The rank that is
awake while the others sleep is the one they wait for. That holds with no line changed in the script, and
whatever makes the rank slow: its own work, a slower processor, a neighbour on its core, a quota.

Counted over windows in which every rank stepped; an evaluation on one rank, a hang or a restart is no window.
A rank is named when it stands out in several windows in a row, against the median of the others and their
robust spread; a node, when its ranks do so together. When that is over, that is said too. Nobody is named
where all are equally slow, where everybody's work varies (the averages are alike then), or where ranks wait
without sleeping, as threads that spin do: there is nothing to be seen there.

Fed by heartbeats and scanned by the master's tick as `aimaster.core.hangwatch` is: pure, and no part of the
journal but for what it says.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aimaster.core.events import RankSlow
from aimaster.core.sights import Effort
from aimaster.ids import NO_GENERATION, Generation, NodeId

WINDOW_S = 10.0
"""Least length of a window, on the agents' clocks."""
STEPS_MIN = 20
"""Every rank has made so many when a window ends, so that of slow trainings it is not single steps."""
PAUSE_MAX = 0.25
"""A window in which some rank made no step for longer than that share of it is left out."""
IN_A_ROW = 4
"""So many windows say the same before it is said."""
STEADY_MIN = 0.5
"""The smallest gap of those windows, by the largest: what comes by chance varies more."""
GAP_MIN = 0.1
"""Of the time, that one is awake more than the others."""
RATIO_MIN = 1.2
"""So much longer it is awake than they."""
Z_MIN = 4.0
"""Robust standard deviations of the others."""
SPREAD_MIN = 0.02
"""Spread that is taken for granted: equal work never shows more equally than that."""
SECOND_MAX = 0.5
"""The next one stands out by at most so much of what the first one does, or nobody stands out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEffort:
    """One rank in one heartbeat."""

    rank: int
    steps: int
    effort: Effort


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    """One rank over one window, in parts of the time."""

    awake: float
    running: float


@dataclass(slots=True)
class _Rank:
    node: NodeId
    begin: RankEffort
    newest: RankEffort
    moved_s: float
    """When the newest step was first told of."""
    pause_s: float = 0.0
    """The longest time without a step in this window."""

    def take(self, now: RankEffort) -> None:
        if now.steps != self.newest.steps:
            self.moved_s = now.effort.at_s
        else:  # between two reports with steps there is no telling; with seldom ones it is long
            self.pause_s = max(self.pause_s, now.effort.at_s - self.moved_s)
        self.newest = now

    def begin_window(self) -> None:
        self.begin, self.pause_s = self.newest, 0.0

    @property
    def seconds(self) -> float:
        return self.newest.effort.at_s - self.begin.effort.at_s

    @property
    def steps(self) -> int:
        return self.newest.steps - self.begin.steps

    def share(self) -> _Share:
        first, last = self.begin.effort, self.newest.effort
        return _Share(
            awake=min(1.0, max(0.0, (last.awake_s - first.awake_s) / self.seconds)),
            running=min(1.0, max(0.0, (last.running_s - first.running_s) / self.seconds)),
        )


@dataclass(frozen=True, slots=True)
class Standout:
    """Who the others wait for, in one window."""

    unit: tuple[int, ...]
    """The rank; the ranks of a node that stand out together."""
    awake: float
    """Of the time, on average over the unit."""
    running: float
    others: float
    """Median over the others."""

    @property
    def gap(self) -> float:
        """By how much it stands out."""
        return self.awake - self.others


@dataclass(slots=True)
class _Attempt:
    generation: Generation = NO_GENERATION
    ranks: dict[int, _Rank] = field(default_factory=dict)
    said: deque[Standout | None] = field(default_factory=lambda: deque(maxlen=IN_A_ROW))
    named: Standout | None = None


class SlowWatch:
    """One job's slow ranks. Not thread-safe: one owner calls it."""

    def __init__(self) -> None:
        self._attempt = _Attempt()

    @property
    def named(self) -> Standout | None:
        """Whom the others wait for at the moment, as far as it was said."""
        return self._attempt.named

    def take(self, node: NodeId, generation: Generation, ranks: Sequence[RankEffort]) -> None:
        """One heartbeat of a node. One of an older generation changes nothing."""
        if generation < self._attempt.generation:
            return
        if generation > self._attempt.generation:
            self._attempt = _Attempt(generation=generation)
        for one in ranks:
            known = self._attempt.ranks.get(one.rank)
            if known is None or known.node != node or _went_back(known.newest, one):
                self._attempt.ranks[one.rank] = _Rank(node, one, one, moved_s=one.effort.at_s)
            else:
                known.take(one)

    def look(self, generation: Generation, world_size: int) -> RankSlow | None:
        """Close the window if it is over; what there is to say of it, which is said once.

        Args:
            generation: whose workers run.
            world_size: how many ranks must be known of.
        """
        attempt = self._attempt
        if generation != attempt.generation or len(attempt.ranks) < max(2, world_size):
            return None
        ranks = attempt.ranks
        if any(rank.seconds < WINDOW_S or rank.steps < STEPS_MIN for rank in ranks.values()):
            return None
        paused = any(rank.pause_s > PAUSE_MAX * rank.seconds for rank in ranks.values())
        shares = {name: rank.share() for name, rank in ranks.items()}
        for rank in ranks.values():
            rank.begin_window()
        if paused:
            return None
        attempt.said.append(standout(shares, {name: rank.node for name, rank in ranks.items()}))
        return self._change()

    def _change(self) -> RankSlow | None:
        """What the windows in a row say that was not said before."""
        attempt = self._attempt
        units = {None if one is None else one.unit for one in attempt.said}
        before = attempt.named
        if len(attempt.said) < IN_A_ROW:
            return None
        newest = attempt.said[-1]
        if len(units) == 1 and newest is not None and (before is None or before.unit != newest.unit):
            gaps = [one.gap for one in attempt.said if one is not None]
            if min(gaps) < STEADY_MIN * max(gaps):
                return None
            attempt.named = newest
            return self._event(newest, over=False)
        if before is not None and before.unit not in units:
            attempt.named = None
            return self._event(before, over=True)
        return None

    def _event(self, found: Standout, *, over: bool) -> RankSlow:
        return RankSlow(
            generation=self._attempt.generation,
            node=self._attempt.ranks[found.unit[0]].node,
            ranks=found.unit,
            awake=round(found.awake, 3),
            running=round(found.running, 3),
            others_awake=round(found.others, 3),
            over=over,
        )


def standout(shares: Mapping[int, _Share], nodes: Mapping[int, NodeId]) -> Standout | None:
    """The rank that is awake while the others sleep, or the node whose ranks are."""
    by_rank: dict[tuple[int, ...], list[int]] = {(rank,): [rank] for rank in shares}
    by_node: dict[NodeId, list[int]] = {}
    for rank in sorted(shares):
        by_node.setdefault(nodes[rank], []).append(rank)
    of_nodes = {tuple(ranks): ranks for ranks in by_node.values() if len(ranks) > 1}
    found = _outlier(by_rank, shares)
    if found is None and len(of_nodes) == len(by_node) > 1:
        found = _outlier(of_nodes, shares)
    return found


def _outlier(units: Mapping[tuple[int, ...], list[int]], shares: Mapping[int, _Share]) -> Standout | None:
    awake = {unit: statistics.fmean(shares[rank].awake for rank in ranks) for unit, ranks in units.items()}
    first, *others = sorted(awake, key=lambda unit: -awake[unit])
    levels = [awake[unit] for unit in others]
    middle = statistics.median(levels)
    spread = max(SPREAD_MIN, 1.4826 * statistics.median(abs(level - middle) for level in levels))
    gap = awake[first] - middle
    if gap < max(GAP_MIN, (RATIO_MIN - 1) * middle, Z_MIN * spread):
        return None
    if len(levels) > 1 and levels[0] - middle > SECOND_MAX * gap:
        return None
    running = statistics.fmean(shares[rank].running for rank in units[first])
    return Standout(unit=first, awake=awake[first], running=running, others=middle)


def _went_back(before: RankEffort, now: RankEffort) -> bool:
    """Whether another process has the rank now."""
    return now.steps < before.steps or now.effort.awake_s < before.effort.awake_s
