"""Whether two checkpoints hold the same training state, bit for bit.

Logical tensors are compared by name, whatever files and chunks they lie in. Where both sides are cut in the
same way, chunk is compared with chunk, on each rank; else the logical tensor is put together on both sides.
Plain state (``__state__``) is compared per rank. Bytes are read in windows, so that memory does not grow with
the checkpoint, but for one tensor at a time where the cuts differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from easyckpt.commit import read_fragment
from easyckpt.layout import DTYPE_BYTES, Chunk, ChunkKind, ChunkSpec
from easyckpt.manifest import LayoutRecord, Manifest, PieceRecord
from easyckpt.read import check_length, prove_header, read_range
from easyckpt.reshard import StoredChunk, plan_reads
from easyckpt.storage.base import Storage

__all__ = ["Difference", "DifferenceKind", "DiffReport", "diff_steps"]

WINDOW_BYTES = 16 << 20
STATE_NAME = "__state__"


class DifferenceKind(Enum):
    """What differs."""

    ONLY_A = "only_a"
    ONLY_B = "only_b"
    RETYPED = "retyped"
    RESHAPED = "reshaped"
    VALUES = "values"
    STATE = "state"
    WORLD_SIZE = "world_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One tensor, or one rank's plain state, that differs."""

    kind: DifferenceKind
    name: str
    detail: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffReport:
    """The comparison."""

    differences: tuple[Difference, ...]
    tensors_equal: int
    bytes_compared: int

    @property
    def bit_equal(self) -> bool:
        """Nothing differs."""
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    record: PieceRecord
    chunk: Chunk

    @property
    def rank(self) -> int:
        return self.record.rank


@dataclass(slots=True, kw_only=True)
class _Side:
    """One checkpoint, opened."""

    storage: Storage
    manifest: Manifest
    tensors: dict[str, list[_Place]] = field(default_factory=dict)
    states: dict[int, tuple[PieceRecord, int, int]] = field(default_factory=dict)

    def open(self) -> None:
        """Read the fragments, and prove that each body is there and means what the index says."""
        for ref in self.manifest.fragments:
            fragment = read_fragment(self.storage, ref, self.manifest)
            for record in fragment.pieces:
                self._add(record, fragment.layout_of(record))
        for places in self.tensors.values():
            places.sort(key=lambda place: place.rank)

    def _add(self, record: PieceRecord, layout: LayoutRecord) -> None:
        check_length(self.storage, record, step=self.manifest.step)
        first = self.read(record, 0, layout.header_bytes)
        prove_header(first, record, layout=layout, where=self.storage.where(record.file))
        for chunk in layout.layout.chunks:
            place = _Place(record=record, chunk=chunk)
            self.tensors.setdefault(chunk.name, []).append(place)
        self.states[record.rank] = (record, layout.layout.state_begin, layout.layout.state_end)

    def state(self, rank: int) -> bytes:
        """A rank's plain state, without the room to grow."""
        record, begin, end = self.states[rank]
        length = int.from_bytes(self.read(record, begin, begin + 8), "little")
        return self.read(record, begin + 8, min(begin + 8 + length, end))

    def read(self, record: PieceRecord, begin: int, end: int) -> bytes:
        """A range of a body."""
        buffer = bytearray(end - begin)
        got = read_range(self.storage, record, begin=begin, into=memoryview(buffer))
        return bytes(buffer[:got])

    def whole(self, name: str) -> bytearray:
        """The logical tensor, put together."""
        first = self.tensors[name][0].chunk
        spec = ChunkSpec(
            name=name,
            dtype=first.dtype,
            global_shape=first.global_shape,
            offsets=(0,) * len(first.global_shape),
            sizes=first.global_shape,
            kind=ChunkKind.BOX,
        )
        records = {place.record.file: place.record for place in self.tensors[name]}
        stored = [StoredChunk(source=place.record.file, chunk=place.chunk) for place in self.tensors[name]]
        whole = bytearray(spec.byte_count)
        for copy in plan_reads(spec, stored):
            view = memoryview(whole)[copy.target_begin : copy.target_begin + copy.length]
            read_range(self.storage, records[copy.source], begin=copy.source_begin, into=view)
        return whole


