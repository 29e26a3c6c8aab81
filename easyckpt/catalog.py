"""Where every element of a saved step lies, and which bytes make what is wanted now. Pure.

A *catalog* holds the layouts of a step, each distinct one once, indexed by the names of logical tensors. A
*planner* sees it from one wanting rank, to which each saved rank's bytes have a cost. Its plan is an
`easyckpt.assembly.Assembly`. Who has the bytes, a slot, a peer or a file, is not known here.

Chunks of equal geometry are replicas: the cheapest is taken, and of equally cheap ones another for each
name, so that the load spreads. A chunk that is contiguous in the logical tensor is kept as an interval;
what a wanted chunk touches is found by bisection, so that planning is linear in what is stored and in what
is wanted.
"""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from easyckpt.assembly import Assembly, Take
from easyckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, StateMismatch
from easyckpt.layout import DTYPE_BYTES, ChunkKind, ChunkSpec
from easyckpt.reshard import Run, intersect, runs

__all__ = ["Catalog", "Known", "Planner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of a logical tensor without its bytes."""

    dtype: str
    global_shape: tuple[int, ...]


_Geometry = tuple[int, int, tuple[int, ...] | None, tuple[int, ...] | None]
"""First logical element, the one after the last, and offsets and sizes of a box that is not contiguous."""


@dataclass(slots=True)
class _Tensor:
    """One logical tensor: geometry → where it is stored (layout number, first byte)."""

    parts: dict[_Geometry, list[tuple[int, int]]] = field(default_factory=dict)
    order: list[_Geometry] = field(default_factory=list)
    tops: list[int] = field(default_factory=list)
    """Per place in the order, the highest end of it and all before it."""

    def between(self, low: int, high: int) -> list[_Geometry]:
        """Geometries that may hold elements of an interval, by their first element."""
        if len(self.order) != len(self.parts):
            self.order = sorted(self.parts, key=lambda part: part[:2])
            self.tops = list(itertools.accumulate((part[1] for part in self.order), max))
        first = bisect.bisect_right(self.tops, low)
        last = bisect.bisect_left(self.order, high, key=lambda part: part[0])
        return [part for part in self.order[first:last] if part[1] > low]


class Catalog:
    """See the module. Filled with `add`, then only read."""

    def __init__(self) -> None:
        self._tensors: dict[str, dict[tuple[str, tuple[int, ...]], _Tensor]] = {}
        self.ranks_of: list[tuple[int, ...]] = []
        """Layout number → the saved ranks that have it."""
        self._names_of: list[dict[str, tuple[str, tuple[int, ...]]]] = []

    def add(self, rows: Iterable[Sequence[Any]], *, ranks: tuple[int, ...], where: str = "") -> None:
        """One layout.

        Args:
            rows: its chunks, each as the list of ten values that the format describes.
            ranks: the saved ranks that have it.
            where: named in errors.

        Raises:
            CorruptCheckpoint: a row is not possible.
        """
        number = len(self.ranks_of)
        names: dict[str, tuple[str, tuple[int, ...]]] = {}
        tensors = self._tensors
        try:
            for _, name, kind, dtype, shape, offsets, sizes, begin, end, _ in rows:
                form = (dtype, tuple(shape))
                names[name] = form
                part = _geometry(kind, form[1], tuple(offsets), tuple(sizes))
                if end - begin != math.prod(sizes) * DTYPE_BYTES[dtype] or begin < 0:
                    raise ValueError(f"{name} has another length than its shape and type give")
                if part[0] < part[1]:
                    forms = tensors.get(name)
                    if forms is None:
                        forms = tensors[name] = {}
                    tensor = forms.get(form)
                    if tensor is None:
                        tensor = forms[form] = _Tensor()
                    places = tensor.parts.get(part)
                    if places is None:
                        tensor.parts[part] = [(number, begin)]
                    else:
                        places.append((number, begin))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise CorruptCheckpoint(f"a layout cannot be read: {error}", where=where) from error
        self.ranks_of.append(tuple(ranks))
        self._names_of.append(names)

    def directory(self, rank: int) -> dict[str, Known]:
        """All logical tensors; where ranks differ in type or shape, as this saved rank has it."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        own: dict[str, tuple[str, tuple[int, ...]]] = {}
        for ranks, names in zip(self.ranks_of, self._names_of, strict=True):
            found = {**names, **found} if not found.keys() >= names.keys() else found
            if rank in ranks:
                own = names
        return {
            name: Known(dtype=dtype, global_shape=shape) for name, (dtype, shape) in {**found, **own}.items()
        }

    def tensor(self, wanted: ChunkSpec) -> _Tensor:
        """The logical tensor that a chunk is of.

        Raises:
            StateMismatch: another type or shape is stored.
            IncompleteCheckpoint: nothing of it is stored.
        """
        variants = self._tensors.get(wanted.name, {})
        tensor = variants.get((wanted.dtype, wanted.global_shape))
        if tensor is not None:
            return tensor
        if variants:
            dtype, shape = next(iter(variants))
            raise StateMismatch(
                f"{wanted.dtype}{list(wanted.global_shape)} was asked for",
                changed=(f"{wanted.name}: {dtype}{list(shape)} is stored",),
                where=wanted.name,
            )
        raise IncompleteCheckpoint("nothing of it is stored", where=wanted.name, hint="load an older step")


def _geometry(
    kind: str, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> _Geometry:
    count = math.prod(sizes)
    if kind == "box" and sizes and sizes[1:] == shape[1:] and not any(offsets[1:]):
        first = offsets[0] * math.prod(shape[1:])  # whole rows, the most frequent cut
        return (first, first + count, None, None)
    if kind == ChunkKind.FLAT.value:
        return (offsets[0], offsets[0] + count, None, None)
    if kind != ChunkKind.BOX.value or not len(shape) == len(offsets) == len(sizes):
        raise ValueError(f"a chunk of kind {kind} with {len(sizes)} of {len(shape)} dimensions")
    if count == 0:
        return (0, 0, None, None)
    first = 0
    contiguous = True
    whole = True
    for extent, size in zip(reversed(shape), reversed(sizes), strict=True):
        contiguous = contiguous and (whole or size == 1)
        whole = whole and size == extent
    stride = 1
    last = 0
    for extent, offset, size in zip(reversed(shape), reversed(offsets), reversed(sizes), strict=True):
        first += offset * stride
        last += (offset + size - 1) * stride
        stride *= extent
    if contiguous:
        return (first, first + count, None, None)
    return (first, last + 1, tuple(offsets), tuple(sizes))


class Planner:
    """Plans for one wanting rank.

    Args:
        catalog: of the step.
        costs: saved rank → what its bytes cost here; a rank that is not in it cannot be had.
    """

    def __init__(self, catalog: Catalog, costs: Mapping[int, int]) -> None:
        self._catalog = catalog
        self._costs = costs
        self._best: dict[int, tuple[int, tuple[int, ...]] | None] = {}

    def assemble(self, wanted: Sequence[ChunkSpec], *, begins: Sequence[int], target: int = 0) -> Assembly:
        """All that fills a buffer.

        Args:
            wanted: chunks.
            begins: where each begins in the buffer.
            target: the buffer's number.

        Raises:
            StateMismatch: another type or shape is stored.
            IncompleteCheckpoint: an element cannot be had.
        """
        assembly: Assembly = {}
        for spec, begin in zip(wanted, begins, strict=True):
            for rank, source_begin, at, length in self.copies(spec):
                takes = assembly.setdefault(rank, [])
                last = takes[-1] if takes else None
                if (
                    last is not None
                    and last.source_begin + last.length == source_begin
                    and last.target_begin + last.length == begin + at
                ):
                    source_begin, at, length = (
                        last.source_begin,
                        last.target_begin - begin,
                        last.length + length,
                    )
                    takes.pop()
                take = Take(source_begin=source_begin, target=target, target_begin=begin + at, length=length)
                takes.append(take)
        for takes in assembly.values():
            takes.sort(key=lambda take: take.source_begin)
        return assembly

    def copies(self, wanted: ChunkSpec) -> list[tuple[int, int, int, int]]:
        """(saved rank, first byte there, first byte in the wanted chunk, length), by the wanted bytes."""
        if wanted.byte_count == 0:
            return []
        left = list(runs(wanted))
        tensor = self._catalog.tensor(wanted)
        size = DTYPE_BYTES[wanted.dtype]
        found: list[tuple[int, int, int, int]] = []
        low, high = left[0].logical, left[-1].logical + left[-1].length
        for part in tensor.between(low, high):
            source = self._cheapest(tensor.parts[part], wanted.name)
            if source is None:
                continue
            rank, begin = source
            left, taken = intersect(left, _runs_of(part, wanted))
            found += [
                (rank, begin + theirs * size, ours * size, length * size) for ours, theirs, length in taken
            ]
            if not left:
                break
        if left:
            raise IncompleteCheckpoint(
                f"element {left[0].logical} of {wanted.name} is in none of the pieces that can be had",
                where=wanted.name,
                hint="load an older step",
            )
        return sorted(found, key=lambda copy: copy[2])

    def _cheapest(self, stored: list[tuple[int, int]], name: str) -> tuple[int, int] | None:
        offers: list[tuple[int, int, int]] = []  # cost, rank, first byte
        for layout, begin in stored:
            best = self._best_of(layout)
            if best is not None:
                offers += [(best[0], rank, begin) for rank in best[1]]
        if not offers:
            return None
        least = min(offer[0] for offer in offers)
        cheap = [offer for offer in offers if offer[0] == least]
        _, rank, begin = cheap[zlib.crc32(name.encode(errors="surrogatepass")) % len(cheap)]
        return rank, begin

    def _best_of(self, layout: int) -> tuple[int, tuple[int, ...]] | None:
        """The least cost of a layout's ranks, and the ranks that have it (a few are enough to spread)."""
        if layout not in self._best:
            costs = [
                (self._costs[rank], rank) for rank in self._catalog.ranks_of[layout] if rank in self._costs
            ]
            least = min(costs, default=(0, -1))[0]
            cheap = tuple(rank for cost, rank in costs if cost == least)[:SPREAD_MAX]
            self._best[layout] = (least, cheap) if cheap else None
        return self._best[layout]


SPREAD_MAX = 64
"""Equal sources among which the names are spread."""


def _runs_of(part: _Geometry, wanted: ChunkSpec) -> Iterator[Run]:
    low, high, offsets, sizes = part
    if offsets is None or sizes is None:
        return iter((Run(logical=low, local=0, length=high - low),))
    return runs(
        ChunkSpec(
            name=wanted.name,
            dtype=wanted.dtype,
            global_shape=wanted.global_shape,
            offsets=offsets,
            sizes=sizes,
        )
    )
