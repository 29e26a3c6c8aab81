"""Reading one rank's bytes back, and proving them before anybody uses them.

The chain: the manifest's hash of the fragment, the fragment's hash of every 64 MiB, then the body's own
header against the index. Chunks are read and proved beside each other. Nothing is handed out before it is
proved, and an error names the file, the bytes and the rank, so that a caller can take that piece from another
tier or an older step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from easyckpt.bodyfile import check_layout, header_length, parse_header
from easyckpt.commit import read_fragment
from easyckpt.digest import bytes_digest, chunk_range
from easyckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, Misuse, StorageMissing
from easyckpt.lanes import run_lanes
from easyckpt.layout import Layout, layout_from_dict
from easyckpt.manifest import LayoutRecord, Manifest, PieceRecord
from easyckpt.storage.base import Storage

__all__ = [
    "LoadedPiece",
    "LocatedPiece",
    "check_length",
    "load_piece",
    "locate_piece",
    "locate_pieces",
    "prove_header",
    "read_body",
    "read_chunk",
    "read_range",
    "where_of",
]

ZEROS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedPiece:
    """A piece that storage should have: proved down to the fragment, its body not yet read."""

    step: int
    record: PieceRecord
    layout: LayoutRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPiece:
    """A piece whose every byte was proved."""

    record: PieceRecord
    layout: Layout
    """With its header."""


def locate_piece(storage: Storage, manifest: Manifest, rank: int) -> LocatedPiece:
    """Find one rank's piece, so that the caller knows how much memory it takes.

    Raises:
        IncompleteCheckpoint: the rank is not in the step, or its fragment is not there.
        CorruptCheckpoint: the fragment differs from what the manifest says.
        StorageError: the storage refuses.
    """
    ref = manifest.ref_of(rank)
    if ref is None:
        raise IncompleteCheckpoint(
            f"step {manifest.step} was saved by {manifest.world_size} ranks, and has no rank {rank}",
            where=storage.where(),
            hint=f"start {manifest.world_size} workers",
        )
    fragment = read_fragment(storage, ref, manifest)
    for record in fragment.pieces:
        if record.rank == rank:
            return LocatedPiece(step=manifest.step, record=record, layout=fragment.layout_of(record))
    raise AssertionError("read_fragment() checks the ranks")


def locate_pieces(storage: Storage, manifest: Manifest, ranks: tuple[int, ...]) -> dict[int, LocatedPiece]:
    """As `locate_piece`, for several ranks; each fragment is read once."""
    found: dict[int, LocatedPiece] = {}
    wanted = set(ranks)
    for ref in manifest.fragments:
        if not wanted.intersection(ref.ranks):
            continue
        fragment = read_fragment(storage, ref, manifest)
        layouts = {layout.layout.digest: layout for layout in fragment.layouts}
        for record in fragment.pieces:
            if record.rank in wanted:
                layout = layouts[record.layout]
                found[record.rank] = LocatedPiece(step=manifest.step, record=record, layout=layout)
    lacking = sorted(wanted - set(found))
    if lacking:
        raise IncompleteCheckpoint(
            f"ranks {lacking[:8]} are not in step {manifest.step}", where=storage.where()
        )
    return found


def load_piece(
    storage: Storage,
    manifest: Manifest,
    *,
    rank: int,
    into: memoryview,
    located: LocatedPiece | None = None,
) -> LoadedPiece:
    """Read one rank's body and prove every byte of it.

    Args:
        storage: where from.
        manifest: of a step that `visible_steps` offers.
        rank: whose.
        into: writable, as long as the piece.
        located: what `locate_piece` gave, to spare reading the fragment again.

    Raises:
        IncompleteCheckpoint: something is missing or too short.
        CorruptCheckpoint: something differs from its hash; what ``into`` holds then must not be used.
        StorageError: the storage refuses.
    """
    piece = located if located is not None else locate_piece(storage, manifest, rank)
    layout = read_body(storage, piece, into=into)
    return LoadedPiece(record=piece.record, layout=layout)


def read_body(
    storage: Storage,
    piece: LocatedPiece,
    *,
    into: memoryview,
    have: Mapping[int, memoryview] | None = None,
    reserve: Callable[[int, int], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Layout:
    """Read a body whole, prove it, and return its layout with the header. See `load_piece` for the errors.

    Args:
        storage: where from.
        piece: which.
        into: writable, as long as the piece.
        have: chunk → bytes that are said to be the same, at hand already; proved like all others.
        reserve: called with the first byte and the one behind the last of each chunk before it is written,
            from several threads: memory that comes as it is needed is made ready beside the reading.
        on_bytes: told the length of each chunk that was proved, from one thread at a time.
    """
    record = piece.record
    view = into.cast("B") if into.nbytes else into
    if len(view) != record.bytes or view.readonly:
        raise Misuse(f"a writable buffer of {record.bytes} bytes is needed, not of {len(view)}")
    check_length(storage, record, step=piece.step)
    lock = threading.Lock()

    def one(index: int) -> None:
        begin, end = chunk_range(index, length=record.bytes, chunk_bytes=record.hash_chunk_bytes)
        room = view[begin:end]
        if reserve is not None:
            reserve(begin, end)
        known = have.get(index) if have is not None else None
        if known is not None:
            room[:] = known
        if known is None or bytes_digest(room) != record.chunk_hashes[index]:
            read_chunk(storage, record, index=index, into=room, step=piece.step)
        if on_bytes is not None:
            with lock:
                on_bytes(end - begin)

    run_lanes([partial(one, index) for index in range(len(record.chunk_hashes))])
    return prove_header(view, record, layout=piece.layout, where=storage.where(record.file))


def check_length(storage: Storage, record: PieceRecord, *, step: int) -> None:
    """Raise IncompleteCheckpoint unless the body is there in its full length."""
    found = storage.stat(record.file)
    length = record.length_of_file
    if found is None or found.bytes != length:
        has = "is not there" if found is None else f"has {found.bytes} bytes instead of {length}"
        raise IncompleteCheckpoint(
            f"the body of rank {record.rank} {has}", where=storage.where(record.file), hint=_older(step)
        )


def read_chunk(storage: Storage, record: PieceRecord, *, index: int, into: memoryview, step: int) -> None:
    """Read one hash chunk into a buffer of its length, and prove it."""
    begin, end = chunk_range(index, length=record.bytes, chunk_bytes=record.hash_chunk_bytes)
    where = where_of(storage, record, begin=begin, end=end)
    try:
        got = read_range(storage, record, begin=begin, into=into)
    except StorageMissing:
        got = 0
    if got != end - begin:
        raise IncompleteCheckpoint(
            f"the body of rank {record.rank} ends at byte {begin + got}", where=where, hint=_older(step)
        )
    if bytes_digest(into) != record.chunk_hashes[index]:
        raise CorruptCheckpoint(
            f"bytes {begin} to {end} of rank {record.rank} differ from their hash",
            where=where,
            hint=_older(step),
        )


def where_of(storage: Storage, record: PieceRecord, *, begin: int, end: int) -> str:
    """The files that a range of a body lies in, for messages."""
    files = dict.fromkeys(part.file for part in record.stored(begin, end) if part.file)
    return ", ".join(storage.where(file) for file in files) or storage.where(record.file)


def read_range(storage: Storage, record: PieceRecord, *, begin: int, into: memoryview) -> int:
    """Fill a buffer with a range of a body, wherever its bytes are stored. Nothing is proved.

    Returns:
        How many bytes there were, up to the first that is not there.

    Raises:
        StorageMissing: a file is not there.
        StorageError: the storage refuses.
    """
    for part in record.stored(begin, begin + len(into)):
        room = into[part.begin - begin : part.end - begin]
        if not part.file:
            for at in range(0, len(room), ZEROS_BYTES):
                room[at : at + ZEROS_BYTES] = bytes(min(ZEROS_BYTES, len(room) - at))
            continue
        got = storage.read_into(part.file, room, part.file_begin)
        if got != len(room):
            return part.begin - begin + got
    return len(into)


def prove_header(
    first: bytes | memoryview, record: PieceRecord, *, layout: LayoutRecord, where: str
) -> Layout:
    """The layout with its header, after proving that index and body agree.

    Args:
        first: the body's first bytes, at least ``layout.header_bytes`` of them.
        record: the body.
        layout: its layout, from the fragment.
        where: named in errors.

    Raises:
        CorruptCheckpoint: they do not.
    """
    length = header_length(first, body_bytes=record.bytes, where=where)
    if length != layout.header_bytes:
        raise CorruptCheckpoint(
            f"its header has {length} bytes, and the index says {layout.header_bytes}", where=where
        )
    header = bytes(first[:length])
    check_layout(parse_header(header, body_bytes=record.bytes, where=where), layout.layout, where=where)
    return layout_from_dict(layout.to_plain(), header=header, where=where)


def _older(step: int) -> str:
    return f"`easyckpt why {step}` says more; `easyckpt ls` shows older steps"
