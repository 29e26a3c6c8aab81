"""Where each tensor of one rank lies in its slot, which is byte for byte a safetensors file.

A layout is made once from the list of tensors and stays the same for as long as their names, types and shapes
do. The body is::

    8 bytes  length of the header, little endian
    header   JSON of safetensors, padded with spaces so that the data begins at a multiple of 4 KiB
    data     large tensors (≥ 4 KiB) each at a multiple of 4 KiB, then small ones packed at multiples of
             64 bytes, then `__state__`; the total length is a multiple of 4 KiB

safetensors allows no holes, so every gap is an explicit U8 tensor named ``__pad__#k``. Aligned tensors can be
written with O_DIRECT, mapped, and registered with a GPU.

``__state__`` (U8) holds all values that are not tensors: 8 bytes of length, little endian, then typed
msgpack of that length (see `easyckpt.plain`), then zeros. It has room to grow, so that a longer list of
losses does not change the layout.

A tensor of the file is named like the logical tensor when it is the whole of it, else ``<name>#<offsets>``. A
type that safetensors does not know is stored as U8 bytes; the layout keeps the logical type.

A tied tensor is stored once: each further name is a chunk with ``alias_of`` set to the name that holds the
bytes, and the same byte range.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import xxhash

from easyckpt.errors import CorruptCheckpoint, Misuse

__all__ = [
    "ALIGNMENT",
    "DTYPE_BYTES",
    "SAFETENSORS_DTYPE",
    "SMALL_ALIGNMENT",
    "Chunk",
    "ChunkKind",
    "ChunkSpec",
    "Layout",
    "build_layout",
    "encode_layout",
    "layout_from_dict",
    "layout_to_dict",
]

ALIGNMENT = 4096
"""Bytes. Of the data's begin, of large tensors and of the total: what O_DIRECT and page mapping want."""

SMALL_ALIGNMENT = 64
"""Bytes. Of packed tensors: a cache line, and a multiple of every element size."""

STATE_KEY = "__state__"
PAD_PREFIX = "__pad__#"
METADATA_KEY = "__metadata__"
STATE_LENGTH_BYTES = 8

HEADER_BYTES_MAX = 100_000_000
"""What the safetensors library itself accepts."""

NAME_BYTES_MAX = 4096
DIMENSIONS_MAX = 64

