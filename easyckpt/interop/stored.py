"""A committed step as logical tensors and values, read from storage without a running job.

Theory of operation. The layouts of all ranks say which bytes of which body are which part of which tensor
(`easyckpt.reshard` cuts the intervals). `StoredStep.scatter` turns that around: it goes through the bodies
once, hash chunk by hash chunk, proves each chunk, and copies what is wanted out of it. So every byte that
leaves has been proved, each is read once, and memory holds one chunk (64 MiB), whatever the number of ranks,
the kind of sharding, or the size of the step.

Where several ranks hold the same elements, those of the preferred rank are taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from easyckpt.commit import read_fragment
from easyckpt.digest import chunk_range
from easyckpt.errors import CorruptCheckpoint, Misuse, NothingToLoad
from easyckpt.layout import DTYPE_BYTES, STATE_LENGTH_BYTES, Chunk, ChunkSpec
from easyckpt.manifest import LayoutRecord, Manifest, PieceRecord
from easyckpt.plain import unpack
from easyckpt.read import prove_header, read_chunk
from easyckpt.reshard import Copy, StoredChunk, plan_reads
from easyckpt.storage.base import Storage
from easyckpt.survey import survey

__all__ = ["OnBytes", "StoredStep", "StoredTensor", "open_step"]

OnBytes = Callable[[int, int], None]
"""Told (bytes done, bytes to do)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A logical tensor, all of it."""

    name: str
    dtype: str
    """By torch's name without ``torch.``."""
    shape: tuple[int, ...]
    alias_of: str | None
    """The tied tensor that holds the bytes, if this one does not."""

    @property
    def byte_count(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    record: PieceRecord
    layout: LayoutRecord


class StoredStep:
    """One step of a checkpoint folder, opened for reading. Its index is proved when it is made.

    Args:
        storage: where it lies.
        manifest: which step.
        rank: whose values are taken where ranks differ.

    Raises:
        Misuse: there is no such rank.
        CheckpointFault: the index is damaged or incomplete.
        StorageError: the storage refuses.
    """

    def __init__(self, storage: Storage, manifest: Manifest, *, rank: int = 0) -> None:
        if not 0 <= rank < manifest.world_size:
            raise Misuse(f"rank {rank} is none of the {manifest.world_size} ranks of step {manifest.step}")
        self.storage = storage
        self.manifest = manifest
        self.rank = rank
        pieces: dict[int, _Piece] = {}
        for ref in manifest.fragments:
            fragment = read_fragment(storage, ref, manifest)
            for record in fragment.pieces:
                pieces[record.rank] = _Piece(record=record, layout=fragment.layout_of(record))
        order = sorted(pieces, key=lambda number: (number != rank, number))
        self._pieces = {pieces[number].record.file: pieces[number] for number in order}
        self._by_rank = pieces
        self._chunks: dict[str, list[StoredChunk]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        for file, piece in self._pieces.items():
            for chunk in piece.layout.layout.chunks:
                self._chunks.setdefault(chunk.name, []).append(StoredChunk(source=file, chunk=chunk))
                self.tensors.setdefault(chunk.name, _tensor_of(chunk))

    @property
    def step(self) -> int:
        """The training step."""
        return self.manifest.step

    def tree(self, rank: int | None = None) -> Any:
        """A rank's state, with a `TensorRef` in the place of each tensor and a `PartNode` in that of each
        object.

        Args:
            rank: whose; None is the preferred one.

        Raises:
            CheckpointFault: its bytes are damaged or missing.
        """
        own = self._by_rank[self.rank if rank is None else rank]
        record, layout = own.record, own.layout.layout
        where = self.storage.where(record.file)
        prove_header(self._read(record, 0, own.layout.header_bytes), record,
                     layout=own.layout, where=where)  # fmt: skip
        state = self._read(record, layout.state_begin, layout.state_end)
        length = int.from_bytes(state[:STATE_LENGTH_BYTES], "little")
        if STATE_LENGTH_BYTES + length > len(state):
            raise CorruptCheckpoint("its plain state is longer than its room", where=where)
        return unpack(state[STATE_LENGTH_BYTES : STATE_LENGTH_BYTES + length], where=where)

    def chunks_of(self, name: str) -> tuple[Chunk, ...]:
        """The stored parts of a logical tensor, those of the preferred rank first."""
        return tuple(item.chunk for item in self._chunks[name])

    def scatter(self, targets: Mapping[str, memoryview], *, on_bytes: OnBytes | None = None) -> None:
        """Copy whole logical tensors out. See `fill`.

        Args:
            targets: name of each wanted tensor → flat writable bytes of its length.
            on_bytes: told how far it is.
        """
        self.fill(
            [(_whole(self.tensors[name]), target) for name, target in targets.items()], on_bytes=on_bytes
        )

    def fill(
        self, wanted: Iterable[tuple[ChunkSpec, memoryview]], *, on_bytes: OnBytes | None = None
    ) -> None:
        """Copy any boxes or ranges of logical tensors out, proved, in one pass over the bodies.

        Args:
            wanted: what, of which tensor, and flat writable bytes of its length.
            on_bytes: told how far it is.

        Raises:
            CheckpointFault: something is damaged or missing; what was written then must not be used.
            StorageError: the storage refuses.
        """
        jobs: dict[str, list[tuple[Copy, memoryview]]] = {}
        for spec, target in wanted:
            for copy in plan_reads(spec, self._chunks[spec.name]):
                jobs.setdefault(copy.source, []).append((copy, target))
        touched = {file: sorted(_touched(self._pieces[file].record, jobs[file])) for file in jobs}
        total = sum(_length(self._pieces[file].record, index) for file in touched for index in touched[file])
        done = 0
        for file, indices in touched.items():
            record = self._pieces[file].record
            mine = sorted(jobs[file], key=lambda job: job[0].source_begin)
            first = 0
            for index in indices:
                begin, end = _range(record, index)
                data = memoryview(self._proved(record, index))
                while first < len(mine) and mine[first][0].source_begin + mine[first][0].length <= begin:
                    first += 1
                for number in range(first, len(mine)):
                    copy, target = mine[number]
                    if copy.source_begin >= end:
                        break
                    low = max(begin, copy.source_begin)
                    high = min(end, copy.source_begin + copy.length)
                    if low < high:
                        at = copy.target_begin + low - copy.source_begin
                        target[at : at + high - low] = data[low - begin : high - begin]
                done += end - begin
                if on_bytes is not None:
                    on_bytes(done, total)

    def _read(self, record: PieceRecord, begin: int, end: int) -> bytes:
        """A range of a body, proved."""
        parts = []
        for index in range(begin // record.hash_chunk_bytes, -(-end // record.hash_chunk_bytes)):
            low, high = _range(record, index)
            parts.append(self._proved(record, index)[max(begin, low) - low : min(end, high) - low])
        return b"".join(parts)

    def _proved(self, record: PieceRecord, index: int) -> bytearray:
        begin, end = _range(record, index)
        data = bytearray(end - begin)
        read_chunk(self.storage, record, index=index, into=memoryview(data), step=self.step)
        return data


def _whole(tensor: StoredTensor) -> ChunkSpec:
    return ChunkSpec(
        name=tensor.name,
        dtype=tensor.dtype,
        global_shape=tensor.shape,
        offsets=(0,) * len(tensor.shape),
        sizes=tensor.shape,
    )


def _tensor_of(chunk: Chunk) -> StoredTensor:
    return StoredTensor(name=chunk.name, dtype=chunk.dtype, shape=chunk.global_shape, alias_of=chunk.alias_of)


def _range(record: PieceRecord, index: int) -> tuple[int, int]:
    return chunk_range(index, length=record.bytes, chunk_bytes=record.hash_chunk_bytes)


def _length(record: PieceRecord, index: int) -> int:
    begin, end = _range(record, index)
    return end - begin


def _touched(record: PieceRecord, jobs: Iterable[tuple[Copy, memoryview]]) -> set[int]:
    """The hash chunks that any copy takes bytes from."""
    size = record.hash_chunk_bytes
    return {
        index
        for copy, _ in jobs
        for index in range(copy.source_begin // size, -(-(copy.source_begin + copy.length) // size))
    }


def open_step(storage: Storage, *, step: int | None = None, rank: int = 0) -> StoredStep:
    """The newest step of a folder, or a given one.

    Raises:
        NothingToLoad: it is not offered.
        CheckpointFault: its index is damaged.
        StorageError: the storage refuses.
    """
    found = survey(storage)
    chosen = next((item for item in found.visible if step is None or item.step == step), None)
    if chosen is None:
        what = "no step can be loaded" if step is None else f"step {step} is not offered"
        raise NothingToLoad(what, where=storage.where(), hint="`easyckpt ls --all` shows what is there")
    return StoredStep(storage, chosen.manifest, rank=rank)
