"""Which stored bytes make a wanted chunk: intersection of intervals, and nothing else.

Every chunk, box or flat range, is a set of *runs* of the flattened logical tensor: stretches of elements that
are contiguous both there and in the chunk. A box that is whole in its last dimensions has few and long ones.
To fill a wanted chunk, its runs are intersected with those of each stored chunk, the first one that has an
element gives it (replicas are equal), and what nobody has is an error that names the first missing element.
The same few lines map DDP to FSDP2 to ZeRO and one world size to another, because none of them is known here.

Pure: no bytes are read. Work and memory grow with the number of runs, `RUNS_MAX` at most.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from easyckpt.errors import IncompleteCheckpoint, Misuse, StateMismatch
from easyckpt.layout import DTYPE_BYTES, Chunk, ChunkKind, ChunkSpec

__all__ = ["Copy", "Run", "StoredChunk", "intersect", "plan_reads", "runs"]

RUNS_MAX = 1 << 22
"""Of one chunk: a matrix of four million rows that is cut along its columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements that are contiguous in the logical tensor and in the chunk."""

    logical: int
    local: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChunk:
    """A chunk and the file that holds it."""

    source: str
    chunk: Chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Bytes to bring from a file to the wanted chunk."""

    source: str
    source_begin: int
    """Counted from the start of the file."""
    target_begin: int
    """Counted from the start of the wanted chunk."""
    length: int


def runs(chunk: Chunk | ChunkSpec) -> Iterator[Run]:
    """The chunk's runs, in the order of the logical tensor. None if it is empty.

    Raises:
        Misuse: there are more than `RUNS_MAX`.
    """
    if math.prod(chunk.sizes) == 0:
        return
    if chunk.kind is ChunkKind.FLAT or not chunk.sizes:
        yield Run(logical=chunk.offsets[0] if chunk.offsets else 0, local=0, length=math.prod(chunk.sizes))
        return
    strides = [math.prod(chunk.global_shape[dim + 1 :]) for dim in range(len(chunk.sizes))]
    outer = len(chunk.sizes) - 1
    while outer > 0 and chunk.sizes[outer] == chunk.global_shape[outer]:
        outer -= 1
    length = chunk.sizes[outer] * strides[outer]
    count = math.prod(chunk.sizes[:outer])
    if count > RUNS_MAX:
        raise Misuse(f"a chunk of {count} separate runs, more than {RUNS_MAX}", where=chunk.name)
    base = sum(offset * stride for offset, stride in zip(chunk.offsets, strides, strict=True))
    for number, index in enumerate(itertools.product(*(range(size) for size in chunk.sizes[:outer]))):
        logical = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield Run(logical=logical, local=number * length, length=length)


def plan_reads(wanted: ChunkSpec, stored: Sequence[StoredChunk]) -> tuple[Copy, ...]:
    """The copies that fill a wanted chunk, in the order of its bytes.

    Args:
        wanted: the chunk to fill.
        stored: what there is of the same logical tensor, in order of preference.

    Raises:
        StateMismatch: another type or shape is stored.
        IncompleteCheckpoint: an element is nowhere.
    """
    for item in stored:
        have = item.chunk
        if (have.dtype, have.global_shape) != (wanted.dtype, wanted.global_shape):
            change = f"{wanted.name}: {have.dtype}{list(have.global_shape)} is stored"
            raise StateMismatch(
                f"{wanted.dtype}{list(wanted.global_shape)} was asked for",
                changed=(change,),
                where=wanted.name,
            )
    size = DTYPE_BYTES[wanted.dtype]
    left = list(runs(wanted))
    copies: list[Copy] = []
    for item in stored:
        if not left:
            break
        left, found = intersect(left, runs(item.chunk))
        copies += [
            Copy(
                source=item.source,
                source_begin=item.chunk.begin + theirs * size,
                target_begin=ours * size,
                length=length * size,
            )
            for ours, theirs, length in found
        ]
    if left:
        raise IncompleteCheckpoint(
            f"element {left[0].logical} of {wanted.name} is in none of the stored pieces",
            where=wanted.name,
            hint="load an older step",
        )
    return _joined(sorted(copies, key=lambda copy: copy.target_begin))


def intersect(wanted: list[Run], have: Iterator[Run]) -> tuple[list[Run], list[tuple[int, int, int]]]:
    """What is still wanted, and (wanted's local, have's local, length) of what was found. Both are sorted."""
    left: list[Run] = []
    found: list[tuple[int, int, int]] = []
    current = next(have, None)
    for run in wanted:
        at, end = run.logical, run.logical + run.length
        while at < end:
            while current is not None and current.logical + current.length <= at:
                current = next(have, None)
            stop = end if current is None else min(end, max(at, current.logical))
            if stop > at:
                left.append(Run(logical=at, local=run.local + at - run.logical, length=stop - at))
                at = stop
            elif current is not None:
                stop = min(end, current.logical + current.length)
                found.append((run.local + at - run.logical, current.local + at - current.logical, stop - at))
                at = stop
    return left, found


def _joined(copies: list[Copy]) -> tuple[Copy, ...]:
    """Neighbours that are neighbours in the file too, as one."""
    joined: list[Copy] = []
    for copy in copies:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.source == copy.source
            and last.source_begin + last.length == copy.source_begin
            and last.target_begin + last.length == copy.target_begin
        ):
            joined[-1] = Copy(
                source=last.source,
                source_begin=last.source_begin,
                target_begin=last.target_begin,
                length=last.length + copy.length,
            )
        else:
            joined.append(copy)
    return tuple(joined)
