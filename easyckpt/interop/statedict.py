"""Our tree of parts ↔ the nested ``state_dict()`` that PyTorch programs keep in files.

Outwards, a module becomes a dict of tensors, an optimizer the dict that its ``load_state_dict`` takes
(parameters by number), everything else what its own ``state_dict`` gave. Values that a weights-only
``torch.load`` would refuse are turned into ones that it takes: NumPy arrays into tensors, NumPy scalars into
numbers.

Inwards, a dict is recognised by its form: one of tensors is a module, one with ``state`` and
``param_groups`` an optimizer, one with ``last_epoch`` or ``_step_count`` a scheduler, and what is named by
the caller is an object with ``load_state_dict``. An optimizer's parameters are numbers in a file and names
with us. Their names are taken from the file where it has them (``param_names``, or names in place of
numbers); else, with one group only, they are the module's tensors in order, and every moment must have the
shape that this gives; else the caller has to list them. A wrong guess would give one parameter's moments to
another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from easyckpt.errors import Misuse
from easyckpt.plain import PartNode, TensorRef, join

__all__ = [
    "STEP_KEY",
    "ImportedPart",
    "from_state_dict",
    "module_part",
    "nested",
    "optimizer_part",
    "to_state_dict",
]

STEP_KEY = "easyckpt_step"
"""Key of an export that holds the step; an import leaves it out."""

_BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")
_SCHEDULER_KEYS = ({"last_epoch"}, {"_step_count"})

Lookup = Callable[[str], torch.Tensor]
"""Stored name → the tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPart:
    """An object of somebody else's checkpoint, as one of our adapters would have taken it apart."""

    adapter: str
    tensors: Mapping[str, torch.Tensor]
    """Names relative to the object."""
    plain: Any


# ----- outwards -----


def to_state_dict(tree: Any, lookup: Lookup, *, path: str = "", by_name: bool = False) -> Any:
    """A tree that `plain.unpack` gave, as nested state dicts.

    Args:
        tree: the tree.
        lookup: gives the tensor of a stored name.
        path: key path of ``tree``.
        by_name: optimizers have names of parameters, and not numbers.
    """
    if isinstance(tree, TensorRef):
        return lookup(tree.name)
    if isinstance(tree, PartNode):
        return _part(tree, lookup, path, by_name=by_name)

    def inner(item: Any, key: Any) -> Any:
        return to_state_dict(item, lookup, path=join(path, key), by_name=by_name)

    kind = type(tree)
    if isinstance(tree, dict):
        return kind({key: inner(item, key) for key, item in tree.items()})
    if kind in (list, tuple):
        return kind(inner(item, index) for index, item in enumerate(tree))
    return _loadable(tree)


def _part(node: PartNode, lookup: Lookup, path: str, *, by_name: bool) -> Any:
    plain = to_state_dict(node.plain, lookup, path=path)
    tensors = {name: lookup(f"{path}.{name}") for name in node.tensors}
    if node.adapter == "torch.module":
        extra = plain or {"extra": {}, "other": {}}
        return {**tensors, **extra["extra"], **extra["other"]}
    if node.adapter == "torch.optimizer":
        return _optimizer(plain, tensors, by_name=by_name)
    if node.adapter == "stateful":
        return plain
    return {"tensors": tensors, "values": plain}


def nested(paths: Mapping[str, Sequence[Any]], values: Mapping[str, Any]) -> Any:
    """Flat names put back to where they came from.

    Args:
        paths: flat name → the keys (texts) and indices (numbers) that lead to it.
        values: flat name → value.
    """
    root: dict[Any, Any] = {}
    for name, path in paths.items():
        at = root
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = values[name]
    return _lists(root)


def _lists(value: Any) -> Any:
    """Dicts whose keys count from 0 become lists, which they were."""
    if type(value) is not dict:
        return value
    items = {key: _lists(item) for key, item in value.items()}
    if items and set(items) == set(range(len(items))):
        return [items[index] for index in range(len(items))]
    return items


def _optimizer(
    plain: dict[str, Any], tensors: Mapping[str, torch.Tensor], *, by_name: bool
) -> dict[str, Any]:
    """What `Optimizer.state_dict` gives."""
    numbers: dict[str, Any] = {}
    groups = []
    for group in plain["groups"]:
        for name in group["params"]:
            # The module's key in the state stands before the name.
            numbers.setdefault(name, name.partition(".")[2] or name if by_name else len(numbers))
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    state: dict[Any, Any] = {}
    for name, entries in plain["state"].items():
        listed = plain["tensors"].get(name, [])[::2]
        state[numbers[name]] = {key: tensors[f"state.{name}.{key}"] for key in listed} | entries
    return {"state": {**state, **plain["loose"]}, "param_groups": groups}


