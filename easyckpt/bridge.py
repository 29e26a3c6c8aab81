"""One training saved by one framework and loaded by another: which saved name is which live name. Pure.

A module and its optimizer (plain, DDP, FSDP2) are two values of a state; a DeepSpeed engine is one that
holds both. The tensors are the same: weights by the module's name, moments by (module's name, key), and the
fp32 master of a weight where there is one. So where the state holds one and the checkpoint the other, the
saved parts are shown as parts of the live kind:

=============================  ==========================================================================
live tensor                    saved names it may come from, in order
=============================  ==========================================================================
engine ``E.module.<w>``        ``E.module.<w>`` or ``M.<w>``; a master of the wanted type
engine ``E.master.<w>``        ``E.master.<w>``; else the weight: its exact upcast
engine ``E.state.<w>.<key>``   ``E.state.<w>.<key>`` or ``O.state.M.<w>.<key>``
module ``M.<w>``               ``M.<w>`` or ``E.module.<w>``; the master ``E.master.<w>`` of the wanted type
optimizer ``O.state.M.<w>.…``  the same, or ``E.state.<w>.<key>``
=============================  ==========================================================================

Group options and step counts go along. What only one side has stays behind: the engine's counters, loss scale
and scheduler, and schedulers beside a plain optimizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from easyckpt.plain import PartNode, join

__all__ = ["ENGINE", "MODULE", "OPTIMIZER", "Bridge", "bridge"]

ENGINE, MODULE, OPTIMIZER = "deepspeed", "torch.module", "torch.optimizer"
"""Names of adapters, as they stand in checkpoints."""


@dataclass(slots=True)
class Bridge:
    """How live names are found among saved ones."""

    tree: dict[str, Any]
    """The saved tree, with parts of the live kind."""
    parts: dict[str, PartNode] = field(default_factory=dict)
    """Live path → the part that was made for it; it replaces what the tree has there."""
    engine: str = ""
    """Path of the engine, here or there; empty if nothing is bridged."""
    module: str = ""
    optimizer: str = ""
    to_engine: bool = False

    def saved_names(self, adapter: str, path: str, name: str) -> tuple[str, ...]:
        """Where a live tensor of a part may come from, the best first."""
        own = f"{path}.{name}"
        if adapter == ENGINE:
            kind, _, rest = name.partition(".")
            if path in self.parts:
                return self._from_plain(kind, rest)
            if kind == "module":
                return (own, f"{path}.master.{rest}")
            if kind == "master":
                return (own, f"{path}.module.{rest}")
        elif path in self.parts and adapter == MODULE:
            return (f"{self.engine}.module.{name}", f"{self.engine}.master.{name}")
        elif path in self.parts and adapter == OPTIMIZER:
            prefix = f"state.{self.module}."
            return (f"{self.engine}.state.{name.removeprefix(prefix)}",) if name.startswith(prefix) else ()
        return (own,)

    def _from_plain(self, kind: str, rest: str) -> tuple[str, ...]:
        if kind == "state":
            return (f"{self.optimizer}.state.{self.module}.{rest}",) if self.optimizer else ()
        return (f"{self.module}.{rest}",)

    def names_of(self, adapter: str, path: str, known: Mapping[str, Any]) -> set[str]:
        """All names, relative to the live part, that the checkpoint has for it."""
        if path not in self.parts:
            return _below(known, path)
        if adapter == ENGINE:
            weights = {f"module.{name}" for name in _below(known, self.module)}
            moments = _below(known, f"{self.optimizer}.state.{self.module}") if self.optimizer else set()
            return weights | {f"state.{name}" for name in moments}
        if adapter == MODULE:
            return _below(known, f"{self.engine}.module")
        return {f"state.{self.module}.{name}" for name in _below(known, f"{self.engine}.state")}


def _below(known: Mapping[str, Any], path: str) -> set[str]:
    prefix = f"{path}."
    return {name[len(prefix) :] for name in known if name.startswith(prefix)}


def bridge(tree: dict[str, Any], live: Mapping[str, str]) -> Bridge:
    """Find what has to be bridged.

    Args:
        tree: the saved tree.
        live: path → adapter of each part of the state.
    """
    live = {path: adapter for path, adapter in live.items() if not set(path) & set(".[\\")}
    saved = {join("", key): value for key, value in tree.items() if isinstance(value, PartNode)}
    engines = [path for path, adapter in live.items() if adapter == ENGINE]
    saved_engines = [path for path, node in saved.items() if node.adapter == ENGINE]
    if len(engines) == 1 and not saved_engines:
        return _to_engine(tree, engines[0], saved)
    if len(saved_engines) == 1 and not engines:
        return _from_engine(tree, saved_engines[0], saved[saved_engines[0]], live)
    return Bridge(tree=tree)


def _only(paths: list[str], preferred: str) -> str:
    if preferred in paths:
        return preferred
    return paths[0] if len(paths) == 1 else ""


def _to_engine(tree: dict[str, Any], engine: str, saved: Mapping[str, PartNode]) -> Bridge:
    module = _only([path for path, node in saved.items() if node.adapter == MODULE], engine)
    optimizer = _only([path for path, node in saved.items() if node.adapter == OPTIMIZER], "")
    if not module:
        return Bridge(tree=tree)
    plain: dict[str, Any] = {"module": saved[module].plain, "optimizer": None}
    if optimizer:
        plain["optimizer"] = _renamed(saved[optimizer].plain, lambda name: name.removeprefix(f"{module}."))
    part = PartNode(adapter=ENGINE, tensors=(), plain=plain)
    kept = {key: value for key, value in tree.items() if join("", key) not in (module, optimizer)}
    return Bridge(
        tree={**kept, engine: part},
        parts={engine: part},
        engine=engine,
        module=module,
        optimizer=optimizer,
        to_engine=True,
    )


def _from_engine(tree: dict[str, Any], engine: str, node: PartNode, live: Mapping[str, str]) -> Bridge:
    module = _only([path for path, adapter in live.items() if adapter == MODULE], engine)
    optimizer = _only([path for path, adapter in live.items() if adapter == OPTIMIZER], "")
    if not module:
        return Bridge(tree=tree)
    parts = {module: PartNode(adapter=MODULE, tensors=(), plain=node.plain["module"])}
    if optimizer:
        plain = _renamed(node.plain["optimizer"], lambda name: f"{module}.{name}")
        parts[optimizer] = PartNode(adapter=OPTIMIZER, tensors=(), plain=plain)
    kept = {key: value for key, value in tree.items() if join("", key) != engine}
    return Bridge(tree={**kept, **parts}, parts=parts, engine=engine, module=module, optimizer=optimizer)


def _renamed(plain: Any, rename: Any) -> dict[str, Any]:
    """Plain state of an optimizer, under other names of its parameters."""
    return {
        "class": plain["class"],
        "groups": [
            {**group, "params": [rename(name) for name in group["params"]]} for group in plain["groups"]
        ],
        "state": {rename(name): entries for name, entries in plain["state"].items()},
        "tensors": {rename(name): listing for name, listing in plain["tensors"].items()},
        "loose": plain.get("loose", {}),
    }
