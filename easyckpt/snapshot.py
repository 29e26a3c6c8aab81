"""Tensors into a slot, and out of one.

A slot is mapped memory; torch sees it through `torch.frombuffer`. How tensors get into it is
`easyckpt.overlap`; here is all else: which layout fits a state, what no tensor covers, and the way back. What
a slot's gaps hold is zero, always: two equal states give equal bytes, and so equal digests.
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Mapping

import torch

from easyckpt.errors import CorruptCheckpoint
from easyckpt.layout import STATE_LENGTH_BYTES, Chunk, ChunkSpec, Layout, build_layout
from easyckpt.loader import Read
from easyckpt.state import Capture

__all__ = ["as_bytes", "fit_layout", "fits_plain", "read_plain", "reader", "write_frame", "write_plain"]

PLAIN_ROOM_BYTES_MIN = 16 << 10
"""Room for plain state, at least: most states fit, and grow in it without a new layout."""


def fit_layout(captured: Capture, previous: Layout | None) -> Layout:
    """The layout for a state: the previous one as long as names, types, shapes and the plain state's room
    fit."""
    if previous is not None and _fits(captured, previous):
        return previous
    room = PLAIN_ROOM_BYTES_MIN
    while room < len(captured.plain) * 3 // 2:
        room *= 2
    return build_layout(captured.specs, state_bytes=room)


def fits_plain(captured: Capture, layout: Layout) -> bool:
    """Whether the layout has room for the plain state."""
    return len(captured.plain) <= layout.state_end - layout.state_begin - STATE_LENGTH_BYTES


def _fits(captured: Capture, layout: Layout) -> bool:
    if not fits_plain(captured, layout) or len(captured.tensors) != len(layout.chunks):
        return False
    for item, chunk in zip(captured.tensors, layout.chunks, strict=True):
        spec = item.spec
        if (spec.name, spec.dtype, spec.kind, spec.global_shape, spec.offsets, spec.sizes, spec.alias_of) != (
            chunk.name,
            chunk.dtype,
            chunk.kind,
            chunk.global_shape,
            chunk.offsets,
            chunk.sizes,
            chunk.alias_of,
        ):
            return False
    return True


def as_bytes(slot: mmap.mmap, layout: Layout) -> torch.Tensor:
    """A slot as one flat tensor. It keeps the mapping alive."""
    return torch.frombuffer(slot, dtype=torch.uint8, count=layout.body_bytes)


def write_frame(slot: mmap.mmap, layout: Layout) -> None:
    """Write what no tensor covers into a slot that held another layout before: the header, and zeros."""
    slot.seek(0)
    _clear(slot, len(layout.header), layout)
    slot[: len(layout.header)] = layout.header


def write_plain(slot: mmap.mmap, layout: Layout, plain: bytes) -> None:
    """Write the packed plain state, and zeros behind it."""
    begin = layout.state_begin + STATE_LENGTH_BYTES
    slot[layout.state_begin : begin] = len(plain).to_bytes(STATE_LENGTH_BYTES, "little")
    slot[begin : begin + len(plain)] = plain
    as_bytes(slot, layout)[begin + len(plain) : layout.state_end].zero_()


def _clear(slot: mmap.mmap, begin: int, layout: Layout) -> None:
    """Zero what no tensor covers."""
    whole = as_bytes(slot, layout)
    covered = sorted((chunk.begin, chunk.end) for chunk in layout.chunks if chunk.end > chunk.begin)
    for start, end in [*covered, (layout.body_bytes, layout.body_bytes)]:
        if start > begin:
            whole[begin:start].zero_()
        begin = max(begin, end)


def _view(whole: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    dtype = getattr(torch, chunk.dtype)
    return whole[chunk.begin : chunk.end].view(dtype).view(chunk.sizes)


def reader(body: mmap.mmap, places: Mapping[ChunkSpec, int], *, body_bytes: int) -> Read:
    """A function that copies a chunk's bytes into a tensor of the same type and sizes.

    Args:
        body: a private mapping.
        places: chunk → its first byte in the body.
        body_bytes: length of the body.
    """
    with warnings.catch_warnings():
        # A private mapping is writable, so that torch has nothing to warn of; older versions warn all the
        # same.
        warnings.simplefilter("ignore", UserWarning)
        whole = torch.frombuffer(body, dtype=torch.uint8, count=max(body_bytes, 1))

    def read(spec: ChunkSpec, destination: torch.Tensor) -> None:
        if spec.byte_count:
            begin = places[spec]
            part = whole[begin : begin + spec.byte_count].view(getattr(torch, spec.dtype))
            destination.copy_(part.view(spec.sizes))

    return read


def read_plain(body: mmap.mmap, layout: Layout, *, where: str) -> bytes:
    """The packed plain state.

    Raises:
        CorruptCheckpoint: its length is not possible.
    """
    begin = layout.state_begin + STATE_LENGTH_BYTES
    length = int.from_bytes(body[layout.state_begin : begin], "little")
    if begin + length > layout.state_end:
        raise CorruptCheckpoint("its plain state is longer than its room", where=where)
    return body[begin : begin + length]
