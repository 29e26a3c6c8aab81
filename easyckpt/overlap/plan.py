"""Which bytes of a state go where in a slot, and when: at once, or while training goes on.

A tensor is copied **at once**, before ``save`` returns, unless it is large, lies in host memory without gaps,
is fenced (it changes only within an optimizer's step), and was never seen to change in between. The rest is
copied **later**, behind the fence.

Small tensors lie side by side in a slot (`easyckpt.layout`), so a run of them is one ``torch.cat`` into the
slot: half a microsecond for each tensor, where a copy of its own takes more than one, and no view of the slot
is kept for any of them. The gaps between them are items of the same call, which are zero. Large ones are
plain memory moves in pieces, which take no part of torch's thread pool and hold no lock of Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from easyckpt.layout import SMALL_ALIGNMENT, Chunk, Layout
from easyckpt.state import LiveTensor

__all__ = ["LATER_BYTES_MIN", "PIECE_BYTES", "CopyPlan", "Later", "Piece"]

LATER_BYTES_MIN = 16 << 10
"""Below this a copy at once costs less than the witness that a later copy needs."""

PIECE_BYTES = 8 << 20
"""Of a large copy: long enough that taking turns with Python costs nothing, short enough that a fence can
share the work."""

RUN_TENSORS_MAX = 4096
"""Tensors in one call: the interpreter is held for about 0.1 ms while its arguments are read."""

TILE_ELEMENTS = 28_672
"""Less than torch's grain of 32,768 (at::internal::GRAIN_SIZE), from which on a copy starts threads."""

Piece = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Later:
    """A tensor that is copied while training goes on."""

    name: str
    tensor: torch.Tensor
    begin: int
    """Its first byte in the slot."""
    byte_count: int
    is_contiguous: bool
    """Else its elements have another order in memory than in the slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Small tensors that lie side by side: bytes of all of them and of the gaps, in order."""

    begin: int
    end: int
    parts: tuple[torch.Tensor, ...]


class CopyPlan:
    """See the module. Holds the tensors, and so keeps their memory.

    Args:
        layout: where each tensor lies.
        tensors: of the state, in the layout's order.
        at_once: names that are copied at once whatever they are.
        volatile: names whose tensor is another one at each save; they are given to `copy_at_once`.
        any_order: whether tensors whose memory has another order than the slot may be left for later.
        everything_at_once: whether nothing is left for later.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Sequence[LiveTensor],
        *,
        at_once: Collection[str] = (),
        volatile: Collection[str] = (),
        any_order: bool = True,
        everything_at_once: bool = False,
    ) -> None:
        small: list[tuple[Chunk, torch.Tensor]] = []
        later: list[Later] = []
        self._single: list[tuple[int, Chunk]] = []
        for place, (item, chunk) in enumerate(zip(tensors, layout.chunks, strict=True)):
            if chunk.alias_of is not None or chunk.end == chunk.begin:
                continue
            byte_count = chunk.end - chunk.begin
            plain = (
                item.tensor.device.type == "cpu" and not item.tensor.is_conj() and not item.tensor.is_neg()
            )
            if plain and item.fenced and byte_count >= LATER_BYTES_MIN and not everything_at_once:
                fits = _is_dense(item.tensor) if any_order else item.tensor.is_contiguous()
                if fits and item.spec.name not in at_once:
                    later.append(_later(item, chunk))
                    continue
            is_flat = plain and item.tensor.is_contiguous() and item.spec.name not in volatile
            if is_flat and byte_count < LATER_BYTES_MIN:
                small.append((chunk, item.tensor))
            else:
                self._single.append((place, chunk))
        self.later = tuple(later)
        self.later_bytes = sum(item.byte_count for item in later)
        self._runs = tuple(_runs(small))

    def copy_at_once(self, whole: torch.Tensor, tensors: Sequence[LiveTensor]) -> None:
        """Copy what cannot wait.

        Args:
            whole: the slot as bytes.
            tensors: of the state as it is now.
        """
        with torch.no_grad():
            for run in self._runs:
                torch.cat(run.parts, out=whole[run.begin : run.end])
            for place, chunk in self._single:
                _view(whole, chunk).copy_(tensors[place].tensor)

    def pieces(self, whole: torch.Tensor) -> Iterator[tuple[int, int, Piece]]:
        """What is copied later, in pieces that any thread may run, in any order.

        Each comes with the first byte of the slot that it writes, and the one after its last.
        """
        target = whole.data_ptr()
        for item in self.later:
            if item.is_contiguous:
                source = item.tensor.data_ptr()
                for at in range(0, item.byte_count, PIECE_BYTES):
                    count = min(PIECE_BYTES, item.byte_count - at)
                    begin = item.begin + at
                    yield begin, begin + count, _move(target + begin, source + at, count)
            else:
                end = item.begin + item.byte_count
                view = whole[item.begin : end].view(item.tensor.dtype).view(item.tensor.shape)
                yield item.begin, end, _rearrange(view, item.tensor)


def _later(item: LiveTensor, chunk: Chunk) -> Later:
    return Later(
        name=item.spec.name,
        tensor=item.tensor,
        begin=chunk.begin,
        byte_count=chunk.end - chunk.begin,
        is_contiguous=item.tensor.is_contiguous(),
    )


def _move(target: int, source: int, count: int) -> Piece:
    """A plain move of memory; ctypes lets go of the interpreter while it runs."""

    def piece() -> None:
        ctypes.memmove(target, source, count)

    return piece


def _rearrange(target: torch.Tensor, source: torch.Tensor) -> Piece:
    """A copy between orders of elements, in tiles so small that torch starts no threads for them."""

    def piece() -> None:
        with torch.no_grad():
            for one, two in _tiles(target, source):
                one.copy_(two)

    return piece


def _tiles(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    if source.numel() <= TILE_ELEMENTS:
        yield target, source
        return
    longest = max(range(source.dim()), key=lambda dim: source.shape[dim])
    extent = source.shape[longest]
    step = max(1, extent * TILE_ELEMENTS // source.numel())
    for begin in range(0, extent, step):
        count = min(step, extent - begin)
        yield from _tiles(target.narrow(longest, begin, count), source.narrow(longest, begin, count))


def _runs(small: list[tuple[Chunk, torch.Tensor]]) -> Iterator[_Run]:
    """Group small tensors that are neighbours in the slot."""
    zeros = torch.zeros(SMALL_ALIGNMENT, dtype=torch.uint8)
    gaps = [zeros[:count] for count in range(SMALL_ALIGNMENT)]
    parts: list[torch.Tensor] = []
    begin = end = 0
    for chunk, tensor in sorted(small, key=lambda pair: pair[0].begin):
        gap = chunk.begin - end
        if parts and (gap >= SMALL_ALIGNMENT or len(parts) >= RUN_TENSORS_MAX):
            yield _Run(begin=begin, end=end, parts=tuple(parts))
            parts = []
        if not parts:
            begin = chunk.begin
        elif gap:
            parts.append(gaps[gap])
        parts.append(tensor.view(-1).view(torch.uint8))
        end = chunk.end
    if parts:
        yield _Run(begin=begin, end=end, parts=tuple(parts))


def _view(whole: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    return whole[chunk.begin : chunk.end].view(getattr(torch, chunk.dtype)).view(chunk.sizes)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps and without sharing, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
