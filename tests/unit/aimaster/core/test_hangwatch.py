"""What the watch learns from heartbeats, and when it speaks."""

from __future__ import annotations

from typing import Any

from aimaster.core.events import HangKind, WorkersHung
from aimaster.core.hangwatch import HangWatch, NodeReport, Roster
from aimaster.core.sights import Activity, RankReport, Sight, Wait, WorkerPhase
from aimaster.ids import Generation, Incarnation, NodeId

LIFE = Incarnation("1")


class Job:
    """Two nodes of one rank each that step together, and a watch that hears of them every second."""

    def __init__(self, nodes: str = "ab", *, world_size: int = 2) -> None:
        self.watch = HangWatch()
        self.nodes, self.world_size = nodes, world_size
        self.now, self.clock, self.steps, self.generation = 100.0, 5.0, 0, 1
        self.stepped_at = 5.0
        self.suspect: tuple[NodeId, ...] = ()

    def second(self, steps: int = 0, *, silent: str = "", **sight: Any) -> WorkersHung | None:
        """A second passes, with so many steps in it."""
        self.now, self.clock, self.steps = self.now + 1.0, self.clock + 1.0, self.steps + steps
        if steps:
            self.stepped_at = self.clock
        for number, node in enumerate(self.nodes):
            if node not in silent:
                self.watch.take(self.report(node, number, **sight), self.now)
        return self.scan()

    def report(self, node: str, number: int, **sight: Any) -> NodeReport:
        still_s = self.clock - self.stepped_at
        waits = {"activity": Activity.IDLE, "wait": Wait.COLLECTIVE, "wait_s": still_s, "idle_s": still_s}
        seen = Sight(still_s=still_s, **{**waits, **sight})
        one = RankReport(
            rank=number, phase=WorkerPhase.TRAINING, steps=self.steps, sight=seen, step=self.steps or None
        )
        return NodeReport(
            node=NodeId(node),
            incarnation=LIFE,
            generation=Generation(self.generation),
            ranks=(one,),
            clock_s=self.clock,
        )

    def scan(self) -> WorkersHung | None:
        if not self.watch.due(self.now):
            return None
        roster = Roster(
            generation=Generation(self.generation),
            nodes={NodeId(node): LIFE for node in self.nodes},
            finished=frozenset(),
            suspect=self.suspect,
            world_size=self.world_size,
        )
        return self.watch.look(roster, self.now)

    def warm_up(self) -> None:
        for _ in range(10):
            assert self.second(10) is None

    def still(self, seconds: int, **sight: Any) -> WorkersHung | None:
        """Until it speaks, at most so long."""
        for _ in range(seconds):
            found = self.second(**sight)
            if found is not None:
                return found
        return None


def test_a_hang_is_said_once() -> None:
    job = Job()
    job.warm_up()
    found = job.still(10)
    assert found is not None
    assert (found.kind, found.step, found.culprits) == (HangKind.DEADLOCK, 100, ())
    assert 3.0 <= found.stalled_s <= 4.0
    assert job.still(20) is None


def test_while_one_rank_steps_nobody_looks() -> None:
    job = Job()
    job.warm_up()
    assert all(job.second(1) is None for _ in range(50))
    assert not job.watch.due(job.now)


def test_a_node_that_is_silent_or_suspect_gives_no_evidence() -> None:
    job = Job()
    job.warm_up()
    assert job.still(30, silent="b") is None
    assert "node b" in job.watch.blind
    job.suspect = (NodeId("b"),)
    assert job.still(3) is None
    job.suspect = ()
    assert job.still(5) is not None


def test_ranks_that_nobody_sees_may_be_at_work() -> None:
    job = Job(world_size=3)
    job.warm_up()
    assert job.still(50) is None
    assert "2 of 3 ranks" in job.watch.blind


def test_a_new_generation_starts_afresh_but_for_the_pace() -> None:
    job = Job()
    job.warm_up()
    assert job.still(10) is not None
    job.generation, job.steps, job.stepped_at = 2, 0, job.clock
    assert job.still(29) is None  # before its first step the limit is another one
    assert job.watch.pace().samples >= 5


def test_a_late_heartbeat_of_an_old_generation_changes_nothing() -> None:
    job = Job()
    job.warm_up()
    old = job.report("a", 0)
    job.generation, job.steps = 2, 0
    job.second()
    job.watch.take(old, job.now)
    assert job.watch.limits().stuck_s >= 30.0


def test_the_longest_gap_is_what_the_job_came_back_from() -> None:
    job = Job()
    job.warm_up()
    work = {"activity": Activity.ACTIVE, "wait": Wait.OTHER}
    assert job.still(40, **work) is None
    job.second(1)
    assert 39.0 <= job.watch.pace().longest_gap_s <= 42.0
    assert job.watch.limits().busy_s == 3 * job.watch.pace().longest_gap_s


def test_a_pause_every_hundred_steps_does_not_hold_up_what_cannot_end() -> None:
    job = Job()
    for _ in range(8):
        for _ in range(25):
            job.second(2)
        for _ in range(14):
            assert job.second(activity=Activity.ACTIVE, wait=Wait.OTHER) is None
    pace = job.watch.pace()
    assert 0.4 <= pace.usual_s <= 1.1
    assert pace.quantile_s >= 14.0
    found = job.still(int(10 * pace.usual_s) + 3)
    assert found is not None
    assert found.kind is HangKind.DEADLOCK


def test_a_paused_machine_changes_neither_limits_nor_verdicts() -> None:
    job = Job()
    job.warm_up()
    before = job.watch.pace().longest_gap_s
    job.now += 600.0  # master, agents and workers stood still; observed clocks did not go on
    assert job.scan() is None
    job.warm_up()
    assert job.watch.pace().longest_gap_s <= before + 1.0


def test_after_a_debugger_there_is_time() -> None:
    job = Job()
    job.warm_up()
    assert job.still(30, wait=Wait.DEBUGGER) is None
    assert "debugger" in job.watch.blind
    assert job.still(50) is None
    assert job.still(20) is not None
