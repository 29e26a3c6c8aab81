"""What an adapter is: it tells where an object keeps its tensors, and easyckpt does the rest.

`nn.Module`, `Optimizer` and anything with ``state_dict``/``load_state_dict`` are themselves handled by
adapters of this shape (`easyckpt.adapters.torch_native`); a framework's engine gets its own file here. An
adapter never copies tensor bytes, never knows files or slots, and stands alone in knowing a framework's
private names.

**Save**: `Adapter.capture` returns the object's live tensors (references, not copies) and its plain state.
easyckpt copies the tensors into the slot before `save` returns, or, where a part is ``fenced``, before the
next optimizer step. A capture may say how to make the next one cheaper (`Captured.again`).

**Load**, in this order, nothing being written before everything was compared:

1. `Adapter.prepare` is told what was saved (names, types, shapes, plain state) and may create tensors which
   `capture` must find, such as the moments of an optimizer that has not stepped yet, or drop those that
   were not saved. It must not change values that training sees.
2. `Adapter.capture` is called again: its tensors are the destinations. Names that are missing, unexpected,
   reshaped or retyped fail a strict load.
3. easyckpt copies the saved bytes into these tensors in place, without any cast.
4. `Adapter.finish` sets the plain state. Tensors inside the plain state come back as fresh CPU tensors.

Which adapter takes an object: the first in `registry()` whose ``matches`` says so. ``matches`` must be
cheap and must not import the framework: look at ``type(value).__module__`` of the object's base classes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from easyckpt.layout import ChunkKind

if TYPE_CHECKING:
    import torch

__all__ = ["Adapter", "Captured", "Context", "SavedPart", "SavedTensor", "TensorPart", "registry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPart:
    """One live tensor of an object, and which part of a logical tensor it is.

    A tensor that is all of its logical tensor needs only ``name`` and ``tensor``. A box of an n-dimensional
    tensor gives ``global_shape`` and ``offsets`` (its own shape is the size). A flat range of the flattened
    logical tensor (what ZeRO partitions are) gives ``kind=FLAT``, ``global_shape`` and
    ``offsets=(start,)``; the tensor is then one-dimensional. Two parts with the same tensor memory, type
    and shape are stored once.
    """

    name: str
    """Relative to the object; the key of the object in the state is put before it."""
    tensor: torch.Tensor
    kind: ChunkKind = ChunkKind.BOX
    global_shape: tuple[int, ...] | None = None
    offsets: tuple[int, ...] | None = None
    fenced: bool = False
    """Whether it changes only within an optimizer's step (parameters, moments, masters), so that its copy may
    go on while the next forward and backward run. What forward changes (buffers) is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """What an object consists of."""

    tensors: tuple[TensorPart, ...]
    """Written in place at load."""
    plain: Any = None
    """Numbers, strings, bytes, None, lists, tuples, dicts, sets, arrays, and tensors that are not kept in
    place."""
    elsewhere: Callable[[str], bool] | None = None
    """Whether a tensor of this name may be the object's, though none of it is on this rank."""
    again: Callable[[], Captured | None] | None = None
    """Looks, cheaply, whether a new capture would find the very same tensors: this one with the plain state
    of now, or None if it has to be captured anew. Without it every save captures anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor in the checkpoint, as far as its shape goes."""

    name: str
    """Relative to the object, as `TensorPart.name`."""
    dtype: str
    """By torch's name without ``torch.``: ``bfloat16``."""
    global_shape: tuple[int, ...]
    """Of the logical tensor; how it was cut is of no concern to a load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPart:
    """What the checkpoint holds for one object."""

    tensors: Mapping[str, SavedTensor]
    plain: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What an adapter may know about the rest of the state."""

    path: str
    """Key path of the object, for errors."""
    parameter_names: Mapping[int, str] = field(default_factory=dict)
    """``id(parameter)`` → full logical name, for the parameters of all modules in the state."""
    strict: bool = True
    """False at a load that tolerates differences."""
    reseed: tuple[int, int] | None = None
    """(seed, rank) at a load of what another number of ranks saved: for values that each rank has alone."""


@runtime_checkable
class Adapter(Protocol):
    """Reads and writes one kind of object. Called on the training thread only."""

    name: str
    """Stands in the checkpoint: a part saved by one adapter is loaded by the adapter of that name."""

    def matches(self, value: object) -> bool:
        """Whether this adapter takes the object. Cheap, imports nothing, never raises."""
        ...

    def capture(self, value: Any, context: Context) -> Captured:
        """The object's live tensors and plain state. Must not change the object.

        Raises:
            UnsupportedValue: the object is in a state, or of a version, that cannot be saved.
        """
        ...

    def prepare(self, value: Any, saved: SavedPart, context: Context) -> None:
        """Before a load: make ``capture`` find the tensors that were saved, where they can be made.

        Raises:
            StateMismatch: the object cannot take what was saved.
        """
        ...

    def finish(self, value: Any, plain: Any, context: Context) -> None:
        """After all tensors were written in place: set the plain state."""
        ...


_FRAMEWORKS = ("easyckpt.adapters.deepspeed",)
"""Modules with an ``ADAPTER``; imported when an object is met that the built-in adapters do not take
first."""


def registry() -> tuple[Adapter, ...]:
    """All adapters, framework ones first, since their engines are often modules too.

    A framework's adapter module must be importable without its framework.
    """
    native = importlib.import_module("easyckpt.adapters.torch_native")
    found: list[Adapter] = []
    for module in _FRAMEWORKS:
        try:
            found.append(importlib.import_module(module).ADAPTER)
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
    return (*found, *native.ADAPTERS)
