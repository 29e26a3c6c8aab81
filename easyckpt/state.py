"""From a user's state to tensors and plain values.

`capture` walks the state once: objects go through their adapter, tensors become references, everything else
is packed as typed msgpack. It changes nothing, casts nothing and calls no collective. The way back is
`easyckpt.loader`.

Modules are captured before optimizers, whatever their order in the state, since optimizers name their state
after the modules' parameters. Tensors that are the same elements of the same memory (tied weights) are stored
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from easyckpt.adapters.base import Adapter, Captured, Context, TensorPart, registry
from easyckpt.adapters.dtensor import localise
from easyckpt.bags import Bags
from easyckpt.errors import Misuse, UnsupportedValue
from easyckpt.layout import ChunkSpec
from easyckpt.plain import PartNode, TensorRef, join, pack

__all__ = [
    "CONTAINERS",
    "Capture",
    "LiveTensor",
    "Parts",
    "capture",
    "check_state",
    "check_tensor",
    "memory_identity",
    "spec_of",
]

CONTAINERS = (dict, list, tuple)
_LEAVES = (torch.Tensor, str, bytes, int, float, type(None))
"""Never taken apart by an adapter, and nothing lies below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTensor:
    """A tensor of the state and where it stands in its logical tensor."""

    spec: ChunkSpec
    tensor: torch.Tensor
    """Plain and detached; shares memory and version counter with ``original``."""
    original: torch.Tensor
    """The object that the state holds."""
    fenced: bool = False
    """Whether it changes only within an optimizer's step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capture:
    """A state taken apart. ``tensors`` are references: copy them before training goes on."""

    tensors: tuple[LiveTensor, ...]
    plain: bytes

    @property
    def specs(self) -> tuple[ChunkSpec, ...]:
        """What the layout is made of."""
        return tuple(item.spec for item in self.tensors)


def check_state(state: object) -> dict[str, Any]:
    """The state must be a dict with text keys.

    Raises:
        Misuse: it is not.
    """
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise Misuse(
            f"the state must be a dict with text keys, not {type(state).__name__}",
            hint='for example {"model": model, "optimizer": optimizer}',
        )
    return state


def capture(state: dict[str, Any], *, parts: Parts | None = None, bags: Bags | None = None) -> Capture:
    """Take a state apart.

    Args:
        state: the state.
        parts: its objects, if the caller wants to keep them; all of them are captured here.
        bags: is filled for a cheaper capture next time.

    Raises:
        Misuse: the state is not a dict with text keys, or two tensors have one name.
        UnsupportedValue: something in it cannot be stored; the key path is named.
    """
    parts = Parts(check_state(state)) if parts is None else parts
    parts.capture_all()
    collector = _Collector(parts)
    plain = pack(state, hook=collector.hook, bags=bags)
    return Capture(tensors=tuple(collector.tensors), plain=plain)


class Parts:
    """The objects of a state that have an adapter, found once, captured modules first."""

    def __init__(
        self, state: dict[str, Any], *, strict: bool = True, reseed: tuple[int, int] | None = None
    ) -> None:
        self._adapters = registry()
        self._strict = strict
        self._reseed = reseed
        self.found: dict[str, tuple[Any, Adapter]] = {}
        self.captured: dict[str, Captured] = {}
        self.parameter_names: dict[int, str] = {}
        self._find(state, "", depth=0)

    def adapter_of(self, value: object) -> Adapter | None:
        if isinstance(value, (*_LEAVES, *CONTAINERS)):
            return None
        return next((adapter for adapter in self._adapters if adapter.matches(value)), None)

    def context(self, path: str) -> Context:
        return Context(
            path=path, parameter_names=self.parameter_names, strict=self._strict, reseed=self._reseed
        )

    def order(self) -> list[str]:
        """Paths, optimizers last."""
        return sorted(self.found, key=lambda path: isinstance(self.found[path][0], torch.optim.Optimizer))

    def capture_all(self) -> None:
        for path in self.order():
            self.capture_one(path)

    def capture_one(self, path: str) -> Captured:
        value, adapter = self.found[path]
        captured = adapter.capture(value, self.context(path))
        for part in captured.tensors:
            self.parameter_names.setdefault(id(part.tensor), f"{path}.{part.name}")
        self.captured[path] = captured
        return captured

    def _find(self, value: Any, path: str, *, depth: int) -> None:
        if depth > 100:  # a cycle; the packer says where
            return
        if type(value) is dict:
            for key, item in value.items():
                if not isinstance(item, _LEAVES):  # most of a large state: no name is made for them here
                    self._find(item, join(path, key), depth=depth + 1)
        elif type(value) in (list, tuple):
            for index, item in enumerate(value):
                if not isinstance(item, _LEAVES):
                    self._find(item, join(path, index), depth=depth + 1)
        else:
            adapter = self.adapter_of(value)
            if adapter is not None:
                self.found[path] = (value, adapter)


class _Collector:
    """The packer's hook: gathers tensors, and finds those that share memory."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.tensors: list[LiveTensor] = []
        self._owners: dict[tuple[Any, ...], str] = {}
        self._kept: list[torch.Tensor] = []

    def hook(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            self._add(TensorPart(name=path, tensor=value), path)
            return TensorRef(name=path)
        found = self._parts.found.get(path)
        if found is None or found[0] is not value:
            return NotImplemented
        captured = self._parts.captured[path]
        for part in captured.tensors:
            self._add(part, f"{path}.{part.name}")
        names = tuple(part.name for part in captured.tensors)
        return PartNode(adapter=found[1].name, tensors=names, plain=captured.plain)

    def _add(self, part: TensorPart, name: str) -> None:
        original = part.tensor
        part = localise(part, name)
        tensor = part.tensor.detach()
        check_tensor(tensor, name)
        if type(tensor) is not torch.Tensor:
            tensor = tensor.as_subclass(torch.Tensor)
        identity = memory_identity(tensor)
        owner = self._owners.setdefault(identity, name) if identity else name
        self._kept.append(tensor)  # its memory must not be freed and reused while identities are compared
        spec = spec_of(part, name, alias_of=None if owner == name else owner)
        self.tensors.append(LiveTensor(spec=spec, tensor=tensor, original=original, fenced=part.fenced))


def check_tensor(tensor: torch.Tensor, name: str) -> None:
    """Raise `UnsupportedValue` unless the tensor is dense, strided and has memory of its own."""
    reason = ""
    if tensor.layout is not torch.strided:
        reason = f"a tensor of layout {tensor.layout}"
    elif tensor.device.type == "meta":
        reason = "a tensor without memory (meta device)"
    elif tensor.is_quantized:
        reason = "a quantized tensor"
    elif tensor.is_nested:
        reason = "a nested tensor"
    elif type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and (
        type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    ):
        reason = f"a tensor subclass {type(tensor).__qualname__}"
    if reason:
        raise UnsupportedValue(f"{reason} cannot be stored yet", where=name)


def memory_identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Equal for two tensors that are the same elements in the same memory; None for an empty tensor."""
    if tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(),
            tensor.is_conj(), tensor.is_neg())  # fmt: skip


def spec_of(part: TensorPart, name: str, *, alias_of: str | None = None) -> ChunkSpec:
    """The chunk that a live tensor is."""
    sizes = tuple(part.tensor.shape)
    return ChunkSpec(
        name=name,
        dtype=str(part.tensor.dtype).removeprefix("torch."),
        kind=part.kind,
        global_shape=sizes if part.global_shape is None else tuple(part.global_shape),
        offsets=(0,) * len(sizes) if part.offsets is None else tuple(part.offsets),
        sizes=sizes,
        alias_of=alias_of,
    )
