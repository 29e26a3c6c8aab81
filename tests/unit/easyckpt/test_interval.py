"""Which steps are due, in virtual time: seconds are kept, all ranks save the same steps, few questions are
asked."""

from __future__ import annotations

import itertools
import math

import pytest

from easyckpt.interval import (
    AHEAD_STEPS_MAX,
    AUTO_LOSS_MAX_S,
    NODE_MTBF_S,
    OVERHEAD_MAX,
    Pacer,
    best_interval_s,
    mtbf_s,
)


def train(pacer: Pacer, *, steps: int, step_s: float) -> tuple[list[int], int]:
    """Steps that are saved, and how often it was asked, with ranks that heed what is announced."""
    saved, asked, not_before = [], 0, 0
    for step in range(1, steps + 1):
        if step < not_before:
            continue
        asked += 1
        not_before = pacer.not_before(step, step * step_s)
        if not_before <= step:
            pacer.granted(step, step * step_s)
            saved.append(step)
    return saved, asked


@pytest.mark.parametrize("step_s", [0.01, 0.1, 0.7, 3.0])
def test_an_interval_in_seconds_is_kept_and_few_questions_are_asked(step_s: float) -> None:
    steps = 4000
    saved, asked = train(Pacer(every_s=60.0), steps=steps, step_s=step_s)
    assert saved[0] == 1
    gaps = [(b - a) * step_s for a, b in itertools.pairwise(saved)]
    assert all(60.0 - 1e-6 <= gap <= 60.0 + 2 * step_s for gap in gaps)
    if step_s < 1.0:
        assert asked < steps / 3


def test_without_an_interval_every_step_is_due() -> None:
    saved, _ = train(Pacer(), steps=20, step_s=1.0)
    assert saved == list(range(1, 21))


def test_what_was_announced_holds_for_a_rank_that_asks_early_or_late() -> None:
    pacer = Pacer(every_s=100.0)
    pacer.granted(1, 0.0)
    announced = pacer.not_before(2, 1.0)
    assert announced > 3
    assert pacer.not_before(3, 99.0) == announced, "nothing before it is granted, however late it got"
    assert pacer.not_before(announced, 100.0) == announced
    assert pacer.not_before(2, 1e6) == announced
    pacer.restored()
    assert pacer.not_before(2, 1e6) == 2


def test_a_clock_that_stands_still_announces_a_bounded_number_of_steps() -> None:
    pacer = Pacer(every_s=100.0)
    pacer.granted(1, 5.0)
    assert 3 <= pacer.not_before(2, 5.0) <= 2 + AHEAD_STEPS_MAX


def test_auto_is_the_optimum_of_young_and_daly_within_its_caps() -> None:
    assert best_interval_s(cost_s=0.5, mtbf_s=86400.0) == pytest.approx(math.sqrt(86400.0))
    assert best_interval_s(cost_s=5.0, mtbf_s=1e9) == AUTO_LOSS_MAX_S
    assert best_interval_s(cost_s=30.0, mtbf_s=1000.0) == 30.0 / OVERHEAD_MAX, (
        "saving never costs more than this"
    )
    assert best_interval_s(cost_s=0.0, mtbf_s=1e9) == 1.0
    for cost_s in (0.001, 0.1, 10.0):
        assert cost_s / best_interval_s(cost_s=cost_s, mtbf_s=3600.0) <= OVERHEAD_MAX + 1e-9


def test_failures_shorten_the_interval_and_more_nodes_too() -> None:
    assert mtbf_s(nodes=1, failures=0, observed_s=0.0) == NODE_MTBF_S
    seldom = mtbf_s(nodes=100, failures=0, observed_s=86400.0)
    often = mtbf_s(nodes=100, failures=20, observed_s=86400.0)
    assert often < seldom < mtbf_s(nodes=10, failures=0, observed_s=86400.0)

    def intervals(**options: int) -> int:
        pacer = Pacer(auto=True, **options)
        pacer.note_cost(0.05)
        return len(train(pacer, steps=5000, step_s=1.0)[0])

    assert intervals(nodes=2000, failures=50) > intervals(nodes=2000) > intervals(nodes=10)


def test_the_slowest_rank_counts_at_once_and_is_forgotten_slowly() -> None:
    pacer = Pacer(auto=True, nodes=1000)
    pacer.note_cost(0.001)
    before = pacer.interval_s(0.0)
    pacer.note_cost(1.0)
    assert pacer.interval_s(0.0) > before
    worst = pacer.interval_s(0.0)
    for _ in range(100):
        pacer.note_cost(0.001)
    assert before <= pacer.interval_s(0.0) < worst
