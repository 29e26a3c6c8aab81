"""Keeps what heartbeats say about ranks, and asks `aimaster.core.hang` for a verdict when nobody steps.

As the failure detector it is fed by beats and scanned by the master's tick, is no part of the journal, and
speaks by one event. While any rank of the job steps, a scan costs constant time and a beat costs time by the
ranks of its node.

Times between steps are taken from the agents' observed clocks, which stand still while their machine does, so
neither a paused machine, nor a late master, nor a clock that was set changes a limit. What was learnt of the
pace belongs to the job and outlives an attempt; everything else belongs to one generation and one life of an
agent, so that nothing that an earlier life left behind can end a later one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aimaster.core.events import HangKind, WorkersHung
from aimaster.core.hang import Blind, Hang, HangConfig, Limits, Pace, judge, limits
from aimaster.core.sights import RankReport
from aimaster.ids import NO_GENERATION, Generation, Incarnation, NodeId

STEP_TIMES_MAX = 512
"""How many of the newest measurements the quantile is taken of; each stands for one step or several."""
USUAL, QUANTILE = 0.9, 0.99
"""Of step times: see `aimaster.core.hang`."""
OUTLIER_OF = 20
"""With so many step times the longest is left out, whatever the quantile says: it may be an evaluation."""
REPORT_AGE_S_MAX = 4.0
"""A node that was not heard for longer gives no evidence; the failure detector deals with it."""

DEBUGGER_HOLD_S = 60.0
"""So long after a debugger was seen nobody is judged: one look may have missed it, and people pause."""


class PaceMeter:
    """Measures the time between steps of one rank, the same one as long as it reports."""

    def __init__(self, *, ever_stepped: bool = False) -> None:
        self._times: deque[tuple[float, int]] = deque(maxlen=STEP_TIMES_MAX)
        self._steps = 0
        self._longest_s = 0.0
        self._ever = ever_stepped
        self._last: tuple[object, int, float] | None = None
        """Of whom, how many steps, and when the newest one was, on the agent's observed clock."""
        self._waited_s = 0.0

    def take(self, who: object, report: RankReport, *, clock_s: float) -> None:
        """One report of the rank that is measured; `who` names its life."""
        self._ever = self._ever or report.steps > 0
        beat_s = clock_s - report.sight.still_s
        last = self._last
        if last is None or last[0] != who or report.steps < last[1]:
            self._last, self._waited_s = (who, report.steps, beat_s), 0.0
            return
        if report.steps == last[1]:
            self._waited_s = max(self._waited_s, report.sight.still_s)
            return
        if last[1] > 0:  # the time until the first step is no time between steps
            count = report.steps - last[1]
            mean_s = max((beat_s - last[2]) / count, 0.0)
            # What it was seen to wait is a lower bound of the longest of these gaps.
            gap_s = max(mean_s, self._waited_s)
            self._times.append((gap_s, 1))
            if count > 1:
                self._times.append((mean_s, count - 1))
            self._steps += count
            self._longest_s = max(self._longest_s, gap_s)
        self._last, self._waited_s = (who, report.steps, beat_s), 0.0

    def pace(self) -> Pace:
        """What is known; costs time by the number of samples."""
        return Pace(
            samples=self._steps,
            usual_s=_quantile(self._times, USUAL),
            quantile_s=_quantile(self._times, QUANTILE),
            longest_gap_s=self._longest_s,
            ever_stepped=self._ever,
        )


def _quantile(times: Iterable[tuple[float, int]], quantile: float) -> float:
    """A quantile of step times with weights; of twenty or more the longest one never counts."""
    ordered = sorted(times, reverse=True)
    total = sum(count for _, count in ordered)
    left_out = max(int((1.0 - quantile) * total), 1 if total >= OUTLIER_OF else 0)
    for time_s, count in ordered:
        left_out -= count
        if left_out < 0:
            return time_s
    return 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """All that one heartbeat says about its node's ranks."""

    node: NodeId
    incarnation: Incarnation
    generation: Generation
    ranks: tuple[RankReport, ...]
    clock_s: float
    """The agent's observed clock."""
    world_size: int = 0
    """As the ranks themselves were told by another launcher; 0: the generation's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roster:
    """Who must be heard of before anybody is judged."""

    generation: Generation
    nodes: Mapping[NodeId, Incarnation]
    """Members, the first one first."""
    finished: frozenset[NodeId]
    """Members whose workers have all ended well."""
    suspect: tuple[NodeId, ...]
    world_size: int


@dataclass(slots=True)
class _Heard:
    report: NodeReport
    at_s: float


@dataclass(slots=True)
class _Attempt:
    """What belongs to one generation."""

    generation: Generation = NO_GENERATION
    heard: dict[NodeId, _Heard] = field(default_factory=dict)
    moved_s: float = 0.0
    """When the newest step was made, on the master's clock."""
    stepped: bool = False
    newest_step: int | None = None
    """As the training counts."""
    judged: bool = False
    debugged_s: float | None = None
    """When a rank was last seen under a debugger."""


