"""Jobs in virtual time that stand still for good reasons and for bad ones, and the watch that has to tell.

    outcome = watch_a_job(7, kind="deadlock")

A job is drawn from a seed: ranks, step times (drawn from a recorded trace, scaled, with a heavy tail), and a
mixture of honest pauses: a long first step, evaluations and saves of one rank, uploads that sleep in a
socket, a person at a debugger, accumulation, a slow-down, a network that stalls for seconds, a machine that
is paused, a master that is late, ranks that finish minutes apart. A job that is hurt then hangs for good.

What agents would see is modelled as `aimaster.agent.witness` looks: twice a second, stacks ever less often,
some of them torn. What is judged is the real `aimaster.core.hangwatch`, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from aimaster.core.events import WorkersHung
from aimaster.core.hang import HangConfig
from aimaster.core.hangwatch import HangWatch, NodeReport, Roster
from aimaster.core.sights import Activity, RankReport, Sight, Wait, WorkerPhase
from aimaster.ids import Generation, Incarnation, NodeId

LOOK_S = 0.5
STACK_AFTER_S = 1.5
BACKOFF_S = (1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
TORN = 0.1
"""Share of looks at the stack of a rank that runs that show something else; one that waits is whole."""
HURTS = ("stopped", "stuck", "deadlock", "busy")
HANG_S = 7500.0
"""How long a hurt job is watched; three times twenty of its longest pause and more."""

STEPPING_S = 5000.0
SLOW_STEPS = 30
TAIL, TAIL_MAX = 1.2, 30.0
"""One step in ten is longer by a factor with a heavy tail (Pareto), cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doing:
    """What one rank does for a while."""

    activity: Activity
    wait: Wait
    where: str


