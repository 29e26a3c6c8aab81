"""Optimizer state over masters: tensors that an optimizer steps in place of the model's parameters.

Theory of operation. Mixed precision and sharded optimizers step their own tensors. Each is a copy of one
whole parameter or a flat concatenation of ranges of several (what ZeRO partitions are). This module names the
optimizer's tensors after the model's parameters, whichever it is, and makes or drops the moments of a fresh
optimizer before a load. It knows no framework: an adapter finds the masters.

Names are those of a plain optimizer (`easyckpt.adapters.torch_native`), so that one loads what the other
saved: ``state.<parameter>.<key>`` for what the optimizer keeps, ``master.<parameter>`` for the master
itself. What belongs to a flat master as a whole, such as a step count, stands under the name of each of its
parameters, as one tensor with several names. Plain state has a plain optimizer's form too; it lists all
parameters of a group, also those that other ranks hold, since another cut will give a rank other ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from easyckpt.adapters.base import SavedPart, SavedTensor, TensorPart
from easyckpt.layout import ChunkKind

__all__ = ["Master", "Range", "adjust_state", "is_ranged", "parts", "plain_of", "set_plain", "state_parts"]


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

    group: int
    """Of the optimizer's groups."""
    tensor: torch.Tensor
    ranges: tuple[Range, ...] | None = None
    """None if the master is one whole parameter in its own shape."""
    name: str = ""
    """Of that whole parameter."""
    is_parameter: bool = False
    """Whether it is the model's parameter itself, which is stored with the module."""

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters in it, with their whole shapes."""
        if self.ranges is None:
            return {self.name: tuple(self.tensor.shape)}
        return {part.name: part.shape for part in self.ranges}


def state_parts(
    masters: Iterable[Master], state: Mapping[torch.Tensor, Mapping[str, Any]]
) -> Iterator[TensorPart]:
    """The masters, and the tensors that the optimizer keeps for each."""
    for master in masters:
        if not master.is_parameter:
            yield from parts(master, master.tensor, prefix="master.")
        for key, value in state.get(master.tensor, {}).items():
            if isinstance(value, torch.Tensor):
                yield from parts(master, value, prefix="state.", suffix=f".{key}")


def parts(master: Master, tensor: torch.Tensor, *, prefix: str, suffix: str = "") -> Iterator[TensorPart]:
    """One tensor of a master, cut at the borders of its parameters."""
    tensor = tensor.detach()
    if master.ranges is None or not is_ranged(master, tensor):
        for name in master.shapes:
            yield TensorPart(name=f"{prefix}{name}{suffix}", tensor=tensor, fenced=True)
        return
    for part in master.ranges:
        yield TensorPart(
            name=f"{prefix}{part.name}{suffix}",
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


def plain_of(
    optimizer: torch.optim.Optimizer, masters: Iterable[Master], *, names: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """An optimizer's plain state, in the form of a plain optimizer.

    Args:
        optimizer: steps the masters.
        masters: of this rank.
        names: the parameters of each group, on whatever rank they are.
    """
    tensors: dict[str, list[str]] = {}
    state: dict[str, dict[str, Any]] = {}
    own: dict[int, list[Master]] = {}
    for master in masters:
        own.setdefault(master.group, []).append(master)
    for group, members in enumerate(names):
        found = [master for master in own.get(group, ()) if master.tensor in optimizer.state]
        of_name = {name: master for master in found for name in master.shapes}
        for name in members:
            holder = of_name.get(name) or (found[0] if found and _is_flat(own[group]) else None)
            if holder is not None:
                tensors[name], state[name] = _describe(holder, optimizer.state[holder.tensor])
    groups = [
        {**{key: item for key, item in group.items() if key != "params"}, "params": list(members)}
        for group, members in zip(optimizer.param_groups, names, strict=True)
    ]
    return {
        "class": type(optimizer).__name__,
        "groups": groups,
        "state": state,
        "tensors": tensors,
        "loose": {},
    }


def _is_flat(masters: Iterable[Master]) -> bool:
    return any(master.ranges is not None for master in masters)


def _describe(master: Master, state: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Keys of tensors, each followed by where it lies, and values that are no tensors."""
    listing: list[str] = []
    plain: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            where = "parameter" if value.device == master.tensor.device else str(value.device.type)
            listing += [key, where]
        else:
            plain[key] = value
    return listing, plain


def adjust_state(
    masters: Iterable[Master],
    state: MutableMapping[torch.Tensor, dict[str, Any]],
    *,
    plain: Mapping[str, Any],
    saved: SavedPart,
) -> None:
    """Make what was saved and is not there yet, as zeros; drop what was not saved.

    Args:
        masters: of this rank.
        state: the optimizer's.
        plain: what `plain_of` gave.
        saved: names and types of the saved tensors.
    """
    for master in masters:
        name = _listed(master, plain)
        if name is None:
            state.pop(master.tensor, None)
            continue
        own = dict(state.get(master.tensor, {}))
        entries: dict[str, Any] = dict(plain["state"].get(name, {}))
        listing = plain["tensors"][name]
        for key, where in zip(listing[::2], listing[1::2], strict=True):
            present = own.get(key)
            if not isinstance(present, torch.Tensor):
                present = _make(master, key, where, saved=saved, name=name)
            if present is not None:
                entries[key] = present
        state[master.tensor] = entries


def _listed(master: Master, plain: Mapping[str, Any]) -> str | None:
    """A parameter whose listing is the master's; one of its group, if all that it holds is padding."""
    tensors = plain["tensors"]
    for name in (*master.shapes, *(() if master.shapes else plain["groups"][master.group]["params"])):
        if name in tensors:
            return str(name)
    return None


def _make(master: Master, key: str, where: str, *, saved: SavedPart, name: str) -> torch.Tensor | None:
    for own, shape in (*master.shapes.items(), (name, None)):
        spec = saved.tensors.get(f"state.{own}.{key}")
        if spec is None:
            continue
        dtype = getattr(torch, spec.dtype)
        device = master.tensor.device if where == "parameter" else torch.device(where)
        if spec.global_shape == (_shape_of(saved, own) if shape is None else shape) and not (
            key == "step" and spec.global_shape == ()
        ):
            return torch.zeros_like(master.tensor, dtype=dtype, device=device, requires_grad=False)
        return torch.zeros(spec.global_shape, dtype=dtype, device=device)
    return None


def _shape_of(saved: SavedPart, name: str) -> tuple[int, ...] | None:
    found: SavedTensor | None = saved.tensors.get(f"master.{name}") or saved.tensors.get(f"module.{name}")
    return None if found is None else found.global_shape


def set_plain(
    masters: Iterable[Master],
    state: MutableMapping[torch.Tensor, dict[str, Any]],
    plain: Mapping[str, Any],
) -> None:
    """Set the values that are not tensors."""
    for master in masters:
        name = _listed(master, plain)
        if name is not None and plain["state"].get(name):
            state[master.tensor].update(plain["state"][name])
