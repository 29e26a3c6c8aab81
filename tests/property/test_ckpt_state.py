"""Any state tree that can be stored comes back bit by bit; any two tiers never mix two saves."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from easyckpt.saver.peering import Source
from easyckpt.saver.protocol import Held, Key
from easyckpt.tiers import MEMORY, OnDisk, choose
from tests.ckpt_bytes import from_bytes, to_bytes

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any shape with up to three dimensions, any stride order, some types."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.rand(shape, generator=generator) * 100).to(dtype)
    order = draw(st.permutations(range(len(shape))))
    return tensor.permute(order)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=5) | st.integers() | st.tuples(st.integers()), inner, max_size=3)
    ),
    max_leaves=10,
)
trees = st.recursive(
    tensors() | plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5) | st.integers(0, 3), inner, max_size=3)
        | st.tuples(inner)
    ),
    max_leaves=8,
)
states = st.dictionaries(st.text(max_size=5).filter(lambda key: not key.startswith("__")), trees, max_size=4)


def blank(value: Any) -> Any:
    """The same shape of tree with other values, as a fresh run has it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if type(value) is dict:
        return {key: blank(item) for key, item in value.items()}
    if type(value) is list:
        return [blank(item) for item in value]
    if type(value) is tuple:
        return tuple(blank(item) for item in value)
    return value


def same(one: Any, two: Any) -> bool:
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and raw(one) == raw(two)
    if type(one) is dict:
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if type(one) in (list, tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two) or (one != one and two != two)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@settings(max_examples=150, deadline=None)
@given(states)
def test_any_state_comes_back(state: dict[str, Any]) -> None:
    layout, body = to_bytes(state)
    fresh = blank(state)
    from_bytes(layout, body, fresh)
    assert same(fresh, state)
    again, other = to_bytes(fresh)
    assert again.digest == layout.digest
    assert other[:] == body[:]  # equal states have equal bytes


pieces = st.lists(
    st.tuples(
        st.integers(0, 2), st.integers(0, 2), st.integers(1, 3), st.integers(1, 4)
    ),  # node, rank, gen, step
    max_size=40,
)
stored = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 4)), max_size=4)


@settings(max_examples=300, deadline=None)
@given(pieces, stored, st.sets(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=3))
def test_a_plan_never_mixes_saves_and_is_the_newest_possible(
    in_memory: list[tuple[int, int, int, int]], on_disk: list[tuple[int, int]], bad_at: set[tuple[int, int]]
) -> None:
    ranks = range(3)
    held: dict[int, list[Held]] = {}
    for node, rank, generation, step in in_memory:
        digest = f"{generation}.{step}.{rank}"
        held.setdefault(node, []).append(
            Held(key=Key(generation, step), rank=rank, world_size=3, digest=digest)
        )
    disk = [
        OnDisk(
            step=step,
            generation=generation,
            world_size=3,
            digests={rank: f"{generation}.{step}.{rank}" for rank in ranks},
        )
        for generation, step in set(on_disk)
    ]
    bad = frozenset(
        Source(
            rank=piece.rank,
            tier="memory" if node == piece.rank else "peer",
            node_rank=node,
            digest=piece.digest,
        )
        for node, items in held.items()
        for piece in items
        if (node, piece.rank) in bad_at
    )
    plan = choose(held, disk, node_of_rank={rank: rank for rank in ranks}, bad=bad)

    def has(node: int, rank: int, generation: int, step: int) -> bool:
        return (node, rank) not in bad_at and (node, rank, generation, step) in in_memory

    possible = {step for generation, step in on_disk}
    for generation in range(1, 4):
        for step in range(1, 5):
            if all(any(has(node, rank, generation, step) for node in range(3)) for rank in ranks):
                possible.add(step)
    assert (plan.step if plan else None) == max(possible, default=None)
    if plan is None:
        return
    saves = {source.digest.rpartition(".")[0] for source in plan.sources}
    assert len(saves) == 1
    assert [source.rank for source in plan.sources] == list(ranks)
    assert not bad & set(plan.sources)
    (save,) = saves
    generation, step = map(int, save.split("."))
    assert step == plan.step
    for source in plan.sources:
        if source.node_rank >= 0:
            assert has(source.node_rank, source.rank, generation, step)
            assert (source.tier == MEMORY) == (source.node_rank == source.rank)
        else:
            assert (generation, step) in on_disk
