"""Whether the job hangs, and by whose fault: a pure function of what was seen of each rank.

A hang is when no rank's step advances beyond a limit **and** a second witness agrees. Which limit counts
depends on what the witnesses say, since some waits cannot end by themselves and others are honest work:

=============  ==================================================================  =========================
kind           witness                                                             limit
=============  ==================================================================  =========================
stopped        a rank's processes are in state T                                   ``floor_s``
stuck          its own processes wait for each other for good (a data worker       max(floor, factor x u)
               whose every thread waits for a lock; the interpreter's lock held
               by a call that waits for another lock)
deadlock       every rank waits inside a collective and none uses a processor;     max(floor, factor x u)
               those that are not there have finished
busy           some rank does something else (computes, sleeps, moves bytes)       max(busy, busy factor x q,
               while nobody steps                                                  gap factor x longest gap)
exit hang      some ranks have finished; the others use no processor and move      ``exit_s``
               no byte
=============  ==================================================================  =========================

u is the usual step time, the 0.9 quantile of this job's own ones, and q the 0.99 quantile; the longest gap is
the longest that this job has come back from. In an evaluation or a save every hundred steps some rank is at
work, so these pauses count for work (q), not for what cannot end by itself (u). Before the first step of an
attempt nothing is known yet, so the limits are those of a start.

Nobody is judged while a rank is traced or at a debugger's prompt, while a rank was not heard of, or while the
node detector holds something against a node: `Blind` says why.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aimaster.core.events import HangKind, StackGroup
from aimaster.core.sights import STUCK, Activity, RankReport, Wait, WorkerPhase
from aimaster.core.stacks import GROUPS_MAX, fold, ranges

CULPRITS_MAX = 64
STILL_MOVING_S = 2.0
"""A rank whose bytes moved within so many seconds is at work, however long that takes."""
EVIDENCE_S = 1.0
"""The same wait must have been seen over at least so long: two looks, not one."""

_UNHURRIED = frozenset({WorkerPhase.SAVING, WorkerPhase.LOADING})


@dataclass(frozen=True, slots=True, kw_only=True)
class HangConfig:
    """Limits of hang detection. Those that are factors follow the job's own step times."""

    floor_s: float = 3.0
    factor: float = 10.0
    busy_s: float = 60.0
    """``--hang-busy-timeout``."""
    busy_factor: float = 20.0
    gap_factor: float = 3.0
    first_s: float = 30.0
    """Before the first step of an attempt: for what cannot end by itself."""
    start_s: float = 1800.0
    """Before the first step, while saving or loading, and while bytes move: for everything else."""
    exit_s: float = 600.0
    enabled: bool = True

    def __post_init__(self) -> None:
        times = (self.floor_s, self.busy_s, self.first_s, self.start_s, self.exit_s)
        if not all(math.isfinite(value) and value > 0 for value in times):
            raise ValueError(f"limits of hang detection must be above 0, got {self}")
        if not self.floor_s <= self.busy_s <= self.start_s:
            raise ValueError(
                f"need hang floor <= busy limit <= start limit, got {self.floor_s:g}, {self.busy_s:g}, "
                f"{self.start_s:g} s"
            )
        if min(self.factor, self.busy_factor, self.gap_factor) < 1:
            raise ValueError(f"factors of hang detection must be at least 1, got {self}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is known of this job's step times."""

    samples: int = 0
    """Steps that were measured, one by one or several at once."""
    usual_s: float = 0.0
    """The 0.9 quantile of the newest step times; 0 before there are any."""
    quantile_s: float = 0.0
    """The 0.99 quantile of them."""
    longest_gap_s: float = 0.0
    """The longest time between two steps that this job has come back from."""
    ever_stepped: bool = False


SAMPLES_MIN = 5
"""With fewer measured steps than that, limits are those of a start."""

SAMPLES_SURE = 100
UNSURE = 3.0
"""With fewer measured steps their quantile says little: the limit for work is so many times longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits in force."""

    stopped_s: float
    stuck_s: float
    busy_s: float | None
    """None: there is no such limit, since this job has never made a step."""
    exit_s: float


def limits(config: HangConfig, pace: Pace, *, stepped: bool) -> Limits:
    """The limits for a job of this pace.

    Args:
        config: As set.
        pace: As measured.
        stepped: Whether this attempt has made its first step.
    """
    known = pace.samples >= SAMPLES_MIN
    stuck_s = max(config.floor_s, config.factor * pace.usual_s)
    if not (known and stepped):
        stuck_s = max(stuck_s, config.first_s)
    unsure = 1.0 if pace.samples >= SAMPLES_SURE else UNSURE
    busy_s: float | None = max(
        config.busy_s, unsure * config.busy_factor * pace.quantile_s, config.gap_factor * pace.longest_gap_s
    )
    if not (known and stepped):
        busy_s = max(config.start_s, busy_s or 0.0) if pace.ever_stepped else None
    return Limits(stopped_s=config.floor_s, stuck_s=stuck_s, busy_s=busy_s, exit_s=config.exit_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """The verdict."""

    kind: HangKind
    culprits: tuple[int, ...]
    """Ranks, lowest first; empty where nobody can be blamed."""
    stalled_s: float
    limit_s: float
    groups: tuple[StackGroup, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blind:
    """No verdict is given at the moment, and why."""

    why: str


@dataclass(slots=True)
class _Look:
    """All ranks, sorted by what they do."""

    live: list[RankReport] = field(default_factory=list)
    ended: list[RankReport] = field(default_factory=list)
    stopped: list[RankReport] = field(default_factory=list)
    stuck: list[RankReport] = field(default_factory=list)
    waiting: list[RankReport] = field(default_factory=list)
    others: list[RankReport] = field(default_factory=list)


def judge(
    reports: Sequence[RankReport], *, config: HangConfig, pace: Pace, stepped: bool
) -> Hang | Blind | None:
    """The verdict on all ranks of a generation, each as it looked a moment ago; None: no hang, or not yet."""
    debugged = [r.rank for r in reports if _is_debugged(r)]
    if debugged:
        return Blind(why=f"rank {ranges(debugged)} is under a debugger")
    look = _sort(reports)
    if not look.live:
        return None
    bounds = limits(config, pace, stepped=stepped)
    stalled_s = min(r.sight.still_s for r in look.live)
    found = _certain(look, bounds, stalled_s) or _uncertain(look, bounds, stalled_s, config=config)
    if found is None:
        return None
    kind, culprits, limit_s = found
    return Hang(
        kind=kind,
        culprits=tuple(sorted(culprits))[:CULPRITS_MAX],
        stalled_s=stalled_s,
        limit_s=limit_s,
        groups=_groups(reports),
    )


_Found = tuple[HangKind, list[int], float]


def _certain(look: _Look, bounds: Limits, stalled_s: float) -> _Found | None:
    """What cannot end by itself."""
    if look.stopped and stalled_s >= bounds.stopped_s:
        return HangKind.STOPPED, [r.rank for r in look.stopped], bounds.stopped_s
    if stalled_s < bounds.stuck_s:
        return None
    if look.stuck:
        return HangKind.STUCK, [r.rank for r in look.stuck], bounds.stuck_s
    together = len(look.live) + len(look.ended) > 1
    if together and not look.others and not look.stopped:
        return HangKind.DEADLOCK, _out_of_step(look), bounds.stuck_s
    return None


def _uncertain(look: _Look, bounds: Limits, stalled_s: float, *, config: HangConfig) -> _Found | None:
    """What looks like honest work, for too long."""
    if look.ended:
        idle_s = min(r.sight.idle_s for r in look.live)
        if min(idle_s, stalled_s) >= bounds.exit_s:
            return HangKind.EXIT, [r.rank for r in look.live], bounds.exit_s
        return None
    if bounds.busy_s is None:
        return None
    limit_s = bounds.busy_s
    slow = any(r.phase in _UNHURRIED or r.sight.activity is Activity.MOVING for r in look.others)
    if slow:
        limit_s = max(limit_s, config.start_s)
    if stalled_s < limit_s:
        return None
    culprits = [r.rank for r in look.others] if look.waiting else []
    return HangKind.BUSY, culprits, limit_s


def _is_debugged(report: RankReport) -> bool:
    return report.sight.activity is Activity.TRACED or report.sight.wait is Wait.DEBUGGER


def _sort(reports: Sequence[RankReport]) -> _Look:
    look = _Look()
    for report in reports:
        sight = report.sight
        if sight.activity is Activity.ENDED:
            look.ended.append(report)
            continue
        look.live.append(report)
        seen = sight.wait_s >= EVIDENCE_S and sight.idle_s >= EVIDENCE_S
        if sight.activity is Activity.STOPPED:
            look.stopped.append(report)
        elif seen and sight.wait in STUCK:
            look.stuck.append(report)
        elif seen and sight.wait is Wait.COLLECTIVE and sight.activity is Activity.IDLE:
            look.waiting.append(report)
        else:
            look.others.append(report)
    return look


def _out_of_step(look: _Look) -> list[int]:
    """Of ranks that all wait: those that are elsewhere than the majority. Nobody without a majority."""
    if look.ended:
        return [r.rank for r in look.ended]
    sides = fold({r.rank: (_place(r),) for r in look.waiting})
    if len(sides) < 2 or 2 * len(sides[0][1]) <= len(look.waiting):
        return []
    return [rank for _, side in sides[1:] for rank in side]


def _place(report: RankReport) -> str:
    """In which collective a rank waits, as exactly as is known."""
    return report.sight.collective or report.sight.where


def _groups(reports: Sequence[RankReport]) -> tuple[StackGroup, ...]:
    """Ranks that look alike, folded."""
    by_rank: Mapping[int, RankReport] = {r.rank: r for r in reports}
    keys = {r.rank: (r.sight.activity.value, r.sight.wait.value, _place(r), r.stack) for r in reports}
    return tuple(
        StackGroup(
            ranks=ranges(ranks),
            activity=by_rank[ranks[0]].sight.activity,
            wait=by_rank[ranks[0]].sight.wait,
            where=by_rank[ranks[0]].sight.where,
            collective=by_rank[ranks[0]].sight.collective,
            stack=by_rank[ranks[0]].stack,
        )
        for _, ranks in fold(keys)[:GROUPS_MAX]
    )
