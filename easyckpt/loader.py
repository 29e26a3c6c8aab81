"""From a checkpoint back into a live state, in place.

Two phases, so that a load that cannot succeed changes nothing: first the whole state is compared with the
checkpoint (`Loader.compare`), which gives the chunks that are needed, in whatever way the checkpoint is
cut; when their bytes are at hand they are written into the tensors that are there already, then plain
values are set (`Loader.fill`). No optimizer step runs, no collective is called. Nothing is cast, but for an
fp32 master, which a checkpoint of another framework may not have (see `easyckpt.bridge`).

A container of the state in which nothing lives (no tensor, module, optimizer or other object) is replaced
as a whole, so that a list of losses may have any length. Where something lives, keys are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from easyckpt.adapters.base import Adapter, SavedPart, SavedTensor, TensorPart
from easyckpt.adapters.dtensor import localise
from easyckpt.bridge import ENGINE, bridge
from easyckpt.catalog import Known
from easyckpt.errors import StateMismatch, UnsupportedValue
from easyckpt.layout import Chunk, ChunkSpec
from easyckpt.only import Selection
from easyckpt.plain import PartNode, TensorRef, join, pack, refs_of
from easyckpt.state import CONTAINERS, Parts, check_state, check_tensor, memory_identity, spec_of

__all__ = ["Loader", "Read", "known_of"]

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


Read = Callable[[ChunkSpec, torch.Tensor], None]
"""Copies the bytes of a chunk into a tensor of the chunk's type and sizes."""

_WIDER: Mapping[str, tuple[str, ...]] = {
    "bfloat16": ("float32", "float64"),
    "float16": ("float32", "float64"),
    "float32": ("float64",),
}
"""Types that hold every value of another type."""


def known_of(chunks: Iterable[Chunk]) -> dict[str, Known]:
    """What one rank's chunks tell of the logical tensors."""
    return {chunk.name: Known(dtype=chunk.dtype, global_shape=chunk.global_shape) for chunk in chunks}


