"""What a stored step consists of: pieces (one rank each), fragments (one node each), the manifest (all).

::

    manifest ──hash of each──▶ fragment ──hash of each 64 MiB──▶ body (a safetensors file)

A fragment is written when all bodies of its node are durable; the manifest when all fragments are. A step
exists if and only if its manifest does. So whoever sees a manifest can prove every byte below it.

Paths inside an index file are never followed blindly: in this schema every path has to be the one that its
step, generation, node and rank give, so that an index cannot point outside its own step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from easyckpt.digest import HASH_NAME, BodyDigest, bytes_digest, chunk_count
from easyckpt.envelope import SCHEMA, decode, encode
from easyckpt.errors import CorruptCheckpoint
from easyckpt.layout import HEADER_BYTES_MAX, Layout, layout_from_dict, layout_to_dict
from easyckpt.paths import StepName, body_path, fragment_path
from easyckpt.records import GenerationRecord, check_number, check_text, check_wall_time

__all__ = [
    "FRAGMENT_BYTES_MAX",
    "MANIFEST_BYTES_MAX",
    "SCHEMA",
    "Fragment",
    "FragmentRef",
    "GenerationRecord",
    "LayoutRecord",
    "Manifest",
    "PieceRecord",
]

BODY_BYTES_MAX = 1 << 50
RANKS_MAX = 1_000_000
METRICS_MAX = 100
HASH_CHUNK_BYTES_MIN = 4096

MANIFEST_BYTES_MAX = 256 << 20
"""About 100 bytes per rank and 250 per node; a million ranks fit."""
FRAGMENT_BYTES_MAX = 512 << 20
"""Layouts are the bulk: about 150 bytes per tensor, and equal ones stand once."""

_HASH = re.compile(r"[0-9a-f]{32}\Z")


def _check_hash(value: str, what: str) -> None:
    if not isinstance(value, str) or not _HASH.match(value):
        raise ValueError(f"{what} is no {HASH_NAME} in hex")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """A layout as an index keeps it: without the header, which stands in the body."""

    layout: Layout
    header_bytes: int

    def __post_init__(self) -> None:
        check_number(self.header_bytes, "header_bytes", least=8, most=HEADER_BYTES_MAX + 8)

    @classmethod
    def of(cls, layout: Layout) -> LayoutRecord:
        """From the layout of a live slot, which has its header."""
        return cls(layout=replace(layout, header=b""), header_bytes=len(layout.header))

    def to_plain(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**layout_to_dict(self.layout), "header_bytes": self.header_bytes}

    @classmethod
    def from_plain(cls, value: Mapping[str, Any], *, where: str) -> LayoutRecord:
        """Read it; nothing is trusted.

        Raises:
            CorruptCheckpoint: it cannot be a layout.
        """
        layout = layout_from_dict(dict(value), where=where)
        try:
            return cls(layout=layout, header_bytes=value["header_bytes"])
        except ValueError as error:
            raise CorruptCheckpoint(f"its layout cannot be read: {error}", where=where) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRecord:
    """One rank's bytes on storage, and how to prove them."""

    rank: int
    file: str
    bytes: int
    digest: str
    """Of all chunk hashes: equal to the seal of the memory slot that the body came from."""
    hash_chunk_bytes: int
    chunk_hashes: tuple[str, ...]
    layout: str
    """Digest of the layout; the fragment holds the layout itself."""

    def __post_init__(self) -> None:
        check_number(self.rank, "rank", most=RANKS_MAX)
        check_number(self.bytes, "bytes", least=8, most=BODY_BYTES_MAX)
        check_number(self.hash_chunk_bytes, "hash_chunk_bytes", least=HASH_CHUNK_BYTES_MIN, most=1 << 40)
        _check_hash(self.digest, "digest")
        _check_hash(self.layout, "layout")
        for value in self.chunk_hashes:
            _check_hash(value, "a chunk hash")
        expected = chunk_count(self.bytes, chunk_bytes=self.hash_chunk_bytes)
        if len(self.chunk_hashes) != expected:
            raise ValueError(
                f"rank {self.rank} has {len(self.chunk_hashes)} chunk hashes instead of {expected}"
            )
        if BodyDigest.of(self.chunk_hashes).whole != self.digest:
            raise ValueError(f"rank {self.rank} has a digest that is not that of its chunk hashes")

    @property
    def seal(self) -> BodyDigest:
        """The digest with the hashes that it is made of."""
        return BodyDigest(whole=self.digest, chunks=self.chunk_hashes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PieceFields:
    """A piece as it stands in the file."""

    rank: int
    file: str
    bytes: int
    digest: str
    hash_chunk_bytes: int
    chunk_hashes: tuple[str, ...]
    layout: str

    def checked(self, schema: int) -> PieceRecord:
        """The piece. In schema 1 the digest was the hash of the whole body; the chunk hashes say more."""
        plain = asdict(self)
        if schema == 1:
            _check_hash(self.digest, "digest")
            plain["digest"] = BodyDigest.of(self.chunk_hashes).whole
        return PieceRecord(**plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class _FragmentFields:
    """A fragment as it stands in the file."""

    schema: int
    run_id: str
    generation: int
    step: int
    node_rank: int
    world_size: int
    pieces: tuple[_PieceFields, ...]
    layouts: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """All pieces of one node."""

    KIND: ClassVar[str] = "easyckpt.fragment"

    run_id: str
    generation: int
    step: int
    node_rank: int
    world_size: int
    pieces: tuple[PieceRecord, ...]
    layouts: tuple[LayoutRecord, ...]
    """Each layout once, in the order of their digests."""

    def __post_init__(self) -> None:
        check_text(self.run_id, "run_id")
        check_number(self.generation, "generation", least=1)
        check_number(self.step, "step")
        check_number(self.node_rank, "node_rank", most=RANKS_MAX)
        check_number(self.world_size, "world_size", least=1, most=RANKS_MAX)
        if not self.pieces:
            raise ValueError("a fragment without pieces")
        ranks = [piece.rank for piece in self.pieces]
        if ranks != sorted(set(ranks)) or ranks[-1] >= self.world_size:
            raise ValueError(f"ranks {ranks} of {self.world_size} are not in order, or stand twice")
        digests = [record.layout.digest for record in self.layouts]
        if digests != sorted(set(digests)):
            raise ValueError("the layouts are not in the order of their digests, or stand twice")
        for piece in self.pieces:
            self._check_piece(piece)

    def _check_piece(self, piece: PieceRecord) -> None:
        expected = body_path(self.name, node_rank=self.node_rank, rank=piece.rank)
        if piece.file != expected:
            raise ValueError(f"rank {piece.rank} lies in {piece.file[:200]!r} instead of {expected!r}")
        layout = self.layout_of(piece).layout
        if layout.body_bytes != piece.bytes:
            raise ValueError(f"rank {piece.rank} has {piece.bytes} bytes, and its layout {layout.body_bytes}")

    @property
    def name(self) -> StepName:
        """Step and generation."""
        return StepName(step=self.step, generation=self.generation)

    def layout_of(self, piece: PieceRecord) -> LayoutRecord:
        """The layout that a piece refers to.

        Raises:
            ValueError: it is not in this fragment.
        """
        for record in self.layouts:
            if record.layout.digest == piece.layout:
                return record
        raise ValueError(f"rank {piece.rank} refers to a layout that is not there")

    def ref(self, raw: bytes) -> FragmentRef:
        """How a manifest refers to this fragment, written as ``raw``."""
        return FragmentRef(
            node_rank=self.node_rank,
            file=fragment_path(self.name, node_rank=self.node_rank),
            bytes=len(raw),
            hash=bytes_digest(raw),
            ranks=tuple(piece.rank for piece in self.pieces),
        )

    def to_json(self) -> bytes:
        """The file's bytes."""
        fields = {
            "run_id": self.run_id,
            "generation": self.generation,
            "step": self.step,
            "node_rank": self.node_rank,
            "world_size": self.world_size,
            "pieces": [asdict(piece) for piece in self.pieces],
            "layouts": [record.to_plain() for record in self.layouts],
        }
        return encode(self.KIND, fields, pretty=False)

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> Fragment:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        fields = decode(raw, cls.KIND, into=_FragmentFields, where=where)
        layouts = tuple(LayoutRecord.from_plain(value, where=where) for value in fields.layouts)
        try:
            return cls(
                run_id=fields.run_id,
                generation=fields.generation,
                step=fields.step,
                node_rank=fields.node_rank,
                world_size=fields.world_size,
                pieces=tuple(piece.checked(fields.schema) for piece in fields.pieces),
                layouts=layouts,
            )
        except ValueError as error:
            raise CorruptCheckpoint(f"a value in it is not valid: {error}", where=where) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentRef:
    """How a manifest refers to a fragment."""

    node_rank: int
    file: str
    bytes: int
    hash: str
    """xxh3-128 of the fragment's file."""
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        check_number(self.node_rank, "node_rank", most=RANKS_MAX)
        check_number(self.bytes, "bytes", least=1, most=FRAGMENT_BYTES_MAX)
        _check_hash(self.hash, "hash")
        for rank in self.ranks:
            check_number(rank, "rank", most=RANKS_MAX)
        if not self.ranks:
            raise ValueError(f"node {self.node_rank} has no ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A committed step: which fragments make it, and how to prove them."""

    KIND: ClassVar[str] = "easyckpt.manifest"

    run_id: str
    generation: int
    step: int
    world_size: int
    resumed_step: int | None
    """The step that this generation resumed from; None if it began without a checkpoint."""
    fragments: tuple[FragmentRef, ...]
    created_unix_s: float
    software: str
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    """What the caller of save() gave, for example ``{"loss": 1.2}``; retention can keep the best. JSON knows
    neither NaN nor infinity: they become None, which is never the best."""

    def __post_init__(self) -> None:
        check_text(self.run_id, "run_id")
        check_number(self.generation, "generation", least=1)
        check_number(self.step, "step")
        check_number(self.world_size, "world_size", least=1, most=RANKS_MAX)
        if self.resumed_step is not None:
            check_number(self.resumed_step, "resumed_step")
        check_text(self.software, "software", may_be_empty=True)
        check_wall_time(self.created_unix_s, "created_unix_s")
        if len(self.metrics) > METRICS_MAX:
            raise ValueError(f"{len(self.metrics)} metrics, more than {METRICS_MAX}")
        for key in self.metrics:
            check_text(key, "a metric's name")
        finite = {
            key: None if value is None or not math.isfinite(value) else float(value)
            for key, value in self.metrics.items()
        }
        object.__setattr__(self, "metrics", finite)
        self._check_fragments()

    def _check_fragments(self) -> None:
        nodes = [ref.node_rank for ref in self.fragments]
        if nodes != sorted(set(nodes)):
            raise ValueError("the fragments are not in the order of their nodes, or stand twice")
        for ref in self.fragments:
            expected = fragment_path(self.name, node_rank=ref.node_rank)
            if ref.file != expected:
                raise ValueError(
                    f"the fragment of node {ref.node_rank} is {ref.file[:200]!r} instead of {expected!r}"
                )
        ranks = sorted(rank for ref in self.fragments for rank in ref.ranks)
        if len(ranks) != self.world_size or ranks != list(range(self.world_size)):
            raise ValueError(f"the fragments do not hold each of {self.world_size} ranks exactly once")

    @property
    def name(self) -> StepName:
        """Step and generation."""
        return StepName(step=self.step, generation=self.generation)

    def same_content(self, other: Manifest) -> bool:
        """Whether both stand for the same bytes, whoever wrote them and when."""
        return replace(self, created_unix_s=0.0, software="") == replace(
            other, created_unix_s=0.0, software=""
        )

    def ref_of(self, rank: int) -> FragmentRef | None:
        """The fragment that holds a rank."""
        for ref in self.fragments:
            if rank in ref.ranks:
                return ref
        return None

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> Manifest:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)
