"""One rank's bytes on storage: how long they are, where they lie, and how to prove them.

What is stored need not be the body as it was in memory: ranks with equal bytes store them once. So a piece
speaks of the body, and its *extents* say where the bytes of that body are. Whoever reads goes through
`PieceRecord.stored`, and proves the body by its hashes, wherever the bytes came from.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from easyckpt.digest import HASH_NAME, BodyDigest, chunk_count
from easyckpt.paths import body_path, parse_data
from easyckpt.records import check_number

__all__ = ["RANKS_MAX", "Extent", "PieceFields", "PieceRecord", "Stored", "check_hash"]

BODY_BYTES_MAX = 1 << 50
RANKS_MAX = 1_000_000
HASH_CHUNK_BYTES_MIN = 4096
EXTENTS_MAX = 4096

_HASH = re.compile(r"[0-9a-f]{32}\Z")


def check_hash(value: str, what: str) -> None:
    """Raise ValueError unless it is a hash in hex."""
    if not isinstance(value, str) or not _HASH.match(value):
        raise ValueError(f"{what} is no {HASH_NAME} in hex")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes of a body that lie in a file of the same step: in that of its own rank, or of one that has equal
    bytes."""

    begin: int
    """First byte in the body."""
    end: int
    node_rank: int
    rank: int
    """Whose file; with its node it gives the path."""
    file_begin: int
    """First byte in the file."""

    def __post_init__(self) -> None:
        check_number(self.begin, "begin", most=BODY_BYTES_MAX)
        check_number(self.end, "end", least=self.begin + 1, most=BODY_BYTES_MAX)
        check_number(self.node_rank, "node_rank", most=RANKS_MAX)
        check_number(self.rank, "rank", most=RANKS_MAX)
        check_number(self.file_begin, "file_begin", most=BODY_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A range of a body, and where it is; without a file it is zeros."""

    begin: int
    end: int
    file: str = ""
    file_begin: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRecord:
    """One rank's bytes on storage, and how to prove them.

    Length, digest and hashes are those of the whole body, as it was in memory. Where the body, or a part of
    it, is stored is another matter: see `stored`.
    """

    rank: int
    file: str
    bytes: int
    digest: str
    """Of all chunk hashes: equal to the seal of the memory slot that the body came from."""
    hash_chunk_bytes: int
    chunk_hashes: tuple[str, ...]
    layout: str
    """Digest of the layout; the fragment holds the layout itself."""
    extents: tuple[Extent, ...] = ()
    """Where the body's bytes are; what no extent covers is zeros. Empty: the file is the body."""
    file_bytes: int = 0
    """Length of the file, if it is not that of the body."""

    def __post_init__(self) -> None:
        check_number(self.rank, "rank", most=RANKS_MAX)
        check_number(self.bytes, "bytes", least=8, most=BODY_BYTES_MAX)
        check_number(self.hash_chunk_bytes, "hash_chunk_bytes", least=HASH_CHUNK_BYTES_MIN, most=1 << 40)
        check_hash(self.digest, "digest")
        check_hash(self.layout, "layout")
        for value in self.chunk_hashes:
            check_hash(value, "a chunk hash")
        expected = chunk_count(self.bytes, chunk_bytes=self.hash_chunk_bytes)
        if len(self.chunk_hashes) != expected:
            raise ValueError(
                f"rank {self.rank} has {len(self.chunk_hashes)} chunk hashes instead of {expected}"
            )
        if BodyDigest.of(self.chunk_hashes).whole != self.digest:
            raise ValueError(f"rank {self.rank} has a digest that is not that of its chunk hashes")
        self._check_extents()

    def _check_extents(self) -> None:
        if not self.extents:
            if self.file_bytes not in (0, self.bytes):
                raise ValueError(f"rank {self.rank} has a file of another length than its body")
            return
        check_number(self.file_bytes, "file_bytes", least=8, most=BODY_BYTES_MAX)
        if len(self.extents) > EXTENTS_MAX:
            raise ValueError(f"rank {self.rank} has {len(self.extents)} extents, more than {EXTENTS_MAX}")
        at = 0
        for extent in self.extents:
            if extent.begin < at or extent.end > self.bytes:
                raise ValueError(f"an extent of rank {self.rank} overlaps another one, or leaves the body")
            at = extent.end

    @property
    def length_of_file(self) -> int:
        """Of the rank's own file."""
        return self.file_bytes or self.bytes

    def to_plain(self) -> dict[str, Any]:
        """Plain JSON values."""
        plain = asdict(self)
        if not self.extents:
            del plain["extents"], plain["file_bytes"]
        return plain

    def stored(self, begin: int, end: int) -> tuple[Stored, ...]:
        """Where a range of the body is, in order and without a gap."""
        if not self.extents:
            return (Stored(begin=begin, end=end, file=self.file, file_begin=begin),)
        found = []
        data = parse_data(self.file)
        assert data is not None, "the fragment checks its paths"
        at = begin
        for extent in self.extents:
            low, high = max(extent.begin, begin), min(extent.end, end)
            if low >= high:
                continue
            if low > at:
                found.append(Stored(begin=at, end=low))
            file = body_path(data.name, node_rank=extent.node_rank, rank=extent.rank)
            start = extent.file_begin + low - extent.begin
            found.append(Stored(begin=low, end=high, file=file, file_begin=start))
            at = high
        if at < end:
            found.append(Stored(begin=at, end=end))
        return tuple(found)

    @property
    def seal(self) -> BodyDigest:
        """The digest with the hashes that it is made of."""
        return BodyDigest(whole=self.digest, chunks=self.chunk_hashes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceFields:
    """A piece as it stands in the file."""

    rank: int
    file: str
    bytes: int
    digest: str
    hash_chunk_bytes: int
    chunk_hashes: tuple[str, ...]
    layout: str
    extents: tuple[Extent, ...] = ()
    file_bytes: int = 0

    def checked(self, schema: int) -> PieceRecord:
        """The piece. In schema 1 the digest was the hash of the whole body; the chunk hashes say more."""
        digest = self.digest
        if schema == 1:
            check_hash(digest, "digest")
            digest = BodyDigest.of(self.chunk_hashes).whole
        return PieceRecord(
            rank=self.rank,
            file=self.file,
            bytes=self.bytes,
            digest=digest,
            hash_chunk_bytes=self.hash_chunk_bytes,
            chunk_hashes=self.chunk_hashes,
            layout=self.layout,
            extents=self.extents,
            file_bytes=self.file_bytes,
        )
