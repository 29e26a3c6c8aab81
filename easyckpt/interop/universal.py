"""DeepSpeed's universal checkpoints: one small file per parameter and moment, for any ZeRO stage and size.

::

    <folder>/latest_universal                          the tag
    <folder>/global_step<n>/mp_rank_00_model_states.pt   counters, scheduler
    <folder>/global_step<n>/zero/optimizer_state.pt    options of the parameter groups
    <folder>/global_step<n>/zero/<parameter>/fp32.pt, exp_avg.pt, …, step.pt

Outwards, from a DeepSpeed engine's part, or from a module and its optimizer. DeepSpeed loads the folder with
``"checkpoint": {"load_universal": true}`` in its configuration; it leaves the module's buffers alone.
Inwards, to a module in fp32 and an optimizer, which a job without DeepSpeed loads. All is read weights-only;
three classes of DeepSpeed that are plain data are let through where it is installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from easyckpt.errors import CorruptCheckpoint, Misuse
from easyckpt.interop.publish import new_path
from easyckpt.interop.scratch import tensors_of
from easyckpt.interop.statedict import ImportedPart, module_part, optimizer_part
from easyckpt.interop.stored import OnBytes, StoredStep
from easyckpt.interop.torchfile import load_weights_only
from easyckpt.plain import PartNode, TensorRef

__all__ = ["export_universal", "is_universal", "read_universal"]

VERSION = "0.19.8"
"""Of the DeepSpeed whose layout is written, and that the tests load it with."""

_LATEST = "latest_universal"
_MODEL_FILE = "mp_rank_00_model_states.pt"


@dataclass(slots=True, kw_only=True)
class _Contents:
    """What goes into the folder; tensors by their stored names."""

    weights: dict[str, str]
    """Parameter → stored name of the weights that are the truth: the fp32 masters, if there are any."""
    module: dict[str, str]
    """Name in the module → stored name."""
    moments: dict[str, dict[str, str]] = field(default_factory=dict)
    """Parameter → key → stored name."""
    step: Any = None
    groups: list[dict[str, Any]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    """Parameters of each group."""
    counters: dict[str, Any] = field(default_factory=dict)
    scheduler: Any = None


def export_universal(
    step: StoredStep, target: str, *, key: str | None = None, on_bytes: OnBytes | None = None
) -> None:
    """Write a step as a universal checkpoint.

    Args:
        step: where from.
        target: a folder that is not there yet.
        key: of the engine or the module in the state.
        on_bytes: told how far it is.

    Raises:
        Misuse: the folder is there already, or the state has no engine, and no module with an optimizer.
        CheckpointFault: the step is damaged.
        StorageError: the file system refuses.
    """
    contents = _contents(step, key)
    with new_path(target) as path:
        tag = path / f"global_step{step.step}"
        (tag / "zero").mkdir(parents=True)
        wanted = {name: name for name in contents.module.values()}
        wanted |= {name: name for name in contents.weights.values()}
        wanted |= {name: name for keys in contents.moments.values() for name in keys.values()}
        step_ref = contents.step.name if isinstance(contents.step, TensorRef) else None
        if step_ref:
            wanted[step_ref] = step_ref
        tensors = tensors_of(step, wanted, folder=path.parent, on_bytes=on_bytes)
        count = tensors[step_ref] if step_ref else contents.step
        for parameter, stored in contents.weights.items():
            folder = tag / "zero" / parameter
            folder.mkdir()
            torch.save({"param": tensors[stored].float()}, folder / "fp32.pt")
            for name, place in contents.moments.get(parameter, {}).items():
                torch.save({"param": tensors[place].float()}, folder / f"{name}.pt")
            if count is not None:
                torch.save(count, folder / "step.pt")
        groups = [{**group, "params": []} for group in contents.groups]
        torch.save({"ds_version": VERSION, "param_groups": groups}, tag / "zero" / "optimizer_state.pt")
        torch.save(_model_file(step, contents, tensors), tag / _MODEL_FILE)
        (path / _LATEST).write_text(tag.name)


def _model_file(step: StoredStep, contents: _Contents, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "module": {name: tensors[stored] for name, stored in contents.module.items()},
        "param_shapes": [
            {name: tensors[contents.weights[name]].shape for name in names} for names in contents.names
        ],
        "lr_scheduler": contents.scheduler,
        "global_steps": step.step,
        "skipped_steps": 0,
        **contents.counters,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": VERSION,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
    }


def _contents(step: StoredStep, key: str | None) -> _Contents:
    tree = step.tree()
    parts = {name: node for name, node in tree.items() if isinstance(node, PartNode)}
    engines = [name for name, node in parts.items() if node.adapter == "deepspeed"]
    modules = [name for name, node in parts.items() if node.adapter == "torch.module"]
    optimizers = [name for name, node in parts.items() if node.adapter == "torch.optimizer"]
    if len(engines) == 1 and key in (None, engines[0]):
        return _of_engine(step, parts[engines[0]], f"{engines[0]}.")
    if key is None and len(modules) == 1:
        (key,) = modules
    if key is None or key not in modules or len(optimizers) != 1:
        raise Misuse(
            f"the state has {len(engines)} engines, {len(modules)} modules and {len(optimizers)} optimizers",
            where=step.storage.where(),
            hint="one engine, or one module and one optimizer, is needed: --key NAME",
        )
    return _of_module(parts[key], parts[optimizers[0]], key=key, optimizer=optimizers[0])


def _of_engine(step: StoredStep, node: PartNode, prefix: str) -> _Contents:
    # A rank's part names what that rank has; the step's tensors are those of all ranks.
    names = [name.removeprefix(prefix) for name in step.tensors if name.startswith(prefix)]
    module = {name.removeprefix("module."): prefix + name for name in names if name.startswith("module.")}
    masters = {name.removeprefix("master."): prefix + name for name in names if name.startswith("master.")}
    plain = node.plain
    optimizer = plain["optimizer"]
    if optimizer is None:
        raise Misuse("the engine was saved without an optimizer", where=step.storage.where())
    moments: dict[str, dict[str, str]] = {}
    count: Any = next((entry["step"] for entry in optimizer["state"].values() if "step" in entry), None)
    for name in names:
        if name.startswith("state."):
            parameter, _, what = name.removeprefix("state.").rpartition(".")
            if what == "step":
                count = TensorRef(name=prefix + name)
            else:
                moments.setdefault(parameter, {})[what] = prefix + name
    weights = masters or {name: module[name] for name in moments}
    order = {name: place for place, name in enumerate(module)}
    groups = optimizer["groups"]
    return _Contents(
        weights=dict(sorted(weights.items(), key=lambda item: order.get(item[0], len(order)))),
        module=module,
        moments=moments,
        step=count,
        groups=[{key: value for key, value in group.items() if key != "params"} for group in groups],
        names=[[name for name in group["params"] if name in weights] for group in groups],
        counters={
            name: plain["engine"][name] for name in ("global_steps", "global_samples", "skipped_steps")
        },
        scheduler=plain["lr_scheduler"],
    )


def _of_module(node: PartNode, optimizer_node: PartNode, *, key: str, optimizer: str) -> _Contents:
    plain = optimizer_node.plain
    module = {name: f"{key}.{name}" for name in node.tensors}
    contents = _Contents(weights={}, module=module)
    for group in plain["groups"]:
        names = [name.removeprefix(f"{key}.") for name in group["params"]]
        unknown = [name for name in names if name not in module]
        if unknown:
            raise Misuse(f"the optimizer has parameters of another module: {', '.join(unknown[:8])}")
        contents.names.append(names)
        contents.groups.append({name: value for name, value in group.items() if name != "params"})
        contents.weights.update({name: module[name] for name in names})
    for full, listing in plain["tensors"].items():
        parameter = full.removeprefix(f"{key}.")
        for what in listing[::2]:
            stored = f"{optimizer}.state.{full}.{what}"
            if what == "step":
                contents.step = TensorRef(name=stored)
            else:
                contents.moments.setdefault(parameter, {})[what] = stored
    return contents


# ----- inwards -----


def is_universal(path: Path) -> bool:
    """Whether a folder is a universal checkpoint, or one of its tags."""
    return (path / _LATEST).is_file() or (path / "zero" / "optimizer_state.pt").is_file()


def read_universal(source: str, *, key: str = "model") -> dict[str, Any]:
    """A universal checkpoint as a module and an optimizer, for `commit_state`.

    Args:
        source: the folder, or one tag of it.
        key: of the module in the state; the optimizer's is ``optimizer``.

    Raises:
        Misuse: it is not there, or holds what only unpickling could read.
        CorruptCheckpoint: a file is missing or damaged.
    """
    path = Path(source)
    if (path / _LATEST).is_file():
        tag = (path / _LATEST).read_text().strip()
        if Path(tag).name != tag:
            raise CorruptCheckpoint(f"it names a folder outside: {tag[:100]!r}", where=str(path / _LATEST))
        path = path / tag
    with torch.serialization.safe_globals(_plain_classes()):
        groups = load_weights_only(path / "zero" / "optimizer_state.pt")["param_groups"]
        model_file = load_weights_only(path / _MODEL_FILE)
    shapes = model_file["param_shapes"]
    if len(groups) != len(shapes):
        raise CorruptCheckpoint(f"{len(groups)} groups, and shapes of {len(shapes)}", where=str(path))
    weights: dict[str, torch.Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for name in [name for group in shapes for name in group]:
        folder = path / "zero" / name
        if not (folder / "fp32.pt").is_file():
            raise CorruptCheckpoint("the parameter's weights are not there", where=str(folder))
        entries = {file.stem: load_weights_only(file) for file in sorted(folder.glob("*.pt"))}
        weights[name] = entries.pop("fp32")["param"].view(_shape_of(shapes, name))
        state[name] = {what: _moment(what, value, weights[name]) for what, value in entries.items()}
    buffers = {name: tensor for name, tensor in model_file["module"].items() if name not in weights}
    tree: dict[str, ImportedPart] = {key: module_part({**weights, **buffers})}
    named = [
        {**{what: value for what, value in group.items() if what not in ("params", "param_names")},
         "params": list(names)}
        for group, names in zip(groups, shapes, strict=True)
    ]  # fmt: skip
    tree["optimizer"] = optimizer_part({"state": state, "param_groups": named}, tree, key="optimizer")
    return {**tree, "global_steps": model_file["global_steps"], "lr_scheduler": model_file["lr_scheduler"]}


def _shape_of(shapes: list[Mapping[str, Any]], name: str) -> Any:
    return next(group[name] for group in shapes if name in group)


def _moment(what: str, value: Any, weights: torch.Tensor) -> Any:
    if what == "step":
        return torch.as_tensor(value, dtype=torch.float32)  # what torch's optimizers keep
    tensor = value["param"]
    return tensor.view(weights.shape) if tensor.numel() == weights.numel() else tensor


_PLAIN = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
}
"""Classes of DeepSpeed that hold nothing but numbers, and stand in what it writes."""


def _plain_classes() -> list[Any]:
    try:
        return [
            getattr(importlib.import_module(module), name) for module in _PLAIN for name in _PLAIN[module]
        ]
    except (ImportError, AttributeError):
        return []  # then a file with one of them is refused, with its name
