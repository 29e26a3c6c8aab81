"""What one node wrote of a step: its pieces (one rank each), how to prove them, and their layouts.

With many tensors the layouts are nearly all of a fragment, and they stay the same from step to step. So a
layout is written from the bytes that it had before, a layout that was read before is not read again, and
`FragmentHead` leaves them out for who needs the pieces alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import msgspec

from easyckpt.digest import bytes_digest
from easyckpt.envelope import decode, encode
from easyckpt.errors import CorruptCheckpoint
from easyckpt.layout import HEADER_BYTES_MAX, Layout, layout_from_dict, layout_to_dict
from easyckpt.paths import StepName, body_path, fragment_path
from easyckpt.piece import RANKS_MAX, PieceFields, PieceRecord, check_hash
from easyckpt.records import check_number, check_text

__all__ = [
    "FRAGMENT_BYTES_MAX",
    "RANKS_MAX",
    "Fragment",
    "FragmentHead",
    "FragmentRef",
    "LayoutRecord",
    "PieceRecord",
]


FRAGMENT_BYTES_MAX = 512 << 20
"""Layouts are the bulk: about 150 bytes per tensor, and equal ones stand once."""

LAYOUTS_REMEMBERED = 4
"""Parsed ones that are kept, for reading: one of 100,000 tensors takes some 60 MB."""

_Kind = TypeVar("_Kind", bound="FragmentHead")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRecord:
    """A layout as an index keeps it: without the header, which stands in the body."""

    layout: Layout
    header_bytes: int
    _encoded: bytes = field(default=b"", init=False, compare=False, repr=False)
    """Its JSON, where that is at hand; not taken over when something is replaced."""

    def __post_init__(self) -> None:
        check_number(self.header_bytes, "header_bytes", least=8, most=HEADER_BYTES_MAX + 8)

    @classmethod
    def of(cls, layout: Layout) -> LayoutRecord:
        """From the layout of a live slot, which has its header."""
        record = cls(layout=replace(layout, header=b""), header_bytes=len(layout.header))
        return record._knowing(msgspec.json.encode(record.to_plain()))

    def _knowing(self, encoded: bytes) -> LayoutRecord:
        object.__setattr__(self, "_encoded", encoded)
        return self

    def to_plain(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**layout_to_dict(self.layout), "header_bytes": self.header_bytes}

    def to_json(self) -> msgspec.Raw:
        """The same, as it stands in a file."""
        return msgspec.Raw(self._encoded or msgspec.json.encode(self.to_plain()))

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
class _HeadFields:
    """A fragment as it stands in the file, without its layouts."""

    schema: int
    run_id: str
    generation: int
    step: int
    node_rank: int
    world_size: int
    pieces: tuple[PieceFields, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _FragmentFields(_HeadFields):
    layouts: tuple[msgspec.Raw, ...]


@functools.lru_cache(maxsize=LAYOUTS_REMEMBERED)
def _layout_from_json(raw: bytes) -> LayoutRecord:
    value = msgspec.json.decode(raw, type=dict[str, Any])
    return LayoutRecord.from_plain(value, where="")._knowing(raw)


def _read_layout(raw: msgspec.Raw, where: str) -> LayoutRecord:
    try:
        return _layout_from_json(bytes(raw))
    except CorruptCheckpoint as error:
        raise CorruptCheckpoint(error.what, where=where) from error
    except msgspec.MsgspecError as error:
        raise CorruptCheckpoint(f"its layout cannot be read: {error}", where=where) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentHead:
    """All pieces of one node, without the layouts that they refer to."""

    KIND: ClassVar[str] = "easyckpt.fragment"

    run_id: str
    generation: int
    step: int
    node_rank: int
    world_size: int
    pieces: tuple[PieceRecord, ...]

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
        for piece in self.pieces:
            expected = body_path(self.name, node_rank=self.node_rank, rank=piece.rank)
            if piece.file != expected:
                raise ValueError(f"rank {piece.rank} lies in {piece.file[:200]!r} instead of {expected!r}")
            if any(extent.rank >= self.world_size for extent in piece.extents):
                raise ValueError(f"bytes of rank {piece.rank} lie with a rank that there is not")

    @property
    def name(self) -> StepName:
        """Step and generation."""
        return StepName(step=self.step, generation=self.generation)

    @classmethod
    def head_from_json(cls, raw: bytes, *, where: str) -> FragmentHead:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return _made(FragmentHead, decode(raw, cls.KIND, into=_HeadFields, where=where), where)


def _made(kind: type[_Kind], fields: _HeadFields, where: str, **more: Any) -> _Kind:
    try:
        return kind(
            run_id=fields.run_id,
            generation=fields.generation,
            step=fields.step,
            node_rank=fields.node_rank,
            world_size=fields.world_size,
            pieces=tuple(piece.checked(fields.schema) for piece in fields.pieces),
            **more,
        )
    except ValueError as error:
        raise CorruptCheckpoint(f"a value in it is not valid: {error}", where=where) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment(FragmentHead):
    """All pieces of one node."""

    layouts: tuple[LayoutRecord, ...]
    """Each layout once, in the order of their digests."""

    def __post_init__(self) -> None:
        FragmentHead.__post_init__(self)
        digests = [record.layout.digest for record in self.layouts]
        if digests != sorted(set(digests)):
            raise ValueError("the layouts are not in the order of their digests, or stand twice")
        for piece in self.pieces:
            layout = self.layout_of(piece).layout
            if layout.body_bytes != piece.bytes:
                raise ValueError(
                    f"rank {piece.rank} has {piece.bytes} bytes, and its layout {layout.body_bytes}"
                )

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
            "pieces": [piece.to_plain() for piece in self.pieces],
            "layouts": [record.to_json() for record in self.layouts],
        }
        return encode(self.KIND, fields, pretty=False)

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> Fragment:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        fields = decode(raw, cls.KIND, into=_FragmentFields, where=where)
        layouts = tuple(_read_layout(value, where) for value in fields.layouts)
        return _made(Fragment, fields, where, layouts=layouts)


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
        check_hash(self.hash, "hash")
        for rank in self.ranks:
            check_number(rank, "rank", most=RANKS_MAX)
        if not self.ranks:
            raise ValueError(f"node {self.node_rank} has no ranks")
