"""From a sealed memory slot to bytes on storage: all that the saver process needs of the disk side.

Every piece is compared with its seal while it is written durably; then the node's fragment is created. Both
may be repeated after a crash: what is there and equal is left alone, and what is there and different is never
overwritten, because a manifest may already stand on it.

Imports neither torch nor numpy: the saver process starts in milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from easyckpt.commit import (
    CommitOutcome,
    CommitResult,
    commit_manifest,
    ensure_root,
    next_generation,
    record_generation,
)
from easyckpt.digest import HASH_CHUNK_BYTES, BodyDigest, bytes_digest
from easyckpt.envelope import read_index
from easyckpt.errors import CorruptCheckpoint, Misuse, StaleGeneration, StorageConflict
from easyckpt.keep import KeepPolicy
from easyckpt.layout import STATE_LENGTH_BYTES, Layout, build_layout
from easyckpt.manifest import FRAGMENT_BYTES_MAX, Fragment, FragmentRef, LayoutRecord, PieceRecord
from easyckpt.paths import StepName, body_path, fragment_path
from easyckpt.piece import Extent
from easyckpt.read import LoadedPiece, LocatedPiece, load_piece, locate_piece, read_body
from easyckpt.retention import Removed, prune
from easyckpt.storage.base import Parts, Storage
from easyckpt.survey import VisibleStep, visible_steps

__all__ = [
    "CommitOutcome",
    "CommitResult",
    "KeepPolicy",
    "LoadedPiece",
    "LocatedPiece",
    "PieceMeta",
    "Removed",
    "VisibleStep",
    "commit_manifest",
    "ensure_root",
    "load_piece",
    "locate_piece",
    "make_fragment",
    "next_generation",
    "persist_piece",
    "prune",
    "read_body",
    "record_generation",
    "visible_steps",
    "write_fragment",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceMeta:
    """What the saver knows of one sealed slot."""

    generation: int
    step: int
    node_rank: int
    rank: int
    layout: Layout
    """With its header."""
    seal: BodyDigest
    """What the body was when it was complete."""
    layout_record: LayoutRecord | None = None
    """Of the same layout, where it was made before."""
    stored_by: tuple[int, int] | None = None
    """Node and rank that store the bytes before the plain state, which are equal to those of this piece."""

    @property
    def name(self) -> StepName:
        """Step and generation."""
        return StepName(step=self.step, generation=self.generation)


def persist_piece(storage: Storage, *, body: memoryview, piece: PieceMeta) -> PieceRecord:
    """Write one rank's body durably.

    Every part is compared with the seal just before it is written, so that memory that changed after the seal
    is never published.

    Args:
        storage: where to.
        body: the sealed slot; must not change meanwhile.
        piece: whose it is.

    Returns:
        What the fragment has to say of it.

    Raises:
        CorruptCheckpoint: the slot is not what was sealed.
        StaleGeneration: another piece was persisted under this name.
        StorageError: the storage refuses.
    """
    path = body_path(piece.name, node_rank=piece.node_rank, rank=piece.rank)
    view = body.cast("B") if body.nbytes else body
    _check_slot(view, piece, storage.where(path))
    record = PieceRecord(
        rank=piece.rank,
        file=path,
        bytes=len(view),
        digest=piece.seal.whole,
        hash_chunk_bytes=HASH_CHUNK_BYTES,
        chunk_hashes=piece.seal.chunks,
        layout=piece.layout.digest,
    )
    check = partial(_check_part, piece, storage.where(path))
    if piece.stored_by is not None and not any(view[piece.layout.state_end :]):
        own, extents = _own_part(view, piece)
        record = replace(record, extents=extents, file_bytes=len(own))
        if not _is_there(storage, piece, record):
            first = piece.layout.state_begin // HASH_CHUNK_BYTES * HASH_CHUNK_BYTES
            for begin in range(first, len(view), HASH_CHUNK_BYTES):
                check(begin, view[begin : begin + HASH_CHUNK_BYTES])
            storage.write_durable(path, own)
    elif not _is_there(storage, piece, record):
        storage.write_durable(path, view, parts=Parts(bytes=HASH_CHUNK_BYTES, check=check))
    return record


def _own_part(view: memoryview, piece: PieceMeta) -> tuple[bytearray, tuple[Extent, ...]]:
    """A file with the plain state alone, and where the body is then. Its last bytes, padding, are zeros."""
    assert piece.stored_by is not None, "asked only for a piece whose tensors another rank stores"
    begin, end = piece.layout.state_begin, piece.layout.state_end
    layout = build_layout([], state_bytes=end - begin - STATE_LENGTH_BYTES)
    own = bytearray(layout.body_bytes)
    own[: len(layout.header)] = layout.header
    own[layout.state_begin : layout.state_end] = view[begin:end]
    node_rank, rank = piece.stored_by
    return own, (
        Extent(begin=0, end=begin, node_rank=node_rank, rank=rank, file_begin=0),
        Extent(
            begin=begin,
            end=end,
            node_rank=piece.node_rank,
            rank=piece.rank,
            file_begin=layout.state_begin,
        ),
    )


def _check_part(piece: PieceMeta, where: str, begin: int, part: memoryview) -> None:
    if bytes_digest(part) != piece.seal.chunks[begin // HASH_CHUNK_BYTES]:
        raise CorruptCheckpoint(
            f"the memory of rank {piece.rank} changed after step {piece.step} was sealed, "
            f"in bytes {begin} to {begin + len(part)}",
            where=where,
            hint="the step is given up; if it happens again, test this machine's memory",
        )


def _check_slot(view: memoryview, piece: PieceMeta, where: str) -> None:
    layout = piece.layout
    if len(view) != layout.body_bytes:
        raise Misuse(f"a slot of {len(view)} bytes for a layout of {layout.body_bytes}", where=where)
    # Copied first: bytes compare at the speed of memory, views element by element.
    if not layout.header or bytes(view[: len(layout.header)]) != layout.header:
        raise CorruptCheckpoint(
            f"the slot of rank {piece.rank} does not begin with the header of its layout", where=where
        )


def _is_there(storage: Storage, piece: PieceMeta, record: PieceRecord) -> bool:
    """Whether a fragment that stands already has this very piece."""
    path = fragment_path(piece.name, node_rank=piece.node_rank)
    if not storage.exists(path):
        return False
    raw = read_index(storage, path, bytes_max=FRAGMENT_BYTES_MAX)
    fragment = Fragment.from_json(raw, where=storage.where(path))
    if record not in fragment.pieces:
        raise StaleGeneration(
            f"{piece.name} of rank {piece.rank} was persisted before, with other bytes",
            where=storage.where(path),
            hint="two jobs are using this folder, or a generation number was used twice",
        )
    found = storage.stat(record.file)
    return found is not None and found.bytes == record.length_of_file


def make_fragment(
    pieces: Iterable[tuple[PieceMeta, PieceRecord]], *, run_id: str, world_size: int
) -> Fragment:
    """The fragment of one node, of the pieces that it has persisted.

    Args:
        pieces: all of one step, generation and node, in any order.
        run_id: whose folder it is.
        world_size: of the generation.

    Raises:
        Misuse: they do not belong together.
    """
    ordered = sorted(pieces, key=lambda pair: pair[0].rank)
    metas = [meta for meta, _ in ordered]
    if len({(meta.name, meta.node_rank) for meta in metas}) != 1:
        raise Misuse("a fragment holds the pieces of one step of one node")
    layouts = {meta.layout.digest: meta.layout_record or LayoutRecord.of(meta.layout) for meta in metas}
    try:
        return Fragment(
            run_id=run_id,
            generation=metas[0].generation,
            step=metas[0].step,
            node_rank=metas[0].node_rank,
            world_size=world_size,
            pieces=tuple(record for _, record in ordered),
            layouts=tuple(layouts[digest] for digest in sorted(layouts)),
        )
    except ValueError as error:
        raise Misuse(f"these pieces make no fragment: {error}") from error


def write_fragment(storage: Storage, fragment: Fragment) -> FragmentRef:
    """Create a node's fragment, when all its bodies are durable. Repeating it is fine.

    Returns:
        What the manifest has to say of it.

    Raises:
        StaleGeneration: another fragment is there.
        StorageError: the storage refuses.
    """
    raw = fragment.to_json()
    ref = fragment.ref(raw)
    try:
        storage.write_durable(ref.file, raw, if_absent=True)
    except StorageConflict:
        if read_index(storage, ref.file, bytes_max=FRAGMENT_BYTES_MAX) != raw:
            raise StaleGeneration(
                f"another fragment of node {fragment.node_rank} for {fragment.name} is there",
                where=storage.where(ref.file),
                hint="two jobs are using this folder, or a generation number was used twice",
            ) from None
    return ref