def _loadable(value: Any) -> Any:
    """A value that a weights-only load takes."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, range):
        return list(value)
    return value


# ----- inwards -----


def from_state_dict(
    value: Any, *, objects: Collection[str] = (), parameters: Sequence[str] = (), model_key: str = "model"
) -> dict[str, Any]:
    """Nested state dicts of a foreign file as a tree of parts, which a load takes into live objects.

    Args:
        value: what the file holds. A bare state dict of a module gets ``model_key`` as its key.
        objects: top-level keys whose values belong to objects with ``load_state_dict``.
        parameters: names of the module's parameters in the order in which the optimizer has them.
        model_key: key of a bare state dict.

    Raises:
        Misuse: the file holds no dict, or the parameters of an optimizer cannot be named.
    """
    if not isinstance(value, Mapping):
        raise Misuse(f"the file holds {type(value).__name__}, not a dict of states")
    value = {key: item for key, item in value.items() if key != STEP_KEY}
    if _is_module(value):
        value = {model_key: value}
    if not all(type(key) is str for key in value):
        raise Misuse("the file's keys are not texts", hint="import a dict like {'model': …, 'optimizer': …}")
    missing = [key for key in objects if key not in value]
    if missing:
        raise Misuse(f"the file has no {', '.join(missing)}", hint=f"it has {', '.join(value)}")
    tree: dict[str, Any] = {}
    for key, item in value.items():
        if key in objects:
            tree[key] = ImportedPart(adapter="stateful", tensors={}, plain=item)
        elif _is_module(item):
            tree[key] = module_part(item)
    for key, item in value.items():
        if key in tree:
            continue
        if isinstance(item, Mapping) and set(item) == {"state", "param_groups"}:
            tree[key] = optimizer_part(item, tree, key=key, parameters=parameters)
        elif isinstance(item, Mapping) and any(keys <= set(item) for keys in _SCHEDULER_KEYS):
            tree[key] = ImportedPart(adapter="stateful", tensors={}, plain=item)
        else:
            tree[key] = item
    return {key: tree[key] for key in value}


def _is_module(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and bool(value)
        and all(type(key) is str and isinstance(item, torch.Tensor) for key, item in value.items())
    )


def module_part(state: Mapping[str, torch.Tensor]) -> ImportedPart:
    """A module's state dict."""
    return ImportedPart(adapter="torch.module", tensors=dict(state), plain=None)


def optimizer_part(
    state: Mapping[str, Any], tree: Mapping[str, Any], *, key: str, parameters: Sequence[str] = ()
) -> ImportedPart:
    """An optimizer's state dict, its parameters named.

    Args:
        state: with ``state`` and ``param_groups``.
        tree: the parts found so far, the module among them.
        key: of the optimizer, for errors.
        parameters: names in the optimizer's order, if the caller knows them.

    Raises:
        Misuse: the names cannot be told.
    """
    modules = {name: part for name, part in tree.items()
               if isinstance(part, ImportedPart) and part.adapter == "torch.module"}  # fmt: skip
    if len(modules) != 1:
        raise Misuse(f"{key!r} belongs to one of {len(modules)} modules", hint="import one module at a time")
    ((path, module),) = modules.items()
    names = _names(state, module, key=key, parameters=parameters)
    tensors: dict[str, torch.Tensor] = {}
    plain_state: dict[str, dict[Any, Any]] = {}
    beside: dict[str, list[str]] = {}
    loose: dict[Any, Any] = {}
    for number, entries in state["state"].items():
        if number not in names:
            loose[number] = entries
            continue
        name = f"{path}.{names[number]}"
        plain_state[name] = {}
        for item_key, item in entries.items():
            if isinstance(item, torch.Tensor) and isinstance(item_key, str):
                tensors[f"state.{name}.{item_key}"] = item
                # Optimizers keep their step counts on the CPU, and all else beside the parameter.
                beside.setdefault(name, []).extend((item_key, "parameter" if item.ndim else "cpu"))
            else:
                plain_state[name][item_key] = item
    groups = [
        {**{k: v for k, v in group.items() if k not in ("params", "param_names")},
         "params": [f"{path}.{names[number]}" for number in group["params"]]}
        for group in state["param_groups"]
    ]  # fmt: skip
    plain = {"class": "", "groups": groups, "state": plain_state, "tensors": beside, "loose": loose}
    return ImportedPart(adapter="torch.optimizer", tensors=tensors, plain=plain)


def _names(
    state: Mapping[str, Any], module: ImportedPart, *, key: str, parameters: Sequence[str]
) -> dict[Any, str]:
    """The optimizer's own mark of each parameter → its name in the module."""
    groups = state["param_groups"]
    marks = [mark for group in groups for mark in group["params"]]
    hint = "list the names in the optimizer's order: --parameters FILE"
    if parameters:
        names = list(parameters)
    elif all(isinstance(mark, str) for mark in marks):
        names = list(marks)
    elif all("param_names" in group for group in groups):
        names = [name for group in groups for name in group["param_names"]]
    elif len(groups) == 1:
        names = [
            name for name, tensor in _distinct(module) if name.rpartition(".")[2] not in _BUFFER_SUFFIXES
        ]
    else:
        raise Misuse(f"{key!r} has {len(groups)} groups of numbered parameters", hint=hint)
    unknown = [name for name in names if name not in module.tensors]
    if len(names) != len(marks) or unknown:
        what = f"not in the module: {', '.join(unknown[:8])}" if unknown else f"{len(names)} names"
        raise Misuse(f"{key!r} has {len(marks)} parameters; {what}", hint=hint)
    named = dict(zip(marks, names, strict=True))
    for mark, entries in state["state"].items():
        for item_key, item in entries.items() if mark in named else ():
            shape = module.tensors[named[mark]].shape
            if isinstance(item, torch.Tensor) and item.ndim and item.shape != shape:
                raise Misuse(
                    f"{item_key} of parameter {mark} has the shape {list(item.shape)}, and {named[mark]} "
                    f"{list(shape)}",
                    where=key,
                    hint=hint,
                )
    # DCP makes texts of the numbers that are keys.
    return {str(mark): name for mark, name in named.items()} | named


def _distinct(module: ImportedPart) -> list[tuple[str, torch.Tensor]]:
    """The module's tensors, a tied one once, as ``parameters()`` counts them."""
    seen: set[tuple[Any, ...]] = set()
    found = []
    for name, tensor in module.tensors.items():
        identity = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        if identity not in seen:
            seen.add(identity)
            found.append((name, tensor))
    return found
