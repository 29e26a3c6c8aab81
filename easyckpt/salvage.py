"""The right bytes of damaged bodies, from wherever they still are. Part of `easyckpt.mend`, which says in
what order.

Nothing is written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from easyckpt.commit import read_fragment
from easyckpt.digest import bytes_digest, chunk_range
from easyckpt.errors import EasyckptError, StorageError
from easyckpt.fragment import Fragment, PieceRecord
from easyckpt.manifest import Manifest
from easyckpt.read import prove_header
from easyckpt.storage.base import Storage
from easyckpt.survey import Survey

__all__ = ["Body", "Piece", "Salvage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where bytes with some hash should be."""

    storage: Storage
    path: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A body, with all that is known of it."""

    fragment: Fragment
    record: PieceRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What has to be written; no bytes if the file is right."""

    bytes: bytearray | None
    detail: str


class Salvage:
    """Looks for bytes in a folder and in others that may have the same run's files.

    Args:
        storage: the folder.
        others: the others.
    """

    def __init__(self, storage: Storage, others: tuple[Storage, ...]) -> None:
        self._storage = storage
        self._others = others
        self._places: dict[str, list[_Place]] | None = None

    def bodies(self, pieces: list[Piece], found: Survey) -> dict[int, Body | None]:
        """What has to be written for each rank; None where nothing has the right bytes."""
        mended: dict[int, Body | None] = {}
        files: dict[str, bytearray] = {}
        # First those that are whole: the others have only what is their own, and refer to these.
        for piece in sorted(pieces, key=lambda piece: bool(piece.record.extents)):
            record = piece.record
            body = self._own_part(record, files) if record.extents else self._whole(piece, pieces, found)
            mended[record.rank] = body
            if body is not None and body.bytes is not None:
                files[record.file] = body.bytes
        return mended

    def _whole(self, piece: Piece, pieces: list[Piece], found: Survey) -> Body | None:
        record = piece.record
        damaged = self._damaged_chunks(record)
        if not damaged:
            return Body(bytes=None, detail="")
        body = bytearray(record.bytes)
        self._read_what_is_there(record, memoryview(body))
        sources: set[str] = set()
        for index in damaged:
            begin, end = _range(record, index)
            room = memoryview(body)[begin:end]
            source = self._from_elsewhere(record, index, room, pieces, found)
            source = source or self._from_neighbours(piece, index, room, pieces)
            if source is None:
                return None
            sources.add(source)
        layout = piece.fragment.layout_of(record)
        prove_header(memoryview(body), record, layout=layout, where=self._storage.where(record.file))
        detail = f"{len(damaged)} of {len(record.chunk_hashes)} chunks from {', '.join(sorted(sources))}"
        return Body(bytes=body, detail=detail)

    def _own_part(self, record: PieceRecord, files: dict[str, bytearray]) -> Body | None:
        """The file of a rank whose tensors another rank stores: as it is, or from a copy."""
        length = record.length_of_file
        there = self._storage.stat(record.file)
        if there is not None and there.bytes == length and self._proves(record, files):
            return Body(bytes=None, detail="")
        for other in self._others:
            try:
                data = bytearray(other.read(record.file, 0, length + 1))
            except StorageError:
                continue  # not there either
            if len(data) == length and self._proves(record, {**files, record.file: data}):
                return Body(bytes=data, detail=f"from {other.where(record.file)}")
        return None

    def _proves(self, record: PieceRecord, files: dict[str, bytearray]) -> bool:
        """Whether all chunks are right, with these files in the place of those that are there."""
        for index, digest in enumerate(record.chunk_hashes):
            begin, end = _range(record, index)
            room = bytearray(end - begin)
            for part in record.stored(begin, end):
                if not part.file:
                    continue  # zeros
                length = part.end - part.begin
                if part.file in files:
                    data: bytes | bytearray = files[part.file][part.file_begin : part.file_begin + length]
                else:
                    data = self._storage.read(part.file, part.file_begin, part.file_begin + length)
                room[part.begin - begin : part.begin - begin + len(data)] = data
            if bytes_digest(room) != digest:
                return False
        return True

    def _damaged_chunks(self, record: PieceRecord) -> list[int]:
        found = self._storage.stat(record.file)
        if found is None or found.bytes > record.bytes:  # a longer file is written anew
            return list(range(len(record.chunk_hashes)))
        return [index for index in range(len(record.chunk_hashes)) if not self._is_right(record, index)]

    def _is_right(self, record: PieceRecord, index: int) -> bool:
        begin, end = _range(record, index)
        return bytes_digest(self._storage.read(record.file, begin, end)) == record.chunk_hashes[index]

    def _read_what_is_there(self, record: PieceRecord, room: memoryview) -> None:
        if self._storage.exists(record.file):
            self._storage.read_into(record.file, room)

    def _from_elsewhere(
        self, record: PieceRecord, index: int, room: memoryview, pieces: list[Piece], found: Survey
    ) -> str | None:
        """The chunk from a file that has the same bytes: of a copy, of another step, or swapped."""
        wanted = record.chunk_hashes[index]
        begin, end = _range(record, index)
        places = [_Place(storage=other, path=record.file, begin=begin, end=end) for other in self._others]
        places += self._known_places(found).get(wanted, ())
        for other_piece in pieces:
            file = other_piece.record.file
            places.append(_Place(storage=self._storage, path=file, begin=begin, end=end))
        for place in places:
            try:
                data = place.storage.read(place.path, place.begin, place.end)
            except StorageError:
                continue  # not there either
            if bytes_digest(data) == wanted:
                room[:] = data
                return str(place.storage.where(place.path))
        return None

    def _known_places(self, found: Survey) -> dict[str, list[_Place]]:
        """Chunk hash → where it should be, over all steps of this folder. Made when it is needed first."""
        if self._places is None:
            self._places = {}
            for item in found.visible:
                for record in self._records(item.manifest):
                    if record.extents:
                        continue  # what it refers to is among the others
                    for index, digest in enumerate(record.chunk_hashes):
                        begin, end = _range(record, index)
                        place = _Place(storage=self._storage, path=record.file, begin=begin, end=end)
                        self._places.setdefault(digest, []).append(place)
        return self._places

    def _records(self, manifest: Manifest) -> Iterator[PieceRecord]:
        for ref in manifest.fragments:
            try:
                yield from read_fragment(self._storage, ref, manifest).pieces
            except EasyckptError:
                continue  # its bodies cannot serve as a source then

    def _from_neighbours(self, piece: Piece, index: int, room: memoryview, pieces: list[Piece]) -> str | None:
        """The chunk as it is, with the tensors that another rank holds too laid over it."""
        record = piece.record
        begin, end = _range(record, index)
        mine = piece.fragment.layout_of(record).layout.chunks
        before = bytes(room)
        for other in pieces:
            if other is piece or other.record.extents:
                continue
            theirs = {
                (chunk.name, chunk.kind, chunk.offsets, chunk.sizes): chunk
                for chunk in other.fragment.layout_of(other.record).layout.chunks
            }
            for chunk in mine:
                twin = theirs.get((chunk.name, chunk.kind, chunk.offsets, chunk.sizes))
                low, high = max(chunk.begin, begin), min(chunk.end, end)
                if twin is None or low >= high:
                    continue
                at = twin.begin + low - chunk.begin
                try:
                    data = self._storage.read(other.record.file, at, at + high - low)
                except StorageError:
                    break
                if len(data) == high - low:
                    room[low - begin : high - begin] = data
            if bytes_digest(room) == record.chunk_hashes[index]:
                where: str = self._storage.where(other.record.file)
                return where
            room[:] = before
        return None


def _range(record: PieceRecord, index: int) -> tuple[int, int]:
    return chunk_range(index, length=record.bytes, chunk_bytes=record.hash_chunk_bytes)