DTYPE_BYTES: Mapping[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8,
    "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8,
    "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}  # fmt: skip
"""Element size of every logical type that can be stored, by torch's name."""

SAFETENSORS_DTYPE: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32":
    "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class ChunkKind(Enum):
    """Geometry of a chunk within its logical tensor."""

    BOX = "box"  # an n-dimensional box: offsets and sizes per dimension
    FLAT = "flat"  # a range of the flattened logical tensor: offsets=(start,), sizes=(length,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """A chunk that wants a place: what is known before the layout is made."""

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    kind: ChunkKind = ChunkKind.BOX
    alias_of: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the chunk is all of its logical tensor."""
        if self.kind is ChunkKind.FLAT:
            return self.offsets == (0,) and self.sizes == (math.prod(self.global_shape),)
        return self.sizes == self.global_shape and not any(self.offsets)

    @property
    def key(self) -> str:
        """Name of the tensor in the safetensors file."""
        if self.is_whole:
            return self.name
        return f"{self.name}#{','.join(map(str, self.offsets))}"

    @property
    def byte_count(self) -> int:
        """Bytes that the chunk's elements take."""
        return math.prod(self.sizes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A stored part of a logical tensor, and where it lies."""

    key: str
    """Tensor name inside the safetensors body; several chunks share it when they are aliases."""
    name: str
    """Logical tensor name, for example ``model.encoder.weight``."""
    kind: ChunkKind
    dtype: str
    """Logical type by torch's name without ``torch.``."""
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """First byte, counted from the start of the file."""
    end: int
    alias_of: str | None = None
    """Name of the tied tensor that holds the bytes, if this one does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All chunks of one rank, the room for plain state, and the finished header."""

    chunks: tuple[Chunk, ...]
    state_begin: int
    """First byte of ``__state__``."""
    state_end: int
    body_bytes: int
    header: bytes
    """The file's first bytes, up to where the data begins."""
    digest: str
    """xxh3-128, hex, of the header and the canonical JSON of the chunks."""


def build_layout(specs: Iterable[ChunkSpec], *, state_bytes: int) -> Layout:
    """Give every chunk its place.

    Args:
        specs: chunks in a stable order; an alias comes after the chunk that it names.
        state_bytes: room for plain state, without its length word.

    Raises:
        Misuse: a name is taken twice, reserved, or too long.
    """
    wanted = tuple(specs)
    keys = _check_names(wanted)
    entries: list[tuple[str, str, tuple[int, ...], int, int]] = []  # key, type, shape, begin, end
    places: dict[str, tuple[str, int, int]] = {}  # name → key, begin, end
    cursor = 0
    pads = 0

    def pad_to(alignment: int) -> None:
        nonlocal cursor, pads
        gap = -cursor % alignment
        if gap:
            entries.append((f"{PAD_PREFIX}{pads}", "U8", (gap,), cursor, cursor + gap))
            pads += 1
            cursor += gap

    owners = [
        (spec, key, spec.byte_count) for spec, key in zip(wanted, keys, strict=True) if spec.alias_of is None
    ]
    large = [owner for owner in owners if owner[2] >= ALIGNMENT]
    small = [owner for owner in owners if owner[2] < ALIGNMENT]
    for group, alignment in ((large, ALIGNMENT), (small, SMALL_ALIGNMENT)):
        for spec, key, byte_count in group:
            pad_to(alignment if byte_count else 1)
            end = cursor + byte_count
            stored = SAFETENSORS_DTYPE.get(spec.dtype)
            shape = spec.sizes if stored else (byte_count,)
            entries.append((key, stored or "U8", shape, cursor, end))
            places[spec.name] = (key, cursor, end)
            cursor = end
    pad_to(SMALL_ALIGNMENT)
    state_begin = cursor
    cursor += STATE_LENGTH_BYTES + state_bytes
    entries.append((STATE_KEY, "U8", (cursor - state_begin,), state_begin, cursor))
    pad_to(ALIGNMENT)

    header = _render_header(entries)
    start = len(header)
    chunks = tuple(_place(spec, places, start) for spec in wanted)
    return _finish(chunks, start + state_begin, start + state_begin + STATE_LENGTH_BYTES + state_bytes,
                   body_bytes=start + cursor, header=header)  # fmt: skip


def _check_names(specs: tuple[ChunkSpec, ...]) -> list[str]:
    """The key of each."""
    seen: set[str] = set()
    keys: set[str] = set()
    in_order: list[str] = []
    for spec in specs:
        key = spec.key
        if spec.name in (STATE_KEY, METADATA_KEY) or spec.name.startswith(PAD_PREFIX):
            raise Misuse("this name is reserved", where=spec.name, hint="rename the key in the state")
        if len(spec.name.encode(errors="surrogatepass")) > NAME_BYTES_MAX:
            raise Misuse(f"a tensor name is longer than {NAME_BYTES_MAX} bytes", where=spec.name[:80] + "…")
        if spec.dtype not in DTYPE_BYTES:
            raise Misuse(f"tensors of type {spec.dtype} cannot be stored", where=spec.name)
        if spec.name in seen or (spec.alias_of is None and key in keys):
            raise Misuse("two tensors have this name", where=spec.name, hint="rename one key in the state")
        if spec.alias_of is not None and spec.alias_of not in seen:
            raise Misuse(f"an alias of {spec.alias_of}, which is not there", where=spec.name)
        seen.add(spec.name)
        keys.add(key)
        in_order.append(key)
    return in_order


def _render_header(entries: list[tuple[str, str, tuple[int, ...], int, int]]) -> bytes:
    table: dict[str, Any] = {METADATA_KEY: {"format": "easyckpt"}}
    for key, dtype, shape, begin, end in entries:
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    if len(text) > HEADER_BYTES_MAX:
        raise Misuse(f"the header of the checkpoint takes {len(text)} bytes, more than {HEADER_BYTES_MAX}")
    return len(text).to_bytes(8, "little") + text


def _place(spec: ChunkSpec, places: Mapping[str, tuple[str, int, int]], start: int) -> Chunk:
    key, begin, end = places[spec.alias_of or spec.name]
    return Chunk(
        key=key,
        name=spec.name,
        kind=spec.kind,
        dtype=spec.dtype,
        global_shape=spec.global_shape,
        offsets=spec.offsets,
        sizes=spec.sizes,
        begin=start + begin,
        end=start + end,
        alias_of=spec.alias_of,
    )


def _finish(
    chunks: tuple[Chunk, ...], state_begin: int, state_end: int, *, body_bytes: int, header: bytes
) -> Layout:
    canonical = json.dumps([_chunk_to_list(chunk) for chunk in chunks], separators=(",", ":")).encode()
    digest = xxhash.xxh3_128(header)
    digest.update(canonical)
    return Layout(
        chunks=chunks,
        state_begin=state_begin,
        state_end=state_end,
        body_bytes=body_bytes,
        header=header,
        digest=digest.hexdigest(),
    )


def _chunk_to_list(chunk: Chunk) -> list[Any]:
    return [chunk.key, chunk.name, chunk.kind.value, chunk.dtype, list(chunk.global_shape),
            list(chunk.offsets), list(chunk.sizes), chunk.begin, chunk.end, chunk.alias_of]  # fmt: skip


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """The layout as plain JSON values, without the header, which stands in the body itself."""
    return {
        "chunks": [_chunk_to_list(chunk) for chunk in layout.chunks],
        "state": [layout.state_begin, layout.state_end],
        "body_bytes": layout.body_bytes,
        "header_bytes": len(layout.header),
        "digest": layout.digest,
    }


def encode_layout(layout: Layout, *, header_bytes: int | None = None) -> bytes:
    """The layout as it travels between processes. Equal layouts give equal bytes: savers group by them.

    Args:
        layout: the layout.
        header_bytes: length of the header, where the layout was read without it.
    """
    length = len(layout.header) if header_bytes is None else header_bytes
    return msgspec.json.encode({**layout_to_dict(layout), "header_bytes": length})


def layout_from_dict(value: object, *, header: bytes | None = None, where: str = "") -> Layout:
    """Read back what `layout_to_dict` made; nothing in it is trusted.

    Args:
        value: parsed JSON.
        header: the body's first bytes; when given, the digest is checked. Else the layout's header is empty.
        where: named in errors.

    Raises:
        CorruptCheckpoint: a field is missing, of another type, out of range, or the digest differs.
    """
    try:
        layout = _parse(value, header or b"")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise CorruptCheckpoint(f"its layout cannot be read: {error}", where=where) from error
    if header is not None:
        again = _finish(layout.chunks, layout.state_begin, layout.state_end,
                        body_bytes=layout.body_bytes, header=header)  # fmt: skip
        if again.digest != layout.digest:
            raise CorruptCheckpoint("its layout differs from the layout's digest", where=where)
    return layout


def _parse(value: object, header: bytes) -> Layout:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    body_bytes = _integer(value["body_bytes"])
    start = _integer(value["header_bytes"])
    state_begin, state_end = (_integer(number) for number in value["state"])
    if not start <= state_begin <= state_end <= body_bytes:
        raise ValueError("the plain state lies outside the body")
    chunks = tuple(_parse_chunk(item, start, body_bytes) for item in value["chunks"])
    names = {chunk.name for chunk in chunks}
    if len(names) != len(chunks):
        raise ValueError("a name stands twice")
    return Layout(
        chunks=chunks,
        state_begin=state_begin,
        state_end=state_end,
        body_bytes=body_bytes,
        header=header,
        digest=_text(value["digest"]),
    )


def _parse_chunk(item: object, start: int, body_bytes: int) -> Chunk:
    if not isinstance(item, list) or len(item) != 10:
        raise ValueError("a chunk is not a list of ten")
    key, name, kind, dtype, global_shape, offsets, sizes, begin, end, alias_of = item
    chunk = Chunk(
        key=_text(key),
        name=_text(name),
        kind=ChunkKind(kind),
        dtype=_text(dtype),
        global_shape=_integers(global_shape),
        offsets=_integers(offsets),
        sizes=_integers(sizes),
        begin=_integer(begin),
        end=_integer(end),
        alias_of=None if alias_of is None else _text(alias_of),
    )
    if not start <= chunk.begin <= chunk.end <= body_bytes:
        raise ValueError(f"{chunk.name} lies outside the body")
    if chunk.end - chunk.begin != math.prod(chunk.sizes) * DTYPE_BYTES[chunk.dtype]:
        raise ValueError(f"{chunk.name} has another length than its shape and type give")
    if chunk.kind is ChunkKind.FLAT:
        inside = len(chunk.offsets) == len(chunk.sizes) == 1 and (
            chunk.offsets[0] + chunk.sizes[0] <= math.prod(chunk.global_shape)
        )
    else:
        inside = len(chunk.offsets) == len(chunk.sizes) == len(chunk.global_shape) and all(
            offset + size <= extent
            for offset, size, extent in zip(chunk.offsets, chunk.sizes, chunk.global_shape, strict=True)
        )
    if not inside:
        raise ValueError(f"{chunk.name} lies outside its tensor")
    return chunk


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"not a size: {value!r}")
    return value


def _integers(value: object) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or len(value) > DIMENSIONS_MAX:
        raise ValueError("not a shape")
    return tuple(_integer(number) for number in value)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > NAME_BYTES_MAX:
        raise ValueError("not a name")
    return value
