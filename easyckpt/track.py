"""The capture of a state, made cheap from the second time on.

The first save walks the state (`easyckpt.state.capture`). A later one asks, in comparisons of identity,
whether the same tensors stand in the same places: objects through their own watch (`Captured.again`), large
containers through their bag, all else by walking it. If so, what was found about the tensors is still right,
and only plain values (counters, random numbers, learning rates) are packed anew. If anything differs (a
parameter that appears, a tensor that was replaced, the first step of an optimizer), the state is captured
anew as a whole.

A tensor can also change under its identity, through ``.data``, ``set_`` or ``resize_``, so address, type,
shape and strides are compared as well. A tensor that is made anew for each save (the state of a random number
generator, a flat view) is taken in the place of the last one if its form is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from easyckpt.adapters.base import Captured
from easyckpt.adapters.dtensor import is_distributed, local_of
from easyckpt.bags import Bags
from easyckpt.plain import PartNode, TensorRef, pack
from easyckpt.state import Capture, Parts, capture, check_state, check_tensor

__all__ = ["Tracked", "Tracker"]


class Changed(Exception):
    """The state has to be captured anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """Where the bytes of many tensors lie, and how they are read."""

    pointers: list[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]


def _form_of(tensors: Sequence[torch.Tensor]) -> _Form:
    return _Form(
        pointers=[tensor.data_ptr() for tensor in tensors],
        shapes=[tensor.shape for tensor in tensors],
        strides=[tensor.stride() for tensor in tensors],
        dtypes=[tensor.dtype for tensor in tensors],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """A capture, and what is new in it."""

    capture: Capture
    same: bool
    """Whether all tensors are those of the last capture, but for ``swapped``."""
    swapped: tuple[int, ...] = ()
    """Tensors, by their place in the capture, that were made anew in the same form."""


class Tracker:
    """Captures one state again and again. Used by one thread."""

    def __init__(self) -> None:
        self._before: _Before | None = None

    def capture(self, state: dict[str, Any]) -> Tracked:
        """The state as it is now.

        Raises:
            Misuse: the state is not a dict with text keys, or two tensors have one name.
            UnsupportedValue: something in it cannot be stored; the key path is named.
        """
        check_state(state)
        if self._before is not None:
            try:
                return self._before.again(state)
            except Changed:
                self._before = None
        parts = Parts(state)
        bags = Bags()
        captured = capture(state, parts=parts, bags=bags)
        self._before = _Before(captured, parts, bags)
        return Tracked(capture=captured, same=False)

    @property
    def objects(self) -> tuple[Any, ...]:
        """Modules, optimizers and all else that was taken apart."""
        return self._before.objects if self._before is not None else ()

    def forget(self) -> None:
        """Let go of every tensor; the next capture is a whole one."""
        self._before = None


class _Before:
    """What the last capture found, to be found again."""

    def __init__(self, captured: Capture, parts: Parts, bags: Bags) -> None:
        self._tensors = list(captured.tensors)
        self._index = {item.spec.name: place for place, item in enumerate(self._tensors)}
        self._aliased = {item.spec.alias_of for item in self._tensors if item.spec.alias_of}
        self._distributed = [
            place for place, item in enumerate(self._tensors) if is_distributed(item.original)
        ]
        self._form = _form_of(self._looked_at())
        self._parts = parts
        self._names = {
            path: tuple(part.name for part in found.tensors) for path, found in parts.captured.items()
        }
        self._places = {
            path: [self._index[f"{path}.{name}"] for name in names] for path, names in self._names.items()
        }
        self._bags = bags
        self._seen = 0
        self._parts_seen = 0
        self._plain: dict[str, Any] = {}
        self._swapped: list[int] = []

    @property
    def objects(self) -> tuple[Any, ...]:
        """See `Tracker.objects`."""
        return tuple(value for value, _ in self._parts.found.values())

    def again(self, state: dict[str, Any]) -> Tracked:
        """The capture of now, if it is of the same tensors.

        Raises:
            Changed: it is not.
        """
        self._seen, self._parts_seen, self._swapped, self._plain = 0, 0, [], {}
        for path in self._parts.order():
            self._plain[path] = self._look_at(path)
        self._bags.seen = self._count
        plain = pack(state, hook=self._hook, bags=self._bags)
        if self._seen != len(self._tensors) or self._parts_seen != len(self._plain):
            raise Changed
        if _form_of(self._looked_at()) != self._form:
            raise Changed
        return Tracked(
            capture=Capture(tensors=tuple(self._tensors), plain=plain),
            same=True,
            swapped=tuple(self._swapped),
        )

    def _looked_at(self) -> list[torch.Tensor]:
        """The tensors whose memory is stored: those of the state, and the shards of distributed ones."""
        looked = [item.original for item in self._tensors]
        for place in self._distributed:
            looked[place] = local_of(looked[place])
        return looked

    def _look_at(self, path: str) -> Any:
        """Plain state of an object whose tensors are still the same."""
        before = self._parts.captured[path]
        if before.again is not None:
            now = before.again()
            if now is None:
                raise Changed
            return now.plain
        value, adapter = self._parts.found[path]
        now = adapter.capture(value, self._parts.context(path))
        if tuple(part.name for part in now.tensors) != self._names[path]:
            raise Changed
        self._compare_parts(path, now)
        return now.plain

    def _compare_parts(self, path: str, now: Captured) -> None:
        """An adapter may make new views of the same memory at each capture."""
        for place, part in zip(self._places[path], now.tensors, strict=True):
            known = self._tensors[place]
            if part.tensor is not known.original and not _is_same_memory(part.tensor, known.original):
                raise Changed

    def _count(self, names: tuple[str, ...]) -> None:
        self._seen += len(names)

    def _hook(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            place = self._index.get(path)
            if place is None:
                raise Changed
            if value is not self._tensors[place].original:
                self._swap(place, value)
            self._seen += 1
            return TensorRef(name=path)
        found = self._parts.found.get(path)
        if found is None:
            if self._parts.adapter_of(value) is not None:
                raise Changed
            return NotImplemented
        if found[0] is not value:
            self._swap_object(path, value)
        self._parts_seen += 1
        self._seen += len(self._names[path])
        return PartNode(adapter=found[1].name, tensors=self._names[path], plain=self._plain[path])

    def _swap_object(self, path: str, value: Any) -> None:
        """Take an object without tensors of its own, such as `RNG()`, in the place of the last one."""
        known, adapter = self._parts.found[path]
        if (
            type(value) is not type(known)
            or self._names[path]
            or self._parts.captured[path].again is not None
        ):
            raise Changed
        now = adapter.capture(value, self._parts.context(path))
        if now.tensors:
            raise Changed
        self._parts.found[path] = (value, adapter)
        self._plain[path] = now.plain

    def _swap(self, place: int, value: torch.Tensor) -> None:
        """Take a tensor in the place of the last one of that name."""
        known = self._tensors[place]
        if _is_same_memory(value, known.original):
            return
        tied = known.spec.alias_of is not None or known.spec.name in self._aliased
        tied = tied or is_distributed(value) or is_distributed(known.original)
        if tied or known.fenced or value.shape != known.original.shape or value.dtype != known.original.dtype:
            raise Changed
        tensor = value.detach()
        check_tensor(tensor, known.spec.name)
        if type(tensor) is not torch.Tensor:
            tensor = tensor.as_subclass(torch.Tensor)
        self._tensors[place] = replace(known, tensor=tensor, original=value)
        self._form.pointers[place] = value.data_ptr()
        self._form.strides[place] = value.stride()
        self._swapped.append(place)


def _is_same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    if type(one) is not type(two):
        return False
    if type(one) is not torch.Tensor and is_distributed(one):
        one, two = local_of(one), local_of(two)
    return (
        one.data_ptr() == two.data_ptr()
        and one.dtype == two.dtype
        and one.shape == two.shape
        and one.stride() == two.stride()
        and one.device == two.device
        and one.is_conj() == two.is_conj()
        and one.is_neg() == two.is_neg()
    )
