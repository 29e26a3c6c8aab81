"""From a checkpoint back into a live state, in place.

Two phases, so that a load that cannot succeed changes nothing: first the whole state is compared with the
checkpoint, then bytes are written into the tensors that are there already, then plain values are set. No
optimizer step runs, nothing is cast, no collective is called.

A container of the state in which nothing lives (no tensor, module, optimizer or other object) is replaced
as a whole, so that a list of losses may have any length. Where something lives, keys are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from easyckpt.adapters.base import SavedPart, SavedTensor, TensorPart
from easyckpt.errors import StateMismatch, UnsupportedValue
from easyckpt.layout import Chunk, ChunkKind
from easyckpt.plain import PartNode, TensorRef, join, pack
from easyckpt.state import CONTAINERS, Parts, check_state, check_tensor, memory_identity, spec_of

__all__ = ["Loader", "Read"]

NAMES_IN_ERROR_MAX = 8


@dataclass(slots=True)
class _Differences:
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)

    def raise_if_any(self, where: str) -> None:
        listings = (
            ("missing in the checkpoint", self.missing),
            ("not in the state", self.unexpected),
            ("changed", self.changed),
        )
        sentences = []
        for word, names in listings:
            if names:
                shown = ", ".join(names[:NAMES_IN_ERROR_MAX])
                more = (
                    f" and {len(names) - NAMES_IN_ERROR_MAX} more" if len(names) > NAMES_IN_ERROR_MAX else ""
                )
                sentences.append(f"{word}: {shown}{more}")
        if sentences:
            raise StateMismatch(
                "the state differs from what was saved; " + "; ".join(sentences),
                missing=tuple(self.missing),
                unexpected=tuple(self.unexpected),
                changed=tuple(self.changed),
                where=where,
                hint="load(..., strict=False) loads what fits",
            )


Read = Callable[[Chunk, torch.Tensor], None]
"""Copies the bytes of a chunk into a tensor of the chunk's type and sizes."""


