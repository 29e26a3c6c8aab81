"""Reading the header of a body (a safetensors file) without trusting it.

A safetensors file is 8 bytes of header length (little endian), a JSON object, then the data. Each entry of
the object names a type, a shape and a byte range of the data; the ranges have to cover the data without gap
or overlap. What the format forbids is refused here, before any offset is used. Source of the rules: the
format's description at https://huggingface.co/docs/safetensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from easyckpt.errors import CorruptCheckpoint
from easyckpt.layout import HEADER_BYTES_MAX, METADATA_KEY, Layout

__all__ = ["BodyEntry", "BodyHeader", "check_layout", "header_length", "parse_header"]

LENGTH_BYTES = 8
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyEntry:
    """One tensor of the file."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Counted from the start of the file."""
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyHeader:
    """The whole header."""

    data_begin: int
    entries: tuple[BodyEntry, ...]
    """In the order of their bytes."""


def header_length(first: bytes | memoryview, *, body_bytes: int, where: str) -> int:
    """Length of the header with its length word, from the file's first 8 bytes.

    Raises:
        CorruptCheckpoint: it cannot be that long.
    """
    if len(first) < LENGTH_BYTES:
        raise CorruptCheckpoint("it is too short for a safetensors file", where=where)
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > HEADER_BYTES_MAX or LENGTH_BYTES + length > body_bytes:
        raise CorruptCheckpoint(f"its header claims {length} bytes, in a file of {body_bytes}", where=where)
    return LENGTH_BYTES + length


def parse_header(header: bytes | memoryview, *, body_bytes: int, where: str) -> BodyHeader:
    """Read and check a header.

    Args:
        header: the file's first bytes; at least as many as `header_length` says.
        body_bytes: length of the file.
        where: named in errors.

    Raises:
        CorruptCheckpoint: it is no sound safetensors header.
    """
    begin = header_length(header, body_bytes=body_bytes, where=where)
    try:
        table = json.loads(bytes(header[LENGTH_BYTES:begin]), object_pairs_hook=_unique)
        if not isinstance(table, dict):
            raise ValueError("it is no object")
        table.pop(METADATA_KEY, None)
        entries = [_entry(key, value, begin) for key, value in table.items()]
        entries.sort(key=lambda entry: (entry.begin, entry.end))
        _check_cover(entries, begin, body_bytes)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptCheckpoint(f"its safetensors header is not sound: {error}", where=where) from error
    return BodyHeader(data_begin=begin, entries=tuple(entries))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _entry(key: str, value: Any, data_begin: int) -> BodyEntry:
    dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
    if dtype not in DTYPE_BITS:
        raise ValueError(f"{key[:100]!r} has the unknown type {str(dtype)[:20]!r}")
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end)):
        raise ValueError(f"{key[:100]!r} has a size that is no size")
    if end - begin != math.prod(shape) * DTYPE_BITS[dtype] // 8:
        raise ValueError(f"{key[:100]!r} has another length than its type and shape give")
    return BodyEntry(key=key, dtype=dtype, shape=shape, begin=data_begin + begin, end=data_begin + end)


def _check_cover(entries: Sequence[BodyEntry], begin: int, end: int) -> None:
    at = begin
    for entry in entries:
        if entry.begin != at or entry.end < entry.begin:
            word = "overlaps what is before it" if entry.begin < at else "leaves a gap before it"
            raise ValueError(f"{entry.key[:100]!r} {word}")
        at = entry.end
    if at != end:
        raise ValueError(f"its tensors end at byte {at} of {end}")


def check_layout(header: BodyHeader, layout: Layout, *, where: str) -> None:
    """Prove that index and body speak of the same bytes.

    Raises:
        CorruptCheckpoint: a chunk of the layout is not where the header has it.
    """
    places = {entry.key: (entry.begin, entry.end) for entry in header.entries}
    owners: set[str] = set()
    for chunk in layout.chunks:
        if places.get(chunk.key) != (chunk.begin, chunk.end):
            raise CorruptCheckpoint(
                f"{chunk.name[:100]!r} lies elsewhere in the file than the index says", where=where
            )
        if chunk.alias_of is None:
            if chunk.key in owners:
                raise CorruptCheckpoint(f"{chunk.key[:100]!r} stands for two tensors", where=where)
            owners.add(chunk.key)
