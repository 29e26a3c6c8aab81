"""Assemblies of wanted chunks from the layouts of a step, against a plain way to say the same."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyckpt.assembly import Take, cut, merged, place, scatter, touched
from easyckpt.catalog import Catalog, Planner
from easyckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, StateMismatch
from easyckpt.layout import ChunkSpec, build_layout, layout_to_dict
from tests.property.test_ckpt_disk_reshard import elements_of, shapes, specs

BYTES = 2


def body_of(spec: ChunkSpec) -> tuple[list[list[object]], bytes]:
    """A rank's rows, and its body: each element holds its logical number."""
    layout = build_layout([spec], state_bytes=16)
    body = bytearray(layout.body_bytes)
    (chunk,) = layout.chunks
    body[chunk.begin : chunk.end] = b"".join(number.to_bytes(BYTES, "little") for number in elements_of(spec))
    return layout_to_dict(layout)["chunks"], bytes(body)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), shape=shapes)
def test_an_assembly_fills_exactly_what_is_wanted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    stored = [data.draw(specs(shape)) for _ in range(data.draw(st.integers(0, 5)))]
    wanted = [data.draw(specs(shape)) for _ in range(data.draw(st.integers(1, 3)))]
    lost = data.draw(st.sets(st.integers(0, 5), max_size=2))
    catalog = Catalog()
    bodies = {}
    for rank, spec in enumerate(stored):
        rows, bodies[rank] = body_of(spec)
        catalog.add(rows, ranks=(rank,))
    costs = {rank: data.draw(st.integers(0, 2)) for rank in bodies if rank not in lost}
    there = {number for rank in costs for number in elements_of(stored[rank])}
    begins, length = place(wanted)
    planner = Planner(catalog, costs)
    if not all(set(elements_of(spec)) <= there for spec in wanted):
        with pytest.raises(IncompleteCheckpoint):
            planner.assemble(wanted, begins=begins)
        return
    target = bytearray(length)
    taken = 0
    for rank, takes in planner.assemble(wanted, begins=begins).items():
        assert rank not in lost
        for take in takes:
            source = bodies[rank][take.source_begin : take.source_begin + take.length]
            target[take.target_begin : take.target_begin + take.length] = source
            taken += take.length
    assert taken == sum(spec.byte_count for spec in wanted), "nothing is brought twice"
    for spec, begin in zip(wanted, begins, strict=True):
        got = [
            int.from_bytes(target[at : at + BYTES], "little")
            for at in range(begin, begin + spec.byte_count, BYTES)
        ]
        assert got == elements_of(spec)


def spec_of(shape: tuple[int, ...], *, rows: tuple[int, int] | None = None, name: str = "w") -> ChunkSpec:
    begin, end = rows or (0, shape[0])
    return ChunkSpec(
        name=name,
        dtype="float32",
        global_shape=shape,
        offsets=(begin, *(0 for _ in shape[1:])),
        sizes=(end - begin, *shape[1:]),
    )


def test_of_replicas_the_cheapest_is_taken_and_equal_ones_share_the_work() -> None:
    names = [f"w{number}" for number in range(40)]
    layout = build_layout([spec_of((4, 4), name=name) for name in names], state_bytes=16)
    catalog = Catalog()
    catalog.add(layout_to_dict(layout)["chunks"], ranks=(0, 1, 2, 3))
    wanted = [spec_of((4, 4), name=name) for name in names]
    begins, _ = place(wanted)
    assert set(Planner(catalog, {0: 5, 1: 0, 2: 5, 3: 5}).assemble(wanted, begins=begins)) == {1}
    assert set(Planner(catalog, {0: 5, 2: 5, 3: 5}).assemble(wanted, begins=begins)) == {0, 2, 3}


def test_a_name_of_two_shapes_is_each_ranks_own() -> None:
    catalog = Catalog()
    for rank, length in enumerate((3, 5)):
        catalog.add(
            layout_to_dict(build_layout([spec_of((length,))], state_bytes=8))["chunks"], ranks=(rank,)
        )
    assert [catalog.directory(rank)["w"].global_shape for rank in (0, 1, 2)] == [(3,), (5,), (3,)]
    with pytest.raises(StateMismatch):
        Planner(catalog, {0: 0, 1: 0}).copies(spec_of((4,)))


def test_a_row_that_is_not_possible_is_refused() -> None:
    rows = layout_to_dict(build_layout([spec_of((3,))], state_bytes=8))["chunks"]
    rows[0][8] += 4
    with pytest.raises(CorruptCheckpoint, match="another length"):
        Catalog().add(rows, ranks=(0,))


def test_two_thousand_ranks_are_planned_in_linear_work() -> None:
    """Each rank's plan touches its own rows only, so that all plans together grow with what is stored."""
    ranks, tensors, width = 256, 100, 8
    catalog = Catalog()
    for rank in range(ranks):
        mine = [
            spec_of((ranks * 4, width), rows=(rank * 4, rank * 4 + 4), name=f"layer{number}.weight")
            for number in range(tensors)
        ]
        catalog.add(layout_to_dict(build_layout(mine, state_bytes=16))["chunks"], ranks=(rank,))
    fewer = ranks // 2 + 1
    shares = [divmod(number * ranks * 4, fewer)[0] for number in range(fewer + 1)]
    planner = Planner(catalog, dict.fromkeys(range(ranks), 0))
    takes = 0
    for low, high in itertools.pairwise(shares):
        wanted = [
            spec_of((ranks * 4, width), rows=(low, high), name=f"layer{number}.weight")
            for number in range(tensors)
        ]
        begins, _ = place(wanted)
        takes += sum(len(found) for found in planner.assemble(wanted, begins=begins).values())
    assert takes <= tensors * (ranks + fewer)
    assert math.prod((ranks, tensors)) <= takes


takes = st.lists(
    st.builds(
        lambda begin, length, target: (begin, length, target),
        st.integers(0, 90),
        st.integers(1, 30),
        st.integers(0, 1),
    ),
    max_size=8,
)


@settings(max_examples=200, deadline=None)
@given(wanted=takes, limit=st.integers(1, 40), chunk=st.integers(1, 50))
def test_cut_and_scattered_intervals_are_the_takes(
    wanted: list[tuple[int, int, int]], limit: int, chunk: int
) -> None:
    source = bytes(range(120))
    room = [0, 0]
    assembly = []
    for begin, length, target in wanted:
        assembly.append(Take(source_begin=begin, target=target, target_begin=room[target], length=length))
        room[target] += length
    whole = [bytearray(size) for size in room]
    scatter(memoryview(source), assembly, targets=[memoryview(item) for item in whole])
    assert whole[0] == b"".join(source[b : b + n] for b, n, t in wanted if t == 0)
    needed = {at for begin, length, _ in wanted for at in range(begin, begin + length)}
    narrow = merged(assembly, length_max=limit)
    assert {at for begin, end in narrow for at in range(begin, end)} == needed
    assert sum(end - begin for begin, end in narrow) == len(needed)
    chunks = [(n * chunk, (n + 1) * chunk) for n in touched(assembly, chunk_bytes=chunk)]
    for intervals in (narrow, chunks):
        parts = [bytearray(size) for size in room]
        for (begin, end), served in zip(intervals, cut(assembly, intervals), strict=True):
            scatter(memoryview(source[begin:end]), served, targets=[memoryview(item) for item in parts])
        assert parts == whole
