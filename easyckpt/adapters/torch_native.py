"""Adapters for what torch itself has: modules, optimizers, and objects with ``state_dict``.

**Modules** are named as torch's state-dict helpers name them: the prefixes that DDP and `torch.compile` put
in (``module.``, ``_orig_mod.``) are left out. The parameters and buffers themselves are read and written.
What a module adds to its ``state_dict`` beyond them (extra state, entries of hooks) is kept as plain state
and given back through the module's own methods.

**Optimizers** are read from and written into ``optimizer.state`` directly. ``Optimizer.load_state_dict``
casts the moments to the parameter's type, and an empty optimizer would have to run a step to have any;
neither happens here. Parameters have the names that the modules in the state give them, else their index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from easyckpt.adapters import gradients
from easyckpt.adapters.base import Adapter, Captured, Context, SavedPart, SavedTensor, TensorPart
from easyckpt.adapters.watch import OptimizerWatch, watch_module
from easyckpt.errors import StateMismatch, UnsupportedValue
from easyckpt.plain import Frozen

__all__ = ["ADAPTERS", "ModuleAdapter", "OptimizerAdapter", "StatefulAdapter", "compare_groups"]

_EXTRA_STATE = "_extra_state"


class ModuleAdapter:
    """Any `nn.Module`."""

    name = "torch.module"

    def matches(self, value: object) -> bool:
        """See `Adapter.matches`."""
        return isinstance(value, nn.Module)

    def capture(self, value: nn.Module, context: Context) -> Captured:
        """See `Adapter.capture`."""
        _refuse_unsupported(value, context.path)
        wrappers = _wrapper_prefixes(value)
        entries = value.state_dict(
            keep_vars=True
        )  # first: FSDP2 brings its parameters to their shards with it
        own: dict[str, torch.Tensor] = dict(value.named_parameters(remove_duplicate=False))
        own.update(value.named_buffers(remove_duplicate=False))
        tensors: list[TensorPart] = []
        extra: dict[str, Any] = {}
        other: dict[str, Any] = {}
        for raw, entry in entries.items():
            name = _without(raw, wrappers)
            if isinstance(entry, torch.Tensor) and own.get(raw) is entry:
                fenced = isinstance(entry, nn.Parameter)  # a buffer may change in forward
                tensors.append(TensorPart(name=name, tensor=entry, fenced=fenced))
            elif raw.rpartition(".")[2] == _EXTRA_STATE:
                extra[name] = entry
            else:
                other[name] = entry.detach() if isinstance(entry, torch.Tensor) else entry
        if extra or other:
            return Captured(tensors=tuple(tensors), plain={"extra": extra, "other": other})
        is_still = watch_module(value)

        def again() -> Captured | None:
            return found if is_still is not None and is_still() else None

        found = Captured(tensors=tuple(tensors), again=again if is_still is not None else None)
        return found

    def prepare(self, value: nn.Module, saved: SavedPart, context: Context) -> None:
        """A module has its tensors already."""

    def finish(self, value: nn.Module, plain: Any, context: Context) -> None:
        """Give extra state and entries of hooks back through the module's own methods."""
        if not plain:
            return
        wrappers = _wrapper_prefixes(value)
        raw_of = {_without(raw, wrappers): raw for raw in value.state_dict(keep_vars=True)}
        for name, entry in plain["extra"].items():
            owner = raw_of.get(name, name).rpartition(".")[0]
            value.get_submodule(owner).set_extra_state(entry)
        if plain["other"]:
            entries = {raw_of.get(name, name): entry for name, entry in plain["other"].items()}
            value.load_state_dict({**value.state_dict(), **entries}, strict=False)


def _refuse_unsupported(module: nn.Module, path: str) -> None:
    for name, child in module.named_modules():
        for base in type(child).__mro__:
            if base.__name__ == "FullyShardedDataParallel" and base.__module__.startswith("torch."):
                raise UnsupportedValue(
                    "FSDP1 modules gather their state with collectives, which a save must not do",
                    where=f"{path}.{name}".rstrip("."),
                    hint="use fully_shard (FSDP2)",
                )
    for name, tensor in _all_tensors(module):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise UnsupportedValue(
                "a lazy parameter has no shape yet",
                where=f"{path}.{name}",
                hint="run one forward pass first",
            )


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _wrapper_prefixes(module: nn.Module) -> tuple[str, ...]:
    """Raw paths of children that only wrap, with a final dot, longest first: ``net._orig_mod.``."""
    found = []
    for name, child in module.named_modules(remove_duplicate=False):
        for attribute, kinds in _WRAPPERS:
            if type(child).__name__ in kinds and isinstance(getattr(child, attribute, None), nn.Module):
                found.append(f"{name}.{attribute}." if name else f"{attribute}.")
    return tuple(sorted(found, key=len, reverse=True))


