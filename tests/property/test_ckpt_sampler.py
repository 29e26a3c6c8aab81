"""Every sample once per epoch, wherever and however often a job is cut off, at whatever size it resumes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from easyckpt import ResumableSampler
from easyckpt.errors import Misuse, StateMismatch


def ranks(
    samples: int, state: dict[str, Any] | None, *, world: int, **options: Any
) -> list[ResumableSampler]:
    made = [ResumableSampler(samples, replicas=(rank, world), **options) for rank in range(world)]
    for sampler in made:
        if state is not None:
            sampler.load_state_dict(dict(state))
    return made


def take(samplers: list[ResumableSampler], steps: int) -> tuple[list[int], dict[str, Any]]:
    """What all ranks see in some steps of the epoch, or in the rest of it, and the state after them."""
    epoch = samplers[0].epoch
    seen: list[int] = []
    loaders = [sampler.watch(sampler) for sampler in samplers]
    for _ in range(steps):
        batches = [next(loader, None) for loader in loaders]
        if None in batches:
            assert batches == [None] * len(batches), "the ranks make different numbers of steps"
            break
        for batch in batches:
            seen += batch or []
    states = [sampler.state_dict() for sampler in samplers]
    assert all(state == states[0] for state in states), "the ranks disagree on the position"
    assert samplers[0].epoch in (epoch, epoch + 1)
    return seen, states[0]


@settings(deadline=None, max_examples=150)
@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    steps=st.lists(st.integers(0, 4), min_size=4, max_size=4),
    shuffle=st.booleans(),
    seed=st.integers(0, 3),
)
def test_each_sample_once(
    samples: int, batch_size: int, worlds: list[int], steps: list[int], shuffle: bool, seed: int
) -> None:
    """The job is cut off after some steps and resumes at another size, several times, then ends the epoch."""
    options = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed}
    seen: list[int] = []
    state: dict[str, Any] | None = None
    padded = 0
    for number, world in enumerate(worlds):
        samplers = ranks(samples, state, world=world, **options)
        if samplers[0].epoch > 0:
            break
        last = number == len(worlds) - 1
        more, state = take(samplers, 10**6 if last else steps[number % 4])
        seen += more
        padded = max(padded, world - 1)
    counted = Counter(seen)
    assert set(counted) == set(range(samples))
    assert sum(counted.values()) - samples <= padded, "more than a padded last step was repeated"
    assert all(count <= 1 + padded for count in counted.values())


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(2, 50), cut=st.integers(0, 30), world=st.integers(1, 3))
def test_a_resume_sees_what_an_undisturbed_run_sees(samples: int, cut: int, world: int) -> None:
    options = {"batch_size": 2, "seed": 7, "world": world}
    whole: list[int] = []
    undisturbed = ranks(samples, None, **options)
    for _ in range(3):
        whole += take(undisturbed, 10**6)[0]
    first = ranks(samples, None, **options)
    parts: list[int] = []
    for _ in range(cut):
        if first[0].epoch == 2:
            break
        more, state = take(first, 1)
        parts += more
        first = ranks(samples, state, **options)
    while first[0].epoch < 3:
        parts += take(first, 10**6)[0]
    assert parts == whole


@settings(deadline=None, max_examples=60)
@given(samples=st.integers(6, 50), world=st.integers(1, 3), cut=st.integers(0, 5))
def test_drop_last_gives_full_batches_only(samples: int, world: int, cut: int) -> None:
    samplers = ranks(samples, None, world=world, batch_size=2, drop_last=True)
    seen, state = take(samplers, cut)
    samplers = ranks(samples, state, world=world, batch_size=2, drop_last=True)
    if samplers[0].epoch == 0:
        assert len(samplers[0]) == samples // (2 * world) - len(seen) // (2 * world)
        seen += take(samplers, 10**6)[0]
    assert len(seen) == len(set(seen)) == samples // (2 * world) * 2 * world


@pytest.mark.parametrize("workers", [0, 2])
def test_what_workers_read_ahead_does_not_count(workers: int) -> None:
    data = list(range(40))
    sampler = ResumableSampler(data, batch_size=4, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    watched = sampler.watch(loader)
    seen = [index for _ in range(3) for index in next(watched).tolist()]
    state = sampler.state_dict()
    watched.close()
    assert state["position"] == 12
    again = ResumableSampler(data, batch_size=4, seed=1)
    again.load_state_dict(state)
    rest = DataLoader(data, batch_sampler=again, num_workers=workers)
    assert len(rest) == 7
    seen += [index for batch in again.watch(rest) for index in batch.tolist()]
    assert sorted(seen) == data
    assert (again.epoch, again.position) == (1, 0)


def test_epochs_have_different_orders() -> None:
    sampler = ResumableSampler(30, batch_size=5)
    first, second = ([index for batch in sampler.watch(sampler) for index in batch] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second


def test_a_loader_iterated_around_it_is_named() -> None:
    sampler = ResumableSampler(8, batch_size=2)
    next(iter(DataLoader(range(8), batch_sampler=sampler)))  # type: ignore[arg-type]
    with pytest.raises(Misuse, match=r"sampler\.watch"):
        sampler.state_dict()


@pytest.mark.parametrize("change", [{"seed": 2}, {"shuffle": False}, {"data": 41}])
def test_a_position_in_another_order_is_refused(change: dict[str, Any]) -> None:
    saved = ResumableSampler(40, batch_size=4).state_dict()
    other = ResumableSampler(**{"data": 40, "batch_size": 4, **change})
    with pytest.raises(StateMismatch):
        other.load_state_dict(saved)


def test_another_generator_is_noticed() -> None:
    sampler = ResumableSampler(40, batch_size=4)
    with pytest.raises(StateMismatch, match="another order"):
        sampler.load_state_dict({**sampler.state_dict(), "order": "0" * 32})


def test_impossible_arguments(clean_env: pytest.MonkeyPatch) -> None:
    for options in ({"data": 0}, {"batch_size": 0}, {"replicas": (2, 2)}, {"seed": -1}):
        with pytest.raises(Misuse):
            ResumableSampler(**{"data": 8, "batch_size": 2, **options})
    with pytest.raises(Misuse, match="less than one batch"):
        ResumableSampler(8, batch_size=5, drop_last=True, replicas=(0, 2))
    clean_env.setenv("WORLD_SIZE", "2")
    with pytest.raises(Misuse, match="RANK is not set"):
        ResumableSampler(8, batch_size=2)