class Loader:
    """Puts a checkpoint into a state, in place. Used once.

    Args:
        state: the live state.
        tree: what `plain.unpack` gave.
        chunks: the checkpoint's chunks.
        read: copies a chunk's bytes into a tensor.
        strict: whether differences are errors.
        where: the checkpoint, for errors.
    """

    def __init__(
        self,
        state: dict[str, Any],
        tree: Any,
        *,
        chunks: tuple[Chunk, ...],
        read: Read,
        strict: bool = True,
        where: str = "",
    ) -> None:
        self._state = check_state(state)
        self._tree = tree
        self._chunks = {chunk.name: chunk for chunk in chunks}
        self._read = read
        self._strict = strict
        self._where = where
        self._parts = Parts(state, strict=strict)
        self._differences = _Differences()
        self._copies: list[tuple[torch.Tensor, Chunk]] = []
        self._part_nodes: dict[str, PartNode] = {}
        self._assignments: list[Callable[[], None]] = []

    def run(self) -> None:
        """Compare everything, then write.

        Raises:
            StateMismatch: a strict load found differences; nothing was changed, but that moments may have
            been
                created in an optimizer that had none.
        """
        if type(self._tree) is not dict:
            raise StateMismatch("the checkpoint holds no dict", where=self._where)
        self._match_dict(self._state, self._tree, "")
        self._raise_differences()
        for path in self._parts.order():
            self._match_part(path)
            self._raise_differences()
        self._check_ties()
        with torch.no_grad():
            for destination, chunk in self._copies:
                self._read(chunk, destination)
        for path in self._parts.order():
            node = self._part_nodes.get(path)
            if node is not None:
                value, adapter = self._parts.found[path]
                adapter.finish(value, self._materialise(node.plain), self._parts.context(path))
        for assign in self._assignments:
            assign()

    def _raise_differences(self) -> None:
        if self._strict:
            self._differences.raise_if_any(self._where)

    def _match(self, live: Any, saved: Any, path: str) -> bool:
        """Note what is to be done for one value; False when it is to be replaced by the saved value."""
        if path in self._parts.found:
            _, adapter = self._parts.found[path]
            if isinstance(saved, PartNode) and saved.adapter == adapter.name:
                self._part_nodes[path] = saved
            else:
                kind = saved.adapter if isinstance(saved, PartNode) else type(saved).__name__
                self._differences.changed.append(f"{path} ({adapter.name} here, {kind} saved)")
            return True
        if isinstance(live, torch.Tensor):
            chunk = self._chunks.get(saved.name) if isinstance(saved, TensorRef) else None
            if chunk is None:
                self._differences.changed.append(f"{path} (a tensor here, {type(saved).__name__} saved)")
            else:
                self._add_copy(TensorPart(name=path, tensor=live), path, chunk)
            return True
        if type(live) in CONTAINERS and self._is_alive(live, path):
            if type(saved) is not type(live):
                self._differences.changed.append(
                    f"{path} ({type(live).__name__} here, {type(saved).__name__} saved)"
                )
            elif type(live) is dict:
                self._match_dict(live, saved, path)
            else:
                return self._match_sequence(live, saved, path)
            return True
        if isinstance(saved, PartNode):
            self._differences.changed.append(f"{path} ({type(live).__name__} here, {saved.adapter} saved)")
            return True
        return False

    def _match_dict(self, live: dict[Any, Any], saved: dict[Any, Any], path: str) -> None:
        self._differences.missing.extend(join(path, key) for key in live if key not in saved)
        self._differences.unexpected.extend(join(path, key) for key in saved if key not in live)
        for key in live:
            if key in saved and not self._match(live[key], saved[key], join(path, key)):
                self._assignments.append(partial(self._replace, live, key, saved[key]))

    def _match_sequence(self, live: Any, saved: Any, path: str) -> bool:
        if len(live) != len(saved):
            self._differences.changed.append(f"{path} ({len(live)} items here, {len(saved)} saved)")
            return True
        for index, item in enumerate(live):
            if self._match(item, saved[index], join(path, index)):
                continue
            if type(live) is list:
                self._assignments.append(partial(self._replace, live, index, saved[index]))
            elif not _equal_plain(item, saved[index]):
                self._differences.changed.append(
                    f"{join(path, index)} (a plain value within a tuple cannot be set; use a list)"
                )
        return True

    def _replace(self, container: Any, key: Any, saved: Any) -> None:
        value = self._materialise(saved)
        present = container[key]
        if type(present) is dict and type(value) is dict:
            present.clear()
            present.update(value)
        elif type(present) is list and type(value) is list:
            present[:] = value
        else:
            container[key] = value

    def _is_alive(self, value: Any, path: str, depth: int = 0) -> bool:
        if isinstance(value, torch.Tensor) or path in self._parts.found:
            return True
        if depth > 100 or type(value) not in CONTAINERS:
            return False
        items = value.items() if type(value) is dict else enumerate(value)
        return any(self._is_alive(item, join(path, key), depth + 1) for key, item in items)

    def _match_part(self, path: str) -> None:
        node = self._part_nodes.get(path)
        if node is None:
            return
        value, adapter = self._parts.found[path]
        saved: dict[str, Chunk] = {}
        for name in node.tensors:
            chunk = self._chunks.get(f"{path}.{name}")
            if chunk is None:
                raise StateMismatch("the checkpoint lacks a tensor that it names", where=f"{path}.{name}")
            saved[name] = chunk
        part = SavedPart(
            tensors={name: _saved_tensor(name, c) for name, c in saved.items()}, plain=node.plain
        )
        adapter.prepare(value, part, self._parts.context(path))
        live = {item.name: item for item in self._parts.capture_one(path).tensors}
        self._differences.missing.extend(f"{path}.{name}" for name in live if name not in saved)
        self._differences.unexpected.extend(f"{path}.{name}" for name in saved if name not in live)
        for name, item in live.items():
            if name in saved:
                self._add_copy(item, f"{path}.{name}", saved[name])

    def _add_copy(self, part: TensorPart, path: str, chunk: Chunk) -> None:
        check_tensor(part.tensor.detach(), path)
        spec = spec_of(part, path)
        have = (spec.dtype, spec.kind, spec.global_shape, spec.offsets, spec.sizes)
        saved = (chunk.dtype, chunk.kind, chunk.global_shape, chunk.offsets, chunk.sizes)
        if have != saved:
            self._differences.changed.append(
                f"{path} ({_describe(*have)} here, {_describe(*saved)} saved)"
            )  # fmt: skip
            return
        self._copies.append((part.tensor.detach(), chunk))

    def _check_ties(self) -> None:
        """Tensors that share memory here must have been saved with the same values."""
        first: dict[tuple[Any, ...], Chunk] = {}
        for destination, chunk in self._copies:
            identity = memory_identity(destination)
            if identity is None:
                continue
            other = first.setdefault(identity, chunk)
            if (other.begin, other.end) == (chunk.begin, chunk.end):
                continue
            one, two = self._fresh(other), self._fresh(chunk)
            if not torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)):
                self._differences.changed.append(f"{chunk.name} (tied to {other.name} here, not when saved)")
        self._raise_differences()

    def _fresh(self, chunk: Chunk) -> torch.Tensor:
        tensor = torch.empty(chunk.sizes, dtype=getattr(torch, chunk.dtype))
        self._read(chunk, tensor)
        return tensor

    def _materialise(self, saved: Any) -> Any:
        """Saved plain values with fresh tensors in the places of references."""
        if isinstance(saved, TensorRef):
            return self._fresh(self._chunks[saved.name])
        if isinstance(saved, PartNode):
            raise StateMismatch("an object was saved where the state has none", where=self._where)
        if isinstance(saved, dict):
            for key in saved:
                saved[key] = self._materialise(saved[key])
            return saved
        if type(saved) is list:
            return [self._materialise(item) for item in saved]
        if type(saved) is tuple:
            return tuple(self._materialise(item) for item in saved)
        return saved


def _saved_tensor(name: str, chunk: Chunk) -> SavedTensor:
    return SavedTensor(
        name=name,
        dtype=chunk.dtype,
        kind=chunk.kind,
        global_shape=chunk.global_shape,
        offsets=chunk.offsets,
        sizes=chunk.sizes,
    )


def _describe(
    dtype: str,
    kind: ChunkKind,
    global_shape: tuple[int, ...],
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
) -> str:
    whole = sizes == global_shape and not any(offsets)
    text = f"{dtype}{list(global_shape)}"
    return text if whole else f"{text} {kind.value} at {list(offsets)} of {list(sizes)}"


def _equal_plain(live: Any, saved: Any) -> bool:
    try:
        return pack(live) == pack(saved)
    except UnsupportedValue:
        return False