_WRAPPERS = (
    ("module", frozenset({"DistributedDataParallel", "DataParallel"})),
    ("_orig_mod", frozenset({"OptimizedModule"})),
)
"""Attribute that holds the wrapped module, and the types that hold one there."""


def _without(raw: str, wrappers: tuple[str, ...]) -> str:
    for prefix in wrappers:  # longest first, so that a shorter one is still found at its place
        if raw.startswith(prefix):
            keep = prefix[:-1].rpartition(".")[0]
            raw = f"{keep}.{raw[len(prefix) :]}" if keep else raw[len(prefix) :]
    return raw


class OptimizerAdapter:
    """Any `torch.optim.Optimizer`."""

    name = "torch.optimizer"

    def matches(self, value: object) -> bool:
        """See `Adapter.matches`."""
        return isinstance(value, Optimizer)

    def capture(self, value: Optimizer, context: Context) -> Captured:
        """See `Adapter.capture`."""
        names = _parameter_names(value, context)
        tensors: list[TensorPart] = []
        state: dict[str, dict[Any, Any]] = {}
        beside: dict[str, list[str]] = {}
        loose: dict[Any, Any] = {}
        for owner, entries in value.state.items():
            if not isinstance(owner, torch.Tensor):
                loose[owner] = entries
                continue
            name = names.get(id(owner))
            if name is None:
                raise UnsupportedValue(
                    "optimizer state of a parameter that is in no group", where=context.path
                )
            state[name] = {}
            for key, entry in entries.items():
                if isinstance(entry, torch.Tensor) and isinstance(key, str):
                    tensors.append(TensorPart(name=f"state.{name}.{key}", tensor=entry, fenced=True))
                    where = "parameter" if entry.device == owner.device else str(entry.device.type)
                    beside.setdefault(name, []).extend((key, where))
                else:
                    state[name][key] = entry
        pending = gradients.are_pending(value)
        if pending:
            tensors.extend(
                TensorPart(name=f"grad.{names[id(parameter)]}", tensor=parameter.grad)
                for group in value.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            )
        in_groups = [
            Frozen([names[id(parameter)] for parameter in group["params"]]) for group in value.param_groups
        ]
        watch = OptimizerWatch(value)
        kept = Frozen(state) if watch.is_possible else state
        listed = Frozen(beside)

        def plain() -> dict[str, Any]:
            groups = [
                {**{key: entry for key, entry in group.items() if key != "params"}, "params": frozen}
                for group, frozen in zip(value.param_groups, in_groups, strict=True)
            ]
            return {
                "class": type(value).__name__,
                "groups": groups,
                "state": kept,
                "tensors": listed,
                "loose": loose,
            }

        def again() -> Captured | None:
            is_still = watch.is_still() and not gradients.are_pending(value)
            return replace(found, plain=plain()) if is_still else None

        cheap = watch.is_possible and not pending
        found = Captured(tensors=tuple(tensors), plain=plain(), again=again if cheap else None)
        return found

    def prepare(self, value: Optimizer, saved: SavedPart, context: Context) -> None:
        """Create the moments that were saved and are not there, drop those that were not saved."""
        names = _parameter_names(value, context)
        have = [[names[id(p)] for p in group["params"]] for group in value.param_groups]
        compare_groups(type(value).__name__, have, plain=saved.plain, context=context)
        by_name = {names[id(p)]: p for group in value.param_groups for p in group["params"]}
        for owner in [key for key in value.state if isinstance(key, torch.Tensor)]:
            wanted = saved.plain["tensors"].get(names.get(id(owner), ""), [])
            for key in [k for k, v in value.state[owner].items() if isinstance(v, torch.Tensor)]:
                if key not in wanted[::2]:
                    del value.state[owner][key]
            if names.get(id(owner), "") not in saved.plain["state"]:
                del value.state[owner]
        for name, listing in saved.plain["tensors"].items():
            parameter = by_name.get(name)
            if parameter is None:  # only when the load is not strict
                continue
            for key, where in zip(listing[::2], listing[1::2], strict=True):
                spec = saved.tensors.get(f"state.{name}.{key}")
                if spec is not None and not _fits(value.state[parameter].get(key), spec):
                    value.state[parameter][key] = _create(spec, parameter, where)
        for name, parameter in by_name.items():
            if f"grad.{name}" in saved.tensors and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
        gradients.expect(value, pending=any(name.startswith("grad.") for name in saved.tensors))

    def finish(self, value: Optimizer, plain: Any, context: Context) -> None:
        """Set what is not a tensor kept in place: hyperparameters, counters, histories."""
        names = _parameter_names(value, context)
        by_name = {names[id(p)]: p for group in value.param_groups for p in group["params"]}
        for group, saved_group in zip(value.param_groups, plain["groups"], strict=False):
            for key, entry in saved_group.items():
                if key == "params":
                    continue
                present = group.get(key)
                if isinstance(present, torch.Tensor) and isinstance(entry, torch.Tensor):
                    with torch.no_grad():
                        present.copy_(entry)
                else:
                    group[key] = entry
        for name, entries in plain["state"].items():
            parameter = by_name.get(name)
            if parameter is None:
                continue
            kept = {key: v for key, v in value.state[parameter].items() if isinstance(v, torch.Tensor)}
            listed = plain["tensors"].get(name, [])[::2]
            restored = {key: _to_device(entry, parameter.device) for key, entry in entries.items()}
            value.state[parameter].clear()
            value.state[parameter].update({key: v for key, v in kept.items() if key in listed})
            value.state[parameter].update(restored)
        for key in [key for key in value.state if not isinstance(key, torch.Tensor)]:
            del value.state[key]
        for key, entry in plain["loose"].items():
            value.state[key] = entry