class HangWatch:
    """One job's hang detection. Not thread-safe: one owner calls it, with a clock that never goes back."""

    def __init__(self, config: HangConfig | None = None, *, ever_stepped: bool = False) -> None:
        self.config = config if config is not None else HangConfig()
        self.blind = ""
        """Why no verdict is given at the moment; empty where nothing is in the way."""
        self._meter = PaceMeter(ever_stepped=ever_stepped)
        self._attempt = _Attempt()

    def take(self, report: NodeReport, now: float) -> None:
        """One heartbeat. One of an older generation changes nothing."""
        attempt = self._attempt
        if report.generation < attempt.generation or not report.ranks:
            return
        if report.generation > attempt.generation:
            attempt = self._attempt = _Attempt(generation=report.generation, moved_s=now)
            self.blind = ""
        before = attempt.heard.get(report.node)
        attempt.heard[report.node] = _Heard(report, now)
        known = {r.rank: r.steps for r in before.report.ranks} if before else {}
        for rank in report.ranks:
            if rank.steps != known.get(rank.rank, 0):
                attempt.moved_s = max(attempt.moved_s, now - rank.sight.still_s)
                attempt.stepped = attempt.stepped or rank.steps > 0
                attempt.debugged_s = None
            if rank.step is not None:
                attempt.newest_step = max(attempt.newest_step or 0, rank.step)
        if report.node == next(iter(attempt.heard)):
            first = min(report.ranks, key=lambda r: r.rank)
            who = (report.node, report.incarnation, report.generation, first.rank)
            self._meter.take(who, first, clock_s=report.clock_s)

    def due(self, now: float) -> bool:
        """Whether nobody has stepped for so long that a look is worth its time."""
        attempt = self._attempt
        if not (self.config.enabled and attempt.heard) or attempt.judged:
            return False
        if now - attempt.moved_s >= self.config.floor_s:
            return True
        self.blind = ""
        return False

    def look(self, roster: Roster, now: float) -> WorkersHung | None:
        """The verdict on a generation whose ranks stand still; said once per generation."""
        attempt = self._attempt
        if roster.generation != attempt.generation or attempt.judged:
            return None
        found = self._judge(roster, now)
        self.blind = found.why if isinstance(found, Blind) else ""
        if not isinstance(found, Hang):
            return None
        attempt.judged = True
        return WorkersHung(
            generation=attempt.generation,
            kind=found.kind,
            node=self._home(found.culprits, roster),
            culprits=found.culprits,
            stalled_s=round(found.stalled_s, 3),
            limit_s=round(found.limit_s, 3),
            step=attempt.newest_step,
            groups=found.groups,
        )

    def limits(self) -> Limits:
        """The limits in force."""
        return limits(self.config, self._meter.pace(), stepped=self._attempt.stepped)

    def pace(self) -> Pace:
        """What was learnt of the job's step times."""
        return self._meter.pace()

    def _judge(self, roster: Roster, now: float) -> Hang | Blind | None:
        attempt = self._attempt
        if roster.suspect:
            return Blind(why=f"node {roster.suspect[0]} is silent")
        ranks: list[RankReport] = []
        world = roster.world_size
        for node, incarnation in roster.nodes.items():
            heard = attempt.heard.get(node)
            if heard is None or heard.report.incarnation != incarnation:
                if node in roster.finished:
                    continue
                return Blind(why=f"node {node} has not told of its ranks yet")
            if now - heard.at_s > REPORT_AGE_S_MAX:
                return Blind(why=f"node {node} was not heard for {now - heard.at_s:.0f} s")
            ranks += heard.report.ranks
            world = heard.report.world_size or world
        found = judge(ranks, config=self.config, pace=self._meter.pace(), stepped=attempt.stepped)
        if isinstance(found, Blind):
            attempt.debugged_s = now
        elif attempt.debugged_s is not None and now - attempt.debugged_s < DEBUGGER_HOLD_S:
            return Blind(why="a rank was under a debugger a moment ago")
        if isinstance(found, Hang) and found.kind is HangKind.DEADLOCK and len(ranks) < world:
            return Blind(why=f"only {len(ranks)} of {world} ranks can be seen")
        return found

    def _home(self, culprits: Sequence[int], roster: Roster) -> NodeId:
        for node in roster.nodes:
            heard = self._attempt.heard.get(node)
            if culprits and heard and any(r.rank == culprits[0] for r in heard.report.ranks):
                return node
        return next(iter(roster.nodes))