class Loader:
    """Puts a checkpoint into a state, in place. Used once: `compare`, then `fill`.

    Args:
        state: the live state.
        tree: what `plain.unpack` gave.
        known: the checkpoint's logical tensors.
        strict: whether differences are errors.
        only: key paths or patterns; None loads everything.
        reseed: (seed, rank), if another number of ranks saved the checkpoint.
        where: the checkpoint, for errors.
    """

    def __init__(
        self,
        state: dict[str, Any],
        tree: Any,
        *,
        known: Mapping[str, Known],
        strict: bool = True,
        only: Selection | None = None,
        reseed: tuple[int, int] | None = None,
        where: str = "",
    ) -> None:
        self._state = check_state(state)
        self._known = known
        self._strict = strict
        self._only = only or Selection()
        self._where = where
        self._parts = Parts(state, strict=strict, reseed=reseed)
        if type(tree) is not dict:
            raise StateMismatch("the checkpoint holds no dict", where=where)
        self._bridge = bridge(tree, {path: found[1].name for path, found in self._parts.found.items()})
        self._tree = self._bridge.tree
        self._differences = _Differences()
        self._copies: list[tuple[torch.Tensor, ChunkSpec]] = []
        self._part_nodes: dict[str, PartNode] = {}
        self._assignments: list[tuple[Any, Any, Any]] = []
        """Container, key, saved value."""
        self._fresh: dict[str, ChunkSpec] = {}

    def compare(self) -> tuple[ChunkSpec, ...]:
        """Compare everything; writes nothing. Returns the chunks that `fill` will read.

        Raises:
            StateMismatch: a strict load found differences; nothing was changed, but that moments may have
            been
                created in an optimizer that had none.
        """
        self._match_dict(self._state, self._tree, "")
        self._raise_differences()
        for path in self._parts.order():
            self._match_part(path)
            self._raise_differences()
        if self._only.patterns is not None and not (self._copies or self._part_nodes or self._assignments):
            raise StateMismatch(
                f"nothing in the checkpoint is selected by only={list(self._only.patterns)}",
                where=self._where,
                hint="`easyckpt inspect` shows the names",
            )
        for _, _, saved in self._assignments:
            self._note_fresh(saved)
        for path, node in self._part_nodes.items():
            if self._only.has(path):
                self._note_fresh(node.plain)
        wanted = [spec for _, spec in self._copies] + list(self._fresh.values())
        return tuple(dict.fromkeys(wanted))

    def fill(self, read: Read) -> None:
        """Write what was compared.

        Args:
            read: copies a chunk's bytes into a tensor.

        Raises:
            StateMismatch: tensors that share memory here were saved with different values; nothing was
            changed.
        """
        self._check_ties(read)
        with torch.no_grad():
            for destination, spec in self._copies:
                if str(destination.dtype) == f"torch.{spec.dtype}":
                    read(spec, destination)
                else:
                    destination.copy_(_tensor(spec, read))
        for path in self._parts.order():
            node = self._part_nodes.get(path)
            if node is not None and self._only.has(path):
                value, adapter = self._parts.found[path]
                adapter.finish(value, self._materialise(node.plain, read), self._parts.context(path))
        for container, key, saved in self._assignments:
            self._replace(container, key, self._materialise(saved, read))

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
            if not isinstance(saved, TensorRef) or saved.name not in self._known:
                self._differences.changed.append(f"{path} (a tensor here, {type(saved).__name__} saved)")
            elif self._only.has(path):
                self._add_copy(TensorPart(name=path, tensor=live), path, names=(saved.name,))
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
        names = {key: join(path, key) for key in (*live, *saved)}
        chosen = {key for key, name in names.items() if self._only.may_have_below(name)}
        self._differences.missing.extend(names[key] for key in live if key not in saved and key in chosen)
        self._differences.unexpected.extend(names[key] for key in saved if key not in live and key in chosen)
        for key in live:
            if key not in saved or key not in chosen or self._match(live[key], saved[key], names[key]):
                continue
            if self._only.has(names[key]):
                self._assignments.append((live, key, saved[key]))

    def _match_sequence(self, live: Any, saved: Any, path: str) -> bool:
        if len(live) != len(saved):
            self._differences.changed.append(f"{path} ({len(live)} items here, {len(saved)} saved)")
            return True
        for index, item in enumerate(live):
            name = join(path, index)
            if not self._only.may_have_below(name) or self._match(item, saved[index], name):
                continue
            if not self._only.has(name):
                continue
            if type(live) is list:
                self._assignments.append((live, index, saved[index]))
            elif not _equal_plain(item, saved[index]):
                self._differences.changed.append(
                    f"{join(path, index)} (a plain value within a tuple cannot be set; use a list)"
                )
        return True

    def _replace(self, container: Any, key: Any, value: Any) -> None:
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
        saved: dict[str, SavedTensor] = {}
        for name in self._names_of(adapter, path, node):
            known = self._known_as(adapter, path, name)
            if known is not None:
                saved[name] = SavedTensor(name=name, dtype=known.dtype, global_shape=known.global_shape)
        whole = self._only.has(path)
        if whole:
            part = SavedPart(tensors=saved, plain=node.plain)
            adapter.prepare(value, part, self._parts.context(path))
        captured = self._parts.capture_one(path)
        live = {item.name for item in captured.tensors}
        for item in captured.tensors:
            full = f"{path}.{item.name}"
            if not (whole or self._only.has(full)):
                continue
            names = self._bridge.saved_names(adapter.name, path, item.name)
            if any(name in self._known for name in names):
                self._add_copy(item, full, names=names, converts=self._converts(adapter, path, item))
            else:
                self._differences.missing.append(full)
        elsewhere = captured.elsewhere or (lambda name: False)
        self._differences.unexpected.extend(
            f"{path}.{name}"
            for name in saved
            if name not in live and not elsewhere(name) and (whole or self._only.has(f"{path}.{name}"))
        )

    def _names_of(self, adapter: Adapter, path: str, node: PartNode) -> Iterable[str]:
        """The saved tensors of a part, relative to it, on whatever rank they are."""
        if path not in self._bridge.parts and not node.tensors and adapter.name == "stateful":
            return ()
        refs = refs_of(node.plain)
        names = self._bridge.names_of(adapter.name, path, self._known)
        return sorted(name for name in names if f"{path}.{name}" not in refs)

    def _known_as(self, adapter: Adapter, path: str, name: str) -> Known | None:
        names = self._bridge.saved_names(adapter.name, path, name)
        return next((self._known[item] for item in names if item in self._known), None)

    def _converts(self, adapter: Adapter, path: str, item: TensorPart) -> Collection[str]:
        """Types that a live tensor takes besides its own. A master, and what a checkpoint of another
        framework has, may come from a narrower type, exactly; an engine rounds its weights from masters at
        every step."""
        mine = str(item.tensor.dtype).removeprefix("torch.")
        found: set[str] = set()
        if path in self._bridge.parts or (adapter.name == ENGINE and item.name.startswith("master.")):
            found.update(narrow for narrow, wide in _WIDER.items() if mine in wide)
        if adapter.name == ENGINE and item.name.startswith("module."):
            found.update(_WIDER.get(mine, ()))
        return found

    def _add_copy(
        self, part: TensorPart, path: str, *, names: tuple[str, ...], converts: Collection[str] = ()
    ) -> None:
        """Note which saved chunk a live tensor comes from.

        Args:
            part: the live tensor.
            path: its name, for errors.
            names: logical tensors that have its values, the best first.
            converts: other types that it may be saved in.
        """
        part = localise(part, path)
        tensor = part.tensor.detach()
        check_tensor(tensor, path)
        spec = spec_of(part, path)
        there = [name for name in names if name in self._known]
        exact = [name for name in there if self._known[name].dtype == spec.dtype]
        chosen = (exact or there)[0]
        known = self._known[chosen]
        fits = known.global_shape == spec.global_shape and (bool(exact) or known.dtype in converts)
        if not fits:
            here = _describe(spec.dtype, spec.global_shape)
            self._differences.changed.append(
                f"{path} ({here} here, {_describe(known.dtype, known.global_shape)} saved)"
            )
            return
        self._copies.append((tensor, replace(spec, name=chosen, dtype=known.dtype)))

    def _check_ties(self, read: Read) -> None:
        """Tensors that share memory here must have been saved with the same values."""
        first: dict[tuple[Any, ...], ChunkSpec] = {}
        for destination, spec in self._copies:
            identity = memory_identity(destination)
            if identity is None:
                continue
            other = first.setdefault(identity, spec)
            if other == spec:
                continue
            one, two = (_tensor(item, read).to(destination.dtype) for item in (other, spec))
            if not torch.equal(one.view(-1).view(torch.uint8), two.view(-1).view(torch.uint8)):
                self._differences.changed.append(f"{spec.name} (tied to {other.name} here, not when saved)")
        self._raise_differences()

    def _note_fresh(self, saved: Any) -> None:
        """Tensors within plain values: they come back whole."""
        for name in sorted(refs_of(saved)):
            known = self._known.get(name)
            if known is None:
                raise StateMismatch("the checkpoint lacks a tensor that it names", where=name)
            shape = known.global_shape
            self._fresh[name] = ChunkSpec(
                name=name, dtype=known.dtype, global_shape=shape, offsets=(0,) * len(shape), sizes=shape
            )

    def _materialise(self, saved: Any, read: Read) -> Any:
        """Saved plain values with fresh tensors in the places of references."""
        if isinstance(saved, TensorRef):
            return _tensor(self._fresh[saved.name], read)
        if isinstance(saved, PartNode):
            raise StateMismatch("an object was saved where the state has none", where=self._where)
        if isinstance(saved, dict):
            for key in saved:
                saved[key] = self._materialise(saved[key], read)
            return saved
        if type(saved) is list:
            return [self._materialise(item, read) for item in saved]
        if type(saved) is tuple:
            return tuple(self._materialise(item, read) for item in saved)
        return saved


def _tensor(spec: ChunkSpec, read: Read) -> torch.Tensor:
    tensor = torch.empty(spec.sizes, dtype=getattr(torch, spec.dtype))
    read(spec, tensor)
    return tensor


def _describe(dtype: str, global_shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(global_shape)}"


def _equal_plain(live: Any, saved: Any) -> bool:
    try:
        return pack(live) == pack(saved)
    except UnsupportedValue:
        return False
