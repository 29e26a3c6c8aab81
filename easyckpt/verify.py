"""Reading a stored step back, and saying exactly what is wrong with it.

Nothing is raised for damage: all of it is collected, per rank and file. What could not be read is *unknown*,
which is never counted as good. A full pass reads every byte; with a byte budget the index files, the lengths
and the headers of all ranks are proved, and as many chunks as the budget allows, spread evenly over the step.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum

from easyckpt.commit import read_fragment
from easyckpt.digest import bytes_digest, chunk_range
from easyckpt.errors import CheckpointFault, EasyckptError, IncompleteCheckpoint, StorageError
from easyckpt.manifest import Fragment, Manifest, PieceRecord
from easyckpt.paths import StepName
from easyckpt.piece import Stored
from easyckpt.read import check_length, prove_header, read_range, where_of
from easyckpt.storage.base import Storage

__all__ = ["Finding", "FindingKind", "StepVerdict", "verify_step"]


class FindingKind(Enum):
    """What kind of trouble."""

    MISSING = "missing"  # not there, or shorter than it has to be
    CORRUPT = "corrupt"  # differs from its hash, or cannot be what it claims
    SWAPPED = "swapped"  # holds the bytes of another rank
    UNREADABLE = "unreadable"  # the storage refuses: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong."""

    kind: FindingKind
    where: str
    detail: str
    ranks: tuple[int, ...]
    """Whose bytes it concerns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepVerdict:
    """What reading a step back found."""

    name: StepName
    findings: tuple[Finding, ...]
    bytes_proved: int
    bytes_total: int
    """Of all bodies whose fragments could be read."""

    @property
    def is_good(self) -> bool:
        """Nothing wrong in what was read."""
        return not self.findings

    @property
    def is_whole(self) -> bool:
        """Every byte was read."""
        return self.bytes_proved == self.bytes_total

    @property
    def is_unknown(self) -> bool:
        """Not proved good, and nothing proved wrong either: the storage refuses."""
        return bool(self.findings) and all(item.kind is FindingKind.UNREADABLE for item in self.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    record: PieceRecord
    index: int
    ranks: tuple[int, ...] = ()
    """Whose bytes these are: several, if they are stored once for all of them."""

    @property
    def range(self) -> tuple[int, int]:
        return chunk_range(self.index, length=self.record.bytes, chunk_bytes=self.record.hash_chunk_bytes)


def verify_step(
    storage: Storage,
    manifest: Manifest,
    *,
    byte_budget: int | None = None,
    on_bytes: Callable[[int, int], None] | None = None,
) -> StepVerdict:
    """Prove a step, and collect what is wrong.

    Args:
        storage: where it lies.
        manifest: which.
        byte_budget: read about this many bytes of bodies at most; None reads all.
        on_bytes: told (proved so far, to be proved) after each chunk.
    """
    findings: list[Finding] = []
    fragments = []
    for ref in manifest.fragments:
        try:
            fragments.append(read_fragment(storage, ref, manifest))
        except EasyckptError as error:
            findings.append(_finding(error, ref.ranks, storage.where(ref.file)))
    whole: list[_Chunk] = []
    for fragment in fragments:
        for record in fragment.pieces:
            try:
                _check_piece(storage, fragment, record, manifest.step)
            except EasyckptError as error:
                findings.append(_finding(error, (record.rank,), storage.where(record.file)))
                continue
            whole += [_Chunk(record=record, index=index) for index in range(len(record.chunk_hashes))]
    whole = _each_once(whole)
    chosen = list(_within(whole, byte_budget))
    lengths = [end - begin for begin, end in (chunk.range for chunk in chosen)]
    wanted = sum(lengths)
    # Whole pages, used again: so reading goes past the page cache, and takes no memory from training.
    room = memoryview(mmap.mmap(-1, max(lengths, default=1)))
    proved = 0
    for chunk in chosen:
        begin, end = chunk.range
        finding = _check_chunk(storage, chunk, fragments, room[: end - begin])
        if finding is None:
            proved += end - begin
        else:
            findings.append(finding)
        if on_bytes is not None:
            on_bytes(proved, wanted)
    return StepVerdict(
        name=manifest.name,
        findings=tuple(findings),
        bytes_proved=proved,
        bytes_total=sum(end - begin for begin, end in (chunk.range for chunk in whole)),
    )


def _finding(error: EasyckptError, ranks: tuple[int, ...], where: str) -> Finding:
    if isinstance(error, IncompleteCheckpoint):
        kind = FindingKind.MISSING
    elif isinstance(error, CheckpointFault):
        kind = FindingKind.CORRUPT
    elif isinstance(error, StorageError):
        kind = FindingKind.UNREADABLE
    else:
        raise error
    return Finding(kind=kind, where=where, detail=error.what, ranks=ranks)


def _check_piece(storage: Storage, fragment: Fragment, record: PieceRecord, step: int) -> None:
    """Length and header: what a budget never leaves out."""
    check_length(storage, record, step=step)
    layout = fragment.layout_of(record)
    first = bytearray(layout.header_bytes)
    read_range(storage, record, begin=0, into=memoryview(first))
    prove_header(memoryview(first), record, layout=layout, where=storage.where(record.file))


def _each_once(chunks: list[_Chunk]) -> list[_Chunk]:
    """Bytes that are stored once for several ranks are read once."""
    found: dict[tuple[str, tuple[Stored, ...]], list[_Chunk]] = {}
    for chunk in chunks:
        places = tuple(
            replace(part, begin=0, end=part.end - part.begin) for part in chunk.record.stored(*chunk.range)
        )
        found.setdefault((chunk.record.chunk_hashes[chunk.index], places), []).append(chunk)
    return [
        replace(same[0], ranks=tuple(sorted(chunk.record.rank for chunk in same))) for same in found.values()
    ]


def _within(chunks: list[_Chunk], byte_budget: int | None) -> Iterator[_Chunk]:
    total = sum(end - begin for begin, end in (chunk.range for chunk in chunks))
    if byte_budget is None or total <= byte_budget or not chunks:
        yield from chunks
        return
    count = min(len(chunks), max(1, byte_budget * len(chunks) // total)) if byte_budget > 0 else 0
    for number in range(count):
        # Evenly spread, the last chunk always among them: a write that was cut off shows at the end.
        yield chunks[(number + 1) * len(chunks) // count - 1]


def _check_chunk(
    storage: Storage, chunk: _Chunk, fragments: list[Fragment], room: memoryview
) -> Finding | None:
    record = chunk.record
    begin, end = chunk.range
    where = where_of(storage, record, begin=begin, end=end)
    try:
        got = read_range(storage, record, begin=begin, into=room)
    except StorageError as error:
        return _finding(error, chunk.ranks, where)
    digest = bytes_digest(room[:got])
    if digest == record.chunk_hashes[chunk.index]:
        return None
    other = _whose(digest, chunk, fragments)
    if other is not None:
        return Finding(
            kind=FindingKind.SWAPPED,
            where=where,
            detail=f"bytes {begin} to {end} of rank {record.rank} are those of rank {other}",
            ranks=(*chunk.ranks, other),
        )
    return Finding(
        kind=FindingKind.CORRUPT,
        where=where,
        detail=f"bytes {begin} to {end} of rank {record.rank} differ from their hash",
        ranks=chunk.ranks,
    )


def _whose(digest: str, chunk: _Chunk, fragments: list[Fragment]) -> int | None:
    for fragment in fragments:
        for record in fragment.pieces:
            if record is not chunk.record and record.chunk_hashes[chunk.index : chunk.index + 1] == (digest,):
                return record.rank
    return None
