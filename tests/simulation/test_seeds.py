"""Many small worlds, each from one seed. A failure prints the seed, what was drawn, and the last steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aimaster.simulation.run import options_for, simulate

KEPT = {
    25: "a shrunk generation that was never started moved a survivor's seat",
    129: "what was said twice after a crash of the master was an error",
    1176: "a start that was sent again said otherwise whether progress was expected",
    2087: "an agent that reached the master as it died never tried again",
}
"""Seeds that found something, and what."""


@pytest.mark.parametrize("seed", KEPT)
def test_seeds_that_once_found_something(seed: int) -> None:
    simulate(seed)


@pytest.mark.parametrize("block", range(6))
def test_fresh_worlds(block: int) -> None:
    for seed in range(10_000 + block * 20, 10_000 + (block + 1) * 20):
        simulate(seed)


@pytest.mark.parametrize("block", range(3))
def test_worlds_whose_nodes_start_alone(block: int) -> None:
    for seed in range(30_000 + block * 20, 30_000 + (block + 1) * 20):
        drawn = options_for(seed)
        simulate(seed, replace(drawn, training=replace(drawn.training, alone=True)))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_more_fresh_worlds(block: int) -> None:
    for seed in range(20_000 + block * 50, 20_000 + (block + 1) * 50):
        simulate(seed)


def test_a_seed_is_the_same_world_every_time() -> None:
    first, second = simulate(17), simulate(17)
    assert first == second