def diff_steps(a: tuple[Storage, Manifest], b: tuple[Storage, Manifest]) -> DiffReport:
    """Compare two stored steps.

    Args:
        a: a store and a manifest in it.
        b: another, or the same store.

    Raises:
        CheckpointFault: one of them is damaged, so that it cannot be compared.
        StorageError: the storage refuses.
    """
    left, right = _Side(storage=a[0], manifest=a[1]), _Side(storage=b[0], manifest=b[1])
    left.open()
    right.open()
    found: list[Difference] = []
    equal = 0
    compared = 0
    for name in sorted(left.tensors.keys() | right.tensors.keys()):
        difference, count = _compare(left, right, name)
        compared += count
        if difference is None:
            equal += 1
        else:
            found.append(difference)
    found += _compare_states(left, right)
    return DiffReport(differences=tuple(found), tensors_equal=equal, bytes_compared=compared)


def _compare(left: _Side, right: _Side, name: str) -> tuple[Difference | None, int]:
    ours, theirs = left.tensors.get(name), right.tensors.get(name)
    if ours is None or theirs is None:
        kind = DifferenceKind.ONLY_B if ours is None else DifferenceKind.ONLY_A
        return Difference(kind=kind, name=name, detail="the other does not have it"), 0
    a, b = ours[0].chunk, theirs[0].chunk
    if a.dtype != b.dtype:
        return Difference(kind=DifferenceKind.RETYPED, name=name, detail=f"{a.dtype}, {b.dtype}"), 0
    if a.global_shape != b.global_shape:
        detail = f"{list(a.global_shape)}, {list(b.global_shape)}"
        return Difference(kind=DifferenceKind.RESHAPED, name=name, detail=detail), 0
    if [_cut(place) for place in ours] == [_cut(place) for place in theirs]:
        return _compare_chunks(left, right, name)
    mine, other = left.whole(name), right.whole(name)
    if mine == other:
        return None, len(mine)
    at = next(_first_difference(mine, other))
    return _values(name, at // DTYPE_BYTES[a.dtype], ()), len(mine)


def _cut(place: _Place) -> tuple[int, ChunkKind, tuple[int, ...], tuple[int, ...]]:
    return place.rank, place.chunk.kind, place.chunk.offsets, place.chunk.sizes


def _compare_chunks(left: _Side, right: _Side, name: str) -> tuple[Difference | None, int]:
    compared = 0
    ranks: list[int] = []
    first = -1
    for ours, theirs in zip(left.tensors[name], right.tensors[name], strict=True):
        at = _compare_ranges(left, ours, right, theirs)
        compared += ours.chunk.end - ours.chunk.begin
        if at is not None:
            ranks.append(ours.rank)
            first = at if first < 0 else first
    if not ranks:
        return None, compared
    size = DTYPE_BYTES[left.tensors[name][0].chunk.dtype]
    return _values(name, first // size, tuple(ranks)), compared


def _values(name: str, element: int, ranks: tuple[int, ...]) -> Difference:
    of = f" of its chunk on rank {ranks[0]}" if ranks else ""
    return Difference(
        kind=DifferenceKind.VALUES, name=name, detail=f"first at element {element}{of}", ranks=ranks
    )


def _compare_ranges(left: _Side, ours: _Place, right: _Side, theirs: _Place) -> int | None:
    """Offset of the first byte that differs."""
    length = ours.chunk.end - ours.chunk.begin
    for at in range(0, length, WINDOW_BYTES):
        stop = min(at + WINDOW_BYTES, length)
        mine = left.read(ours.record, ours.chunk.begin + at, ours.chunk.begin + stop)
        other = right.read(theirs.record, theirs.chunk.begin + at, theirs.chunk.begin + stop)
        if mine != other:
            return at + next(_first_difference(mine, other))
    return None


def _first_difference(a: bytes | bytearray, b: bytes | bytearray) -> Iterator[int]:
    """Offsets of bytes that differ, found by halving, so that Python looks at few of them."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high) // 2
        if a[low : middle + 1] != b[low : middle + 1]:
            high = middle
        else:
            low = middle + 1
    yield low


def _compare_states(left: _Side, right: _Side) -> Sequence[Difference]:
    if left.manifest.world_size != right.manifest.world_size:
        detail = f"{left.manifest.world_size}, {right.manifest.world_size}; plain state is not compared"
        return [Difference(kind=DifferenceKind.WORLD_SIZE, name="world_size", detail=detail)]
    ranks = tuple(rank for rank in sorted(left.states) if left.state(rank) != right.state(rank))
    if not ranks:
        return []
    detail = "values that are not tensors (random state, counters, …) differ"
    return [Difference(kind=DifferenceKind.STATE, name=STATE_NAME, detail=detail, ranks=ranks)]
