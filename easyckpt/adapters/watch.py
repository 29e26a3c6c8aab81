"""Whether a module or an optimizer still consists of the tensors that a capture found: comparisons of
identity.

Walking a model takes some ten microseconds for each tensor; comparing the dicts that hold its tensors with
copies of them takes a tenth of one. A watch holds the very objects that it compares with, so that an identity
is never that of something else. Whoever overrides how a module gives its state away is not watched: only a
new capture knows what comes then.

``_parameters``, ``_buffers`` and ``_modules`` are private to torch and have been the same since its first
release; a module without them is not watched. Tried with torch 2.13.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

__all__ = ["DictWatch", "OptimizerWatch", "watch_module"]

_OWN = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks")
_METHODS = ("state_dict", "_save_to_state_dict", "get_extra_state", "named_parameters", "named_buffers")


class DictWatch:
    """A dict, and what it held."""

    __slots__ = ("_dict", "_items", "_keys")

    def __init__(self, watched: Mapping[Any, Any]) -> None:
        self._dict = watched
        self._keys = tuple(watched)
        self._items = tuple(watched.values())

    def is_still(self) -> bool:
        """Whether it holds the same objects under the same keys, in the same order."""
        return (
            len(self._dict) == len(self._keys)
            and all(map(operator.is_, self._dict.values(), self._items))
            and tuple(self._dict) == self._keys
        )


def watch_module(module: nn.Module) -> Callable[[], bool] | None:
    """A function that says whether the module's tensors are the same objects as now; None if nothing can."""
    watches: list[DictWatch] = []
    hooks: list[Any] = []
    persistence: list[tuple[set[str], int]] = []
    for child in module.modules():
        own = [getattr(child, name, None) for name in _OWN]
        if any(getattr(type(child), name, None) is not getattr(nn.Module, name) for name in _METHODS):
            return None
        if not all(isinstance(held, dict) for held in own):
            return None
        watches.extend(DictWatch(held) for held in own if held is not None)
        hooks.extend(getattr(child, name, None) for name in _HOOKS)
        names = child._non_persistent_buffers_set
        persistence.append((names, len(names)))
    if any(hooks):  # what they add is only known when they run
        return None

    def is_still() -> bool:
        return (
            all(watch.is_still() for watch in watches)
            and not any(hooks)
            and all(len(names) == count for names, count in persistence)
        )

    return is_still


class OptimizerWatch:
    """An optimizer's parameters and the tensors that it keeps for them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = tuple(tuple(group["params"]) for group in optimizer.param_groups)
        self._state = optimizer.state
        self._owners = tuple(optimizer.state)
        self._entries = tuple(optimizer.state.values())
        self.is_possible = all(
            isinstance(owner, torch.Tensor)
            and isinstance(entries, dict)
            and all(isinstance(key, str) and isinstance(item, torch.Tensor) for key, item in entries.items())
            for owner, entries in optimizer.state.items()
        )
        """Whether its state is tensors only: all else may change in place."""
        self._watches = tuple(map(DictWatch, self._entries)) if self.is_possible else ()

    def is_still(self) -> bool:
        """Whether parameters, groups and state are the same objects as when this was made."""
        optimizer = self._optimizer
        return (
            optimizer.state is self._state
            and len(optimizer.state) == len(self._owners)
            and all(map(operator.is_, optimizer.state, self._owners))
            and all(map(operator.is_, optimizer.state.values(), self._entries))
            and len(optimizer.param_groups) == len(self._groups)
            and all(
                len(group["params"]) == len(before) and all(map(operator.is_, group["params"], before))
                for group, before in zip(optimizer.param_groups, self._groups, strict=True)
            )
            and all(watch.is_still() for watch in self._watches)
        )
