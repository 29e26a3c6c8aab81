"""Jobs in virtual time: nobody is accused of honest work, and every hang is found in time, with its culprit.

`python -m tests.simulation.test_standstill` runs more seeds and prints the rates.
"""

from __future__ import annotations

import statistics
from functools import cache
from pathlib import Path

import pytest

from aimaster.core.events import HangKind
from aimaster.simulation.standstill import HURTS, Outcome, watch_a_job

TRACE = Path(__file__).parents[1] / "data" / "step_times.txt"
HONEST_SEEDS = range(200)
HURT_SEEDS = range(1000, 1015)


@cache
def trace() -> tuple[float, ...]:
    """Step times of a real training on a busy machine, in seconds."""
    lines = TRACE.read_text().splitlines()
    return tuple(float(line) for line in lines if not line.startswith("#"))


@pytest.mark.parametrize("part", range(4))
def test_honest_work_is_never_a_hang(part: int) -> None:
    outcomes = {seed: watch_a_job(seed, trace()) for seed in HONEST_SEEDS if seed % 4 == part}
    wrong = {seed: one.false_alarms for seed, one in outcomes.items() if one.false_alarms}
    assert not wrong, wrong


@pytest.mark.parametrize("kind", HURTS)
def test_every_hang_is_found_with_its_culprit(kind: str) -> None:
    for seed in HURT_SEEDS:
        one = watch_a_job(seed, trace(), kind=kind)
        assert one.found is not None, seed
        assert one.found.kind is HangKind(kind), (seed, one)
        assert one.found.culprits == (() if one.culprit is None else (one.culprit,)), (seed, one)
        assert one.delay_s is not None
        # Not before the limit; one heartbeat, one look and one round of the back-off later at most.
        assert one.found.limit_s <= one.delay_s <= 1.6 * one.found.limit_s + 35.0, (seed, one)


def test_for_short_steps_what_cannot_end_is_found_within_seconds() -> None:
    delays = [
        one.delay_s
        for kind in ("stopped", "stuck", "deadlock")
        for seed in HURT_SEEDS
        if (one := watch_a_job(seed, trace(), kind=kind)).found and one.found.limit_s == 3.0
    ]
    assert len(delays) > 5
    assert statistics.median(delay for delay in delays if delay is not None) <= 5.0


def main(seeds: int = 2000) -> None:
    """Rates over many seeds."""
    honest: list[Outcome] = [watch_a_job(seed, trace()) for seed in range(seeds)]
    hours = sum(one.hours for one in honest)
    alarms = sum(len(one.false_alarms) for one in honest)
    pauses = sum(one.honest_pauses for one in honest)
    print(f"honest: {seeds} jobs, {hours:.0f} h, {pauses} pauses, {alarms} false alarms")
    for kind in HURTS:
        hurt = [watch_a_job(10_000 + seed, trace(), kind=kind) for seed in range(seeds // 10)]
        found = [one for one in hurt if one.found is not None and one.delay_s is not None]
        late = statistics.median(
            one.delay_s / one.found.limit_s for one in found if one.found and one.delay_s
        )
        print(f"{kind}: {len(found)} of {len(hurt)} found, after {late:.2f} times the limit in the median")


if __name__ == "__main__":
    main()
