"""Large containers that were packed before, so that a later save need not walk them.

A container whose items are all tensors or scalars is a *bag*. If it holds the very same objects under the
same keys as last time, what was packed then is right again: scalars cannot change without being another
object, and of a tensor only its name is packed. The comparison is one pass of identities in C. A bag holds
its items, so that no identity is used twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

__all__ = ["BAG_ITEMS_MIN", "SCALARS", "Bag", "Bags"]

BAG_ITEMS_MIN = 16
"""Containers with fewer items are packed anew each time; looking them up costs as much."""

SCALARS = frozenset((bool, int, float, str, bytes, type(None)))
"""Types whose values cannot change without being another object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bag:
    """A container as it was packed last."""

    kind: type[Any]
    keys: tuple[Any, ...]
    items: tuple[Any, ...]
    raw: bytes
    names: tuple[str, ...]
    """Of its tensors."""

    def is_still(self, value: Any) -> bool:
        """Whether the container holds the very same objects under the same keys."""
        if not isinstance(value, self.kind) or len(value) != len(self.items):
            return False
        items = value.values() if self.kind is dict else value
        return all(map(operator.is_, items, self.items)) and (
            self.kind is not dict or tuple(value) == self.keys
        )


class Bags:
    """All bags of one state, by path. ``seen`` is called with the names of the tensors of each that was found
    again."""

    def __init__(self, seen: Callable[[tuple[str, ...]], None] = lambda names: None) -> None:
        self.seen = seen
        self._bags: dict[str, Bag] = {}

    def find(self, path: str, value: Any) -> Bag | None:
        """The bag, if the container is still what it was."""
        bag = self._bags.get(path)
        return bag if bag is not None and bag.is_still(value) else None

    def note(self, path: str, value: Any, *, wire: Any, names: tuple[str, ...]) -> None:
        """Remember a container that was packed just now."""
        self._bags[path] = Bag(
            kind=type(value),
            keys=tuple(value) if type(value) is dict else (),
            items=tuple(value.values()) if type(value) is dict else tuple(value),
            raw=msgspec.msgpack.encode(wire),
            names=names,
        )
