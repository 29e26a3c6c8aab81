"""Optimizer state over masters: tensors that an optimizer steps in place of the model's parameters.

Theory of operation. Mixed precision and sharded optimizers step their own tensors. Each is a copy of one
whole parameter or a flat concatenation of ranges of several (what ZeRO partitions are). This module names the
optimizer's tensors after the model's parameters, whichever it is, and makes or drops the moments of a fresh
optimizer before a load. It knows no framework: an adapter finds the masters.

Names are ``<prefix>.<parameter>`` for what belongs to a parameter, and ``<prefix>.@<group>.<index>`` for what
belongs to the master as a whole, such as a step count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from easyckpt.adapters.base import SavedPart, TensorPart
from easyckpt.layout import ChunkKind

__all__ = ["Master", "Range", "adjust_state", "describe", "is_ranged", "parts", "set_plain", "state_parts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A range of one flattened parameter inside a master."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    param_start: int
    master_start: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Master:
    """A tensor that the optimizer steps, and what it consists of."""

    key: str
    """``<group>.<index>``."""
    tensor: torch.Tensor
    ranges: tuple[Range, ...] | None = None
    """None if the master is one whole parameter in its own shape."""
    name: str = ""
    """Of that whole parameter."""
    is_parameter: bool = False
    """Whether it is the model's parameter itself, which is stored with the module."""


def state_parts(
    masters: Iterable[Master], state: Mapping[torch.Tensor, Mapping[str, Any]]
) -> Iterator[TensorPart]:
    """The masters, and the tensors that the optimizer keeps for each."""
    for master in masters:
        if not master.is_parameter:
            yield from parts(master, "master", master.tensor)
        for key, value in state.get(master.tensor, {}).items():
            if isinstance(value, torch.Tensor):
                yield from parts(master, f"state.{key}", value)


def parts(master: Master, prefix: str, tensor: torch.Tensor) -> Iterator[TensorPart]:
    """One tensor of a master, cut at the borders of its parameters."""
    tensor = tensor.detach()
    if master.ranges is None:
        yield TensorPart(name=f"{prefix}.{master.name}", tensor=tensor, fenced=True)
    elif tensor.shape != master.tensor.shape:
        yield TensorPart(name=f"{prefix}.@{master.key}", tensor=tensor, fenced=True)
    else:
        for part in master.ranges:
            yield TensorPart(
                name=f"{prefix}.{part.name}",
                tensor=tensor.narrow(0, part.master_start, part.length),
                kind=ChunkKind.FLAT,
                global_shape=part.shape,
                offsets=(part.param_start,),
                fenced=True,
            )


def is_ranged(master: Master, value: Any) -> bool:
    """Whether ``value`` has an element for each element of a flat master."""
    return (
        isinstance(value, torch.Tensor) and master.ranges is not None and value.shape == master.tensor.shape
    )


def describe(master: Master, state: Mapping[str, Any]) -> list[list[Any]]:
    """What the optimizer keeps for a master, in its order, for `adjust_state` and `set_plain`.

    Each entry is ``[key, "ranged"]``, ``[key, "whole", type, shape]`` or ``[key, "plain", value]``.
    """
    entries: list[list[Any]] = []
    for key, value in state.items():
        if is_ranged(master, value):
            entries.append([key, "ranged"])
        elif isinstance(value, torch.Tensor):
            entries.append([key, "whole", str(value.dtype).removeprefix("torch."), list(value.shape)])
        else:
            entries.append([key, "plain", value])
    return entries


def adjust_state(
    masters: Iterable[Master],
    state: MutableMapping[torch.Tensor, dict[str, Any]],
    *,
    described: Mapping[str, Any],
    saved: SavedPart,
) -> None:
    """Make what was saved and is not there yet, as zeros; drop what was not saved.

    Args:
        masters: of this rank.
        state: the optimizer's.
        described: `describe` of each master that had state when it was saved, by the master's key.
        saved: names and types of the saved tensors.
    """
    for master in masters:
        entries = described.get(master.key)
        if entries is None:
            state.pop(master.tensor, None)
            continue
        own = dict(state.get(master.tensor, {}))
        state[master.tensor] = {
            entry[0]: own[entry[0]] if entry[0] in own else _make(master, entry, saved) for entry in entries
        }


def _make(master: Master, entry: list[Any], saved: SavedPart) -> Any:
    key, kind, *rest = entry
    if kind == "ranged":
        return torch.zeros_like(master.tensor, dtype=_dtype_of(key, master, saved), requires_grad=False)
    if kind == "whole":
        dtype_name, shape = rest
        device = (
            master.tensor.device if shape else torch.device("cpu")
        )  # a count lies where optimizers keep it
        return torch.zeros(tuple(shape), dtype=getattr(torch, dtype_name), device=device)
    return rest[0]


def set_plain(
    masters: Iterable[Master],
    state: MutableMapping[torch.Tensor, dict[str, Any]],
    described: Mapping[str, Any],
) -> None:
    """Set the values that are not tensors."""
    for master in masters:
        values = {key: rest[0] for key, kind, *rest in described.get(master.key, ()) if kind == "plain"}
        if values:
            state[master.tensor].update(values)


def _dtype_of(key: str, master: Master, saved: SavedPart) -> torch.dtype:
    for part in master.ranges or ():
        tensor = saved.tensors.get(f"state.{key}.{part.name}")
        if tensor is not None:
            dtype = getattr(torch, tensor.dtype)
            assert isinstance(dtype, torch.dtype)
            return dtype
    return master.tensor.dtype
