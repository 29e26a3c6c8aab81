"""A model's weights as safetensors files in the layout of Hugging Face, and back.

One ``model.safetensors``, or ``model-00001-of-00003.safetensors`` … with ``model.safetensors.index.json``:
what ``from_pretrained`` reads. Tied tensors are left out but for one name, as the format wants it; models
tie them again. The model's ``config.json`` is not in a checkpoint: ``config.save_pretrained`` writes it.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

from safetensors import safe_open

from easyckpt.bodyfile import header_length, parse_header
from easyckpt.errors import CorruptCheckpoint, Misuse, UnsupportedValue
from easyckpt.interop.publish import new_path
from easyckpt.interop.statedict import ImportedPart, module_part
from easyckpt.interop.stored import OnBytes, StoredStep, StoredTensor
from easyckpt.layout import SAFETENSORS_DTYPE
from easyckpt.plain import PartNode, join

__all__ = ["SHARD_BYTES", "export_huggingface", "read_huggingface", "weights_of"]

SHARD_BYTES = 5_000_000_000
"""Largest shard, unless one tensor alone is larger; Hugging Face's own limit for years."""

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}


def weights_of(step: StoredStep, tree: Any, *, key: str | None = None) -> dict[str, str]:
    """The names of a model's weights: stored name → name in the model.

    Args:
        step: the step.
        tree: its tree.
        key: of the model in the state; None if there is only one.

    Raises:
        Misuse: there is none of that name, or more than one.
    """
    found = {
        name: node
        for name, node in (tree.items() if isinstance(tree, dict) else ())
        if isinstance(node, PartNode) and node.adapter in _PREFIXES
    }
    if key is None and len(found) == 1:
        (key,) = found
    if key not in found:
        has = ", ".join(sorted(found)) or "none"
        raise Misuse(f"which model? the state has {has}", where=step.storage.where(), hint="--key NAME")
    prefix = _PREFIXES[found[key].adapter]
    path = join("", key)
    return {
        f"{path}.{name}": name.removeprefix(prefix) for name in found[key].tensors if name.startswith(prefix)
    }


_PREFIXES = {"torch.module": "", "deepspeed": "module."}
"""Adapter → what stands before the names of the model's own tensors."""


def export_huggingface(
    step: StoredStep,
    target: str,
    *,
    key: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    on_bytes: OnBytes | None = None,
) -> None:
    """Write a model's weights as a folder of safetensors files. Nothing is held in memory.

    Args:
        step: where from.
        target: a folder that is not there yet.
        key: of the model in the state.
        shard_bytes: largest file.
        on_bytes: told how far it is.

    Raises:
        Misuse: the folder is there already, or it is not clear which model is meant.
        UnsupportedValue: a type that safetensors does not know.
        CheckpointFault: the step is damaged.
        StorageError: the file system refuses.
    """
    names = weights_of(step, step.tree(), key=key)
    shards = _shards(step, names, shard_bytes)
    with new_path(target) as folder:
        folder.mkdir()
        targets: dict[str, memoryview] = {}
        weight_map: dict[str, str] = {}
        for number, shard in enumerate(shards, start=1):
            file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            targets.update(_open_shard(folder / file, shard, names))
            weight_map.update({names[tensor.name]: file for tensor in shard})
        step.scatter(targets, on_bytes=on_bytes)
        if len(shards) > 1:
            total = sum(tensor.byte_count for shard in shards for tensor in shard)
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _shards(step: StoredStep, names: dict[str, str], limit: int) -> list[list[StoredTensor]]:
    shards: list[list[StoredTensor]] = [[]]
    taken: set[str] = set()
    size = 0
    for name in names:
        tensor = step.tensors[name]
        owner = tensor.alias_of or name
        if owner in taken:
            continue
        if tensor.dtype not in SAFETENSORS_DTYPE:
            raise UnsupportedValue(f"safetensors has no type {tensor.dtype}", where=name)
        taken.add(owner)
        if shards[-1] and size + tensor.byte_count > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.byte_count
    return shards


def _open_shard(path: Path, shard: list[StoredTensor], names: dict[str, str]) -> dict[str, memoryview]:
    """Make a file with its header, and map the room of each tensor in it."""
    table: dict[str, Any] = {"__metadata__": _METADATA}
    at = 0
    places: dict[str, tuple[int, int]] = {}
    # Larger elements first, as the format's own writer has it, so that all are aligned.
    for tensor in sorted(shard, key=lambda item: -(item.byte_count and _element_bytes(item))):
        places[tensor.name] = (at, at + tensor.byte_count)
        table[names[tensor.name]] = {
            "dtype": SAFETENSORS_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.byte_count],
        }
        at += tensor.byte_count
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    with path.open("w+b") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()
        os.posix_fallocate(file.fileno(), 0, begin + at)
        view = memoryview(mmap.mmap(file.fileno(), begin + at))
    return {name: view[begin + low : begin + high] for name, (low, high) in places.items()}


def _element_bytes(tensor: StoredTensor) -> int:
    from easyckpt.layout import DTYPE_BYTES

    return DTYPE_BYTES[tensor.dtype]


def read_huggingface(source: str) -> ImportedPart:
    """A folder of safetensors shards, or one such file, as a module's part; the tensors are mapped.

    Raises:
        Misuse: there is no such file or folder.
        CorruptCheckpoint: a file is not sound, or the index names what is not there.
    """
    path = Path(source)
    if path.is_file():
        return module_part(_read_file(path))
    index = path / _INDEX
    if not index.is_file():
        if not (path / _SINGLE).is_file():
            raise Misuse(f"neither {_SINGLE} nor {_INDEX} is there", where=str(path))
        return module_part(_read_file(path / _SINGLE))
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = sorted({str(name) for name in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpoint(f"it is no index of shards: {error}", where=str(index)) from error
    tensors: dict[str, Any] = {}
    for name in files:
        if Path(name).name != name:
            raise CorruptCheckpoint(
                f"it names a file outside of its folder: {name[:100]!r}", where=str(index)
            )
        tensors.update(_read_file(path / name))
    missing = sorted(set(weight_map) - set(tensors))
    if missing:
        raise CorruptCheckpoint(f"in no shard: {', '.join(missing[:8])}", where=str(index))
    return module_part({name: tensors[name] for name in weight_map})


def _read_file(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CorruptCheckpoint("the shard is not there", where=str(path))
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        header = first + file.read(header_length(first, body_bytes=size, where=str(path)) - len(first))
    parse_header(header, body_bytes=size, where=str(path))
    with safe_open(path, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  it is no dict