WAITS = Doing(activity=Activity.IDLE, wait=Wait.COLLECTIVE, where="all_reduce")
COMPUTES = Doing(activity=Activity.ACTIVE, wait=Wait.OTHER, where="forward")
UPLOADS = Doing(activity=Activity.IDLE, wait=Wait.OTHER, where="readinto")
WRITES = Doing(activity=Activity.MOVING, wait=Wait.OTHER, where="save")
DEBUGS = Doing(activity=Activity.IDLE, wait=Wait.DEBUGGER, where="interaction")
STOPPED = Doing(activity=Activity.STOPPED, wait=Wait.OTHER, where="forward")
STUCK = Doing(activity=Activity.IDLE, wait=Wait.LOCKED, where="acquire")
ENDED = Doing(activity=Activity.ENDED, wait=Wait.UNKNOWN, where="")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one job was watched."""

    hours: float
    honest_pauses: int
    false_alarms: tuple[WorkersHung, ...]
    found: WorkersHung | None = None
    delay_s: float | None = None
    """From the hurt until it was found."""
    culprit: int | None = None
    """The rank that was hurt; None where nobody is to blame."""


@dataclass(slots=True)
class _Rank:
    number: int
    steps: int = 0
    moved_s: float = 0.0
    doing: Doing = COMPUTES
    idle_since_s: float | None = None
    seen: Doing | None = None
    since_s: float = 0.0
    seen_s: float = 0.0
    looks: int = 0
    next_look_s: float = 0.0


class _Job:
    """All ranks on one node; the number of nodes changes nothing for the verdict."""

    def __init__(self, random: Random, ranks: int, config: HangConfig) -> None:
        self.random = random
        self.ranks = [_Rank(number) for number in range(ranks)]
        self.watch = HangWatch(config)
        self.now = 0.0
        self.clock = 0.0
        """Observed by the agent."""
        self.master_late_until = 0.0
        self.waiting_reports: list[NodeReport] = []
        self.beats = 0

    def step(self) -> None:
        """Every live rank finishes a step."""
        for rank in self.ranks:
            if rank.doing is not ENDED:
                rank.steps += 1
                rank.moved_s, rank.doing = self.clock, COMPUTES
                rank.idle_since_s = rank.seen = None
                rank.looks, rank.next_look_s = 0, 0.0

    def do(self, what: dict[int, Doing], rest: Doing) -> None:
        """From now on ranks do this; those that are not named do the rest."""
        for rank in self.ranks:
            if rank.doing is not ENDED:
                rank.doing = what.get(rank.number, rest)

    def pause(self, seconds: float) -> None:
        """The whole machine stands still; monotonic clocks go on."""
        self.now += seconds

    def run(self, seconds: float) -> WorkersHung | None:
        """Time goes on with nobody stepping; the first verdict, if there is one."""
        end = self.clock + seconds
        while self.clock < end:
            pause_s = min(LOOK_S, end - self.clock)
            self.now, self.clock = self.now + pause_s, self.clock + pause_s
            for rank in self.ranks:
                self._look(rank)
            self.beats += 1
            if self.beats % 2 == 0:
                self.waiting_reports.append(self._report())
            found = self._master()
            if found is not None:
                return found
        return None

    def _look(self, rank: _Rank) -> None:
        """What `aimaster.agent.witness` does, seen from far."""
        idle = rank.doing.activity in (Activity.IDLE, Activity.STOPPED)
        if not idle:
            rank.idle_since_s = None
        elif rank.idle_since_s is None:
            rank.idle_since_s = self.clock
        if self.clock - rank.moved_s < STACK_AFTER_S or self.clock < rank.next_look_s:
            return
        torn = not idle and self.random.random() < TORN
        seen = UPLOADS if torn else rank.doing
        if rank.seen is not seen:
            rank.seen, rank.since_s = seen, self.clock
        rank.seen_s = self.clock
        rank.next_look_s = self.clock + BACKOFF_S[min(rank.looks, len(BACKOFF_S) - 1)]
        rank.looks += 1

    def _report(self) -> NodeReport:
        return NodeReport(
            node=NodeId("n"),
            incarnation=Incarnation("1"),
            generation=Generation(1),
            ranks=tuple(self._rank_report(rank) for rank in self.ranks),
            clock_s=self.clock,
        )

    def _rank_report(self, rank: _Rank) -> RankReport:
        seen = rank.seen
        sight = Sight(
            still_s=self.clock - rank.moved_s,
            activity=rank.doing.activity,
            idle_s=0.0 if rank.idle_since_s is None else self.clock - rank.idle_since_s,
            wait=Wait.UNKNOWN if seen is None else seen.wait,
            wait_s=0.0 if seen is None else rank.seen_s - rank.since_s,
            where="" if seen is None else seen.where,
        )
        return RankReport(rank=rank.number, phase=WorkerPhase.TRAINING, steps=rank.steps, sight=sight)

    def _master(self) -> WorkersHung | None:
        if self.now < self.master_late_until:
            return None
        late, self.master_late_until = self.master_late_until, 0.0
        if late and self.random.random() < 0.5:
            found = self._scan()  # its own tick comes before what lies in its queue
            if found is not None:
                return found
        for report in self.waiting_reports:
            self.watch.take(report, self.now)
        self.waiting_reports.clear()
        return self._scan()

    def _scan(self) -> WorkersHung | None:
        if not self.watch.due(self.now):
            return None
        nodes = {NodeId("n"): Incarnation("1")}
        roster = Roster(
            generation=Generation(1),
            nodes=nodes,
            finished=frozenset(),
            suspect=(),
            world_size=len(self.ranks),
        )
        return self.watch.look(roster, self.now)


def watch_a_job(
    seed: int, trace: Sequence[float], *, kind: str | None = None, config: HangConfig | None = None
) -> Outcome:
    """One job from one seed.

    Args:
        seed: Everything else is drawn from it.
        trace: Recorded step times in seconds, from which steps are drawn.
        kind: How it is hurt at its end, one of `HURTS`; None: never.
        config: The limits.
    """
    random = Random(seed)
    job = _Job(random, random.choice((2, 3, 8)), config if config is not None else HangConfig())
    scale = random.choice((0.5, 1.0, 5.0, 50.0, 200.0))
    scale_max = 5.0 if kind == "busy" else 300.0  # the limit for work is twenty of these and more
    scale = min(scale, scale_max)
    with_optimizer = kind is not None or random.random() > 0.05
    alarms: list[WorkersHung] = []
    pauses = 0

    def spend(seconds: float, what: dict[int, Doing], rest: Doing = WAITS) -> None:
        job.do(what, rest)
        found = job.run(seconds)
        if found is not None:
            alarms.append(found)

    spend(random.choice((2.0, 60.0, 300.0)), {}, COMPUTES)  # the first step compiles
    for _ in range(min(random.randint(40, 200), max(SLOW_STEPS, int(STEPPING_S / scale)))):
        if with_optimizer:
            job.step()
        tail = min(random.paretovariate(TAIL), TAIL_MAX) if random.random() < 0.1 else 1.0
        spend(scale * tail * random.choice(trace), {}, COMPUTES)
        if random.random() < 0.05:
            pauses += 1
            if with_optimizer:
                job.step()
            _pause(random, job, spend)
        if random.random() < 0.1:
            scale *= random.uniform(0.9, 1.3) if scale < scale_max else 0.5  # slower and slower
    hours = job.now / 3600
    if kind is None:
        _finish_apart(random, job, spend)
        return Outcome(hours=job.now / 3600, honest_pauses=pauses, false_alarms=tuple(alarms))
    if alarms:
        return Outcome(hours=hours, honest_pauses=pauses, false_alarms=tuple(alarms))
    victim = random.randrange(len(job.ranks))
    job.step()
    begun = job.clock
    found = _hurt(job, kind, victim)
    culprit = None if kind == "deadlock" and len(job.ranks) == 2 else victim
    delay_s = job.clock - begun if found else None
    return Outcome(
        hours=hours, honest_pauses=pauses, false_alarms=(), found=found, delay_s=delay_s, culprit=culprit
    )


def _pause(random: Random, job: _Job, spend: object) -> None:
    """One honest pause."""
    assert callable(spend)
    lead = {0: COMPUTES}
    match random.choice(("evaluate", "save", "upload", "debug", "machine", "master", "network", "data")):
        case "evaluate":
            spend(random.uniform(1.0, 40.0), lead)
        case "save":
            spend(random.uniform(1.0, 30.0), {0: random.choice((WRITES, UPLOADS))})
        case "upload":
            spend(random.uniform(1.0, 40.0), {0: UPLOADS})
        case "debug":
            spend(120.0, {random.randrange(len(job.ranks)): DEBUGS})
        case "machine":
            job.pause(random.choice((5.0, 60.0, 3600.0)))
            spend(0.5, {}, COMPUTES)
        case "master":
            job.master_late_until = job.now + random.uniform(1.0, 60.0)
            spend(random.uniform(0.5, 2.0), {}, COMPUTES)
        case "network":
            spend(random.uniform(0.5, 2.5), {})
        case _:
            spend(random.uniform(1.0, 30.0), {}, UPLOADS)  # all ranks wait for data


def _finish_apart(random: Random, job: _Job, spend: object) -> None:
    """Rank 0 exports for minutes after the others have ended."""
    assert callable(spend)
    for rank in job.ranks[1:]:
        rank.doing = ENDED
    spend(random.uniform(1.0, 300.0), {0: random.choice((COMPUTES, UPLOADS, WRITES))})


def _hurt(job: _Job, kind: str, victim: int) -> WorkersHung | None:
    doing = {
        "stopped": STOPPED,
        "stuck": STUCK,
        "deadlock": Doing(activity=Activity.IDLE, wait=Wait.COLLECTIVE, where="recv"),
        "busy": COMPUTES,
    }[kind]
    job.master_late_until = 0.0
    job.do({victim: doing}, WAITS)
    return job.run(HANG_S)
