"""The planner against a slow and plainly right one, and the fence against its definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyckpt.errors import IncompleteCheckpoint, Misuse, StateMismatch
from easyckpt.layout import Chunk, ChunkKind, ChunkSpec
from easyckpt.paths import StepName
from easyckpt.reshard import RUNS_MAX, Copy, StoredChunk, plan_reads, runs
from easyckpt.survey import Life, fenced_by

BASE = 4096


def elements_of(chunk: Chunk | ChunkSpec) -> list[int]:
    """Logical element numbers, in the order in which the chunk stores them."""
    if chunk.kind is ChunkKind.FLAT:
        return list(range(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]))
    found = []
    for index in itertools.product(*(range(size) for size in chunk.sizes)):
        number = 0
        for at, offset, extent in zip(index, chunk.offsets, chunk.global_shape, strict=True):
            number = number * extent + at + offset
        found.append(number)
    return found


def stored(spec: ChunkSpec, source: str) -> StoredChunk:
    chunk = Chunk(
        key=spec.key, name=spec.name, kind=spec.kind, dtype=spec.dtype, global_shape=spec.global_shape,
        offsets=spec.offsets, sizes=spec.sizes, begin=BASE, end=BASE + spec.byte_count,
    )  # fmt: skip
    return StoredChunk(source=source, chunk=chunk)


def perform(wanted: ChunkSpec, copies: Sequence[Copy], parts: Sequence[StoredChunk]) -> list[int]:
    """Carry the plan out on files in which each element holds its own logical number (two bytes)."""
    files = {}
    for part in parts:
        content = b"".join(number.to_bytes(2, "little") for number in elements_of(part.chunk))
        files[part.source] = bytes(BASE) + content
    target = bytearray(b"\xff" * wanted.byte_count)
    for copy in copies:
        data = files[copy.source][copy.source_begin : copy.source_begin + copy.length]
        assert len(data) == copy.length
        assert copy.source_begin >= BASE
        target[copy.target_begin : copy.target_begin + copy.length] = data
    return [int.from_bytes(target[at : at + 2], "little") for at in range(0, len(target), 2)]


shapes = st.lists(st.integers(0, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def specs(draw: st.DrawFn, shape: tuple[int, ...]) -> ChunkSpec:
    count = math.prod(shape)
    if not shape or draw(st.booleans()):
        begin = draw(st.integers(0, count))
        offsets, sizes = (begin,), (draw(st.integers(0, count - begin)),)
        kind = ChunkKind.FLAT
    else:
        offsets = tuple(draw(st.integers(0, extent)) for extent in shape)
        sizes = tuple(
            draw(st.integers(0, extent - offset)) for extent, offset in zip(shape, offsets, strict=True)
        )
        kind = ChunkKind.BOX
    return ChunkSpec(name="t", dtype="int16", global_shape=shape, offsets=offsets, sizes=sizes, kind=kind)


@settings(max_examples=400, deadline=None)
@given(data=st.data(), shape=shapes)
def test_plans_fill_exactly_what_is_wanted(data: st.DataObject, shape: tuple[int, ...]) -> None:
    wanted = data.draw(specs(shape), label="wanted")
    parts = [
        stored(data.draw(specs(shape), label="stored"), f"file{number}")
        for number in range(data.draw(st.integers(0, 5), label="parts"))
    ]
    there = {number for part in parts for number in elements_of(part.chunk)}
    needed = elements_of(wanted)
    if set(needed) <= there:
        copies = plan_reads(wanted, parts)
        assert perform(wanted, copies, parts) == needed
        assert sum(copy.length for copy in copies) == wanted.byte_count, "nothing is brought twice"
    else:
        with pytest.raises(IncompleteCheckpoint, match="in none of the stored pieces"):
            plan_reads(wanted, parts)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), shape=shapes)
def test_runs_are_the_chunk(data: st.DataObject, shape: tuple[int, ...]) -> None:
    spec = data.draw(specs(shape))
    found = list(runs(spec))
    numbers = [run.logical + at for run in found for at in range(run.length)]
    places = [run.local + at for run in found for at in range(run.length)]
    assert numbers == elements_of(spec)
    assert places == list(range(len(numbers)))


def test_the_same_cut_is_one_copy() -> None:
    shape = (8, 6)
    cuts: list[tuple[ChunkKind, tuple[int, ...], tuple[int, ...]]] = [
        (ChunkKind.BOX, (0, 0), (8, 6)),
        (ChunkKind.BOX, (2, 0), (4, 6)),
        (ChunkKind.BOX, (2, 1), (4, 3)),
        (ChunkKind.FLAT, (7,), (20,)),
    ]
    for kind, offsets, sizes in cuts:
        spec = ChunkSpec(
            name="t", dtype="float32", global_shape=shape, offsets=offsets, sizes=sizes, kind=kind
        )
        copies = plan_reads(spec, [stored(spec, "file")])
        assert copies == (Copy(source="file", source_begin=BASE, target_begin=0, length=spec.byte_count),)


def test_replicas_are_read_once_from_the_first() -> None:
    spec = ChunkSpec(name="t", dtype="float32", global_shape=(10,), offsets=(0,), sizes=(10,))
    copies = plan_reads(spec, [stored(spec, "near"), stored(spec, "far")])
    assert [copy.source for copy in copies] == ["near"]


def test_another_type_or_shape_is_named() -> None:
    spec = ChunkSpec(name="t", dtype="float32", global_shape=(10,), offsets=(0,), sizes=(10,))
    other = ChunkSpec(name="t", dtype="bfloat16", global_shape=(10,), offsets=(0,), sizes=(10,))
    with pytest.raises(StateMismatch) as caught:
        plan_reads(spec, [stored(other, "file")])
    assert "bfloat16" in caught.value.changed[0]


def test_too_many_runs_are_refused() -> None:
    rows = RUNS_MAX + 1
    spec = ChunkSpec(name="t", dtype="int8", global_shape=(rows, 2), offsets=(0, 0), sizes=(rows, 1))
    with pytest.raises(Misuse, match="separate runs"):
        next(runs(spec))


lives = st.lists(st.one_of(st.none(), st.integers(0, 30)), max_size=6).map(
    lambda resumed: tuple(
        Life(generation=number + 1, known=True, resumed_step=step) for number, step in enumerate(resumed)
    )
)


@given(lives=lives, step=st.integers(0, 40), generation=st.integers(1, 7))
def test_the_fence_is_what_the_document_says(lives: tuple[Life, ...], step: int, generation: int) -> None:
    fenced = fenced_by(StepName(step=step, generation=generation), lives) is not None
    assert fenced == any(
        life.generation > generation and (life.resumed_step is None or life.resumed_step < step)
        for life in lives
    )