def _parameter_names(optimizer: Optimizer, context: Context) -> dict[int, str]:
    names: dict[int, str] = {}
    index = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            names[id(parameter)] = context.parameter_names.get(id(parameter), f"#{index}")
            index += 1
    return names


def compare_groups(
    kind: str, have: Sequence[Sequence[str]], *, plain: Mapping[str, Any], context: Context
) -> None:
    """Whether an optimizer can take what was saved.

    Args:
        kind: the optimizer's class.
        have: names of the parameters in each of its groups.
        plain: what was saved; an import has no class.
        context: of the load; one that is not strict takes all.

    Raises:
        StateMismatch: it is of another class or has other groups.
    """
    if not context.strict:
        return
    if plain["class"] and kind != plain["class"]:  # an import does not know it
        raise StateMismatch(
            f"an optimizer {kind} cannot take the state of {plain['class']}",
            changed=(context.path,),
            where=context.path,
        )
    saved = [list(group["params"]) for group in plain["groups"]]
    if list(map(sorted, have)) == list(map(sorted, saved)):
        return
    flat_have = {name for group in have for name in group}
    flat_saved = {name for group in saved for name in group}
    raise StateMismatch(
        f"its parameter groups differ: {[len(group) for group in have]} parameters here, "
        f"{[len(group) for group in saved]} in the checkpoint",
        missing=tuple(sorted(flat_have - flat_saved)),
        unexpected=tuple(sorted(flat_saved - flat_have)),
        where=context.path,
        hint="build the optimizer with the same groups in the same order",
    )


def _fits(present: object, spec: SavedTensor) -> bool:
    return (
        isinstance(present, torch.Tensor)
        and tuple(present.shape) == spec.global_shape
        and str(present.dtype) == f"torch.{spec.dtype}"
    )


def _create(spec: SavedTensor, parameter: torch.Tensor, where: str) -> torch.Tensor:
    dtype = getattr(torch, spec.dtype)
    device = parameter.device if where == "parameter" else torch.device(where)
    if tuple(parameter.shape) == spec.global_shape and device == parameter.device:
        # Keeps strides such as channels_last, and shards, as optimizers themselves do.
        return torch.zeros_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.zeros(spec.global_shape, dtype=dtype, device=device)


def _to_device(entry: Any, device: torch.device) -> Any:
    if isinstance(entry, torch.Tensor):
        return entry.to(device)
    if type(entry) is list:
        return [_to_device(item, device) for item in entry]
    if type(entry) is tuple:
        return tuple(_to_device(item, device) for item in entry)
    if type(entry) is dict:
        return {key: _to_device(item, device) for key, item in entry.items()}
    return entry


class StatefulAdapter:
    """Anything with ``state_dict`` and ``load_state_dict``: schedulers, samplers, loaders, scalers, `RNG`."""

    name = "stateful"

    def matches(self, value: object) -> bool:
        """See `Adapter.matches`."""
        kind = type(value)
        return callable(getattr(kind, "state_dict", None)) and callable(
            getattr(kind, "load_state_dict", None)
        )

    def capture(self, value: Any, context: Context) -> Captured:
        """See `Adapter.capture`."""
        return Captured(tensors=(), plain=value.state_dict())

    def prepare(self, value: Any, saved: SavedPart, context: Context) -> None:
        """Nothing to create: its state comes back as a whole."""

    def finish(self, value: Any, plain: Any, context: Context) -> None:
        """See `Adapter.finish`. What each rank has alone begins anew where the number of ranks is another."""
        if context.reseed is not None and callable(getattr(type(value), "reseed", None)):
            value.reseed(*context.reseed)
        else:
            value.load_state_dict(plain)


ADAPTERS: tuple[Adapter, ...] = (ModuleAdapter(), OptimizerAdapter(), StatefulAdapter())
