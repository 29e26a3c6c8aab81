"""Whom the others wait for: made-up jobs of ranks that compute, are starved, and wait for each other."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from aimaster.core.events import RankSlow
from aimaster.core.sights import Effort
from aimaster.core.slowrank import IN_A_ROW, WINDOW_S, RankEffort, SlowWatch
from aimaster.ids import Generation, NodeId

G1 = Generation(1)
BEAT_S = 1.0
Draw = Callable[[int, random.Random], tuple[float, float]]
"""Rank → seconds of one step that it runs, and that it wants to run and is not let."""


class Job:
    """Ranks that meet after each step, two to a node; each node's clock starts elsewhere."""

    def __init__(
        self, ranks: int, draw: Draw, *, seed: int = 1, own_sleep_s: float = 0.0, beat_s: float = BEAT_S
    ) -> None:
        self.watch = SlowWatch()
        self.draw = draw
        self._ranks = ranks
        self._rng = random.Random(seed)
        self._own_sleep_s = own_sleep_s
        self._beat_s = beat_s
        self._now = 0.0
        self._steps = 0
        self._running = [0.0] * ranks
        self._awake = [0.0] * ranks

    def run(self, seconds: float) -> list[tuple[float, RankSlow]]:
        """What is said, and after how long."""
        said: list[tuple[float, RankSlow]] = []
        begin, beat = self._now, self._now
        while self._now < begin + seconds:
            work = [self.draw(rank, self._rng) for rank in range(self._ranks)]
            end = self._now + max(running + starved for running, starved in work) + self._own_sleep_s
            while beat + self._beat_s < end:
                beat += self._beat_s
                found = self._beat(beat, work)
                if found is not None:
                    said.append((beat - begin, found))
            for rank, (running, starved) in enumerate(work):
                self._running[rank] += running
                self._awake[rank] += running + starved
            self._now = end
            self._steps += 1
        return said

    def _beat(self, at_s: float, work: list[tuple[float, float]]) -> RankSlow | None:
        """In the middle of a step."""
        for node in range(0, self._ranks, 2):
            here = range(node, min(node + 2, self._ranks))
            efforts = [
                RankEffort(rank=rank, steps=self._steps, effort=self._effort(rank, at_s, work[rank]))
                for rank in here
            ]
            self.watch.take(NodeId(f"n{node // 2}"), G1, efforts)
        return self.watch.look(G1, self._ranks)

    def _effort(self, rank: int, at_s: float, work: tuple[float, float]) -> Effort:
        running, starved = work
        awake = min(at_s - self._now, running + starved)
        return Effort(
            at_s=1e5 * (rank // 2) + at_s,
            awake_s=5.0 + self._awake[rank] + awake,
            running_s=self._running[rank] + awake * running / (running + starved),
        )


def even(rank: int, rng: random.Random) -> tuple[float, float]:
    return 0.1 * rng.uniform(0.95, 1.05), 0.0


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_a_rank_that_works_half_as_long_again_is_named_within_a_minute(ranks: int) -> None:
    def slow(rank: int, rng: random.Random) -> tuple[float, float]:
        running, _ = even(rank, rng)
        return (running, 0.5 * running) if rank == 1 else (running, 0.0)

    job = Job(ranks, slow, own_sleep_s=0.02)
    ((after_s, found),) = job.run(300.0)
    assert after_s <= 60
    assert (found.ranks, found.node, found.over) == ((1,), "n0", False)
    assert found.awake - found.running == pytest.approx(found.awake / 3, rel=0.05)
    assert job.watch.named is not None
    job.draw = even
    ((_, found),) = job.run(100.0)
    assert (found.ranks, found.over) == ((1,), True)
    assert job.watch.named is None


@pytest.mark.parametrize("beat_s", [3.0, 5.0])
def test_heartbeats_that_come_seldom_name_it_too(beat_s: float) -> None:
    ((_, found),) = Job(4, lambda rank, rng: ((0.15 if rank == 1 else 0.1), 0.0), beat_s=beat_s).run(120.0)
    assert found.ranks == (1,)


def test_a_node_whose_ranks_are_slow_together_is_named() -> None:
    def slow(rank: int, rng: random.Random) -> tuple[float, float]:
        running, _ = even(rank, rng)
        return (running * 1.5, 0.0) if rank in (2, 3) else (running, 0.0)

    ((_, found),) = Job(8, slow).run(120.0)
    assert (found.ranks, found.node) == ((2, 3), "n1")


@pytest.mark.parametrize(
    "draw",
    [
        pytest.param(even, id="all alike"),
        pytest.param(lambda rank, rng: (0.1, 0.1 * rng.uniform(0.9, 1.1)), id="all starved alike"),
        pytest.param(lambda rank, rng: (0.05 * rng.paretovariate(2.5), 0.0), id="heavy-tailed work"),
        pytest.param(lambda rank, rng: (0.3 if rng.random() < 0.1 else 0.1, 0.0), id="stragglers by turns"),
        pytest.param(lambda rank, rng: (0.1 * (1 + 0.05 * rank), 0.0), id="a slope"),
        pytest.param(lambda rank, rng: (0.001, 0.0), id="all sleep"),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_nobody_is_named(draw: Draw, ranks: int) -> None:
    for seed in range(3):
        assert Job(ranks, draw, seed=seed, own_sleep_s=0.02).run(300.0) == []


def test_half_of_them_is_nobody() -> None:
    assert Job(4, lambda rank, rng: (0.1, 0.05 * (rank % 2))).run(300.0) == []


@pytest.mark.parametrize("every", [30, 300])
def test_evaluations_on_one_rank_are_left_out(every: int) -> None:
    """Other than a slow rank they come at once, for seconds, and everybody knows of them."""
    steps = 0

    def evaluates(rank: int, rng: random.Random) -> tuple[float, float]:
        nonlocal steps
        steps += rank == 0
        running, _ = even(rank, rng)
        return (running + (8.0 if rank == 0 and steps % every == 0 else 0.0)), 0.0

    assert Job(4, evaluates).run(600.0) == []


def test_a_hang_is_no_window() -> None:
    watch = SlowWatch()
    for second in range(100):
        efforts = [
            RankEffort(rank=0, steps=9, effort=Effort(at_s=second, awake_s=second, running_s=second)),
            RankEffort(rank=1, steps=9, effort=Effort(at_s=second, awake_s=0.0, running_s=0.0)),
        ]
        watch.take(NodeId("n0"), G1, efforts)
        assert watch.look(G1, 2) is None


def test_a_new_attempt_begins_from_nothing() -> None:
    def slow(rank: int, rng: random.Random) -> tuple[float, float]:
        return (0.15 if rank == 0 else 0.1), 0.0

    job = Job(4, slow)
    assert job.run(IN_A_ROW * WINDOW_S - 2) == []
    job.watch.take(NodeId("n0"), Generation(2), [])
    assert job.watch.look(G1, 4) is None
    assert job.run(100.0) == []  # what is told of the older attempt counts for nothing


def test_a_rank_that_is_not_known_makes_everybody_unknown() -> None:
    job = Job(4, lambda rank, rng: ((0.15 if rank == 0 else 0.1), 0.0))
    job._ranks = 3
    for _ in range(100):
        job.run(1.0)
        assert job.watch.look(G1, 4) is None
