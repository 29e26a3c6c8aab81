"""Folders of ``torch.distributed.checkpoint``, by torch's own reader and writer.

Outwards, a step is handed to ``dcp.save`` as nested state dicts over a mapped file. Optimizers are named by
parameter, as `torch.distributed.checkpoint.state_dict.set_optimizer_state_dict` takes them.

Inwards, ``.metadata`` is a pickle: before torch loads it, it is proved that it imports DCP's own data classes
only, and every byte item is loaded weights-only. Tensors are read into a mapped file.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from easyckpt.errors import CorruptCheckpoint, Misuse
from easyckpt.interop.dcpreader import prove_weights_only
from easyckpt.interop.picklescan import check_imports
from easyckpt.interop.publish import new_path
from easyckpt.interop.scratch import mapped, tensors_of
from easyckpt.interop.statedict import STEP_KEY, from_state_dict, nested, to_state_dict
from easyckpt.interop.stored import OnBytes, StoredStep

__all__ = ["METADATA_FILE", "export_dcp", "read_dcp"]

METADATA_FILE = ".metadata"

_ALIGNMENT = 64

_ALLOWED = frozenset(
    (
        "torch.distributed.checkpoint.metadata.*",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.distributed.checkpoint.filesystem._StoragePrefix",
        "torch.serialization._get_layout",
        "torch.Size",
        *(f"torch.{name}" for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
        "collections.OrderedDict",
    )
)
"""What DCP's metadata consists of, in torch 2.6 to 2.13."""


def export_dcp(step: StoredStep, target: str, *, on_bytes: OnBytes | None = None) -> None:
    """Write a step as a DCP folder.

    Raises:
        Misuse: the folder is there already.
        CheckpointFault: the step is damaged.
        StorageError: the file system refuses.
    """
    tree = step.tree()
    with new_path(target) as path:
        names = {name: name for name in step.tensors}
        tensors = tensors_of(step, names, folder=path.parent, on_bytes=on_bytes)
        state = to_state_dict(tree, tensors.__getitem__, by_name=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no process group is there, which is meant
            save({**state, STEP_KEY: step.step}, checkpoint_id=path, no_dist=True)


def read_dcp(
    source: str, *, folder: Path, objects: Collection[str] = (), parameters: Sequence[str] = ()
) -> dict[str, Any]:
    """A DCP folder as a tree for `commit_state`.

    Args:
        source: the folder.
        folder: where the tensors' mapped file may lie.
        objects: as in `from_state_dict`.
        parameters: as in `from_state_dict`.

    Raises:
        Misuse: it is not there, or holds what only unpickling could read.
        CorruptCheckpoint: it cannot be read.
    """
    path = Path(source)
    if not (path / METADATA_FILE).is_file():
        raise Misuse(f"there is no {METADATA_FILE}", where=str(path))
    check_imports(path / METADATA_FILE, _ALLOWED)
    reader = FileSystemReader(path)
    metadata = reader.read_metadata()
    state = _empty(metadata.state_dict_metadata, folder)
    planner = _WeightsOnlyPlanner(where=str(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            load(state, storage_reader=reader, planner=planner, no_dist=True)
    except (OSError, RuntimeError, KeyError, EOFError, AssertionError) as error:
        raise CorruptCheckpoint(f"it cannot be read: {str(error)[:300]}", where=str(path)) from error
    paths = metadata.planner_data or {name: (name,) for name in state}
    return from_state_dict(nested(paths, state), objects=objects, parameters=parameters)


def _empty(entries: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Room for every entry, by its flat name."""
    places: dict[str, tuple[int, int]] = {}
    length = 0
    for name, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            size = entry.size.numel() * entry.properties.dtype.itemsize
            places[name] = (length, length + size)
            length += size + -size % _ALIGNMENT
    view = memoryview(mapped(length, folder))
    state: dict[str, Any] = {}
    for name, entry in entries.items():
        if name not in places:
            state[name] = None
            continue
        begin, end = places[name]
        if begin == end:
            state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        else:
            flat = torch.frombuffer(view[begin:end], dtype=torch.uint8)
            state[name] = flat.view(entry.properties.dtype).view(entry.size)
    return state


class _WeightsOnlyPlanner(DefaultLoadPlanner):
    """Reads into flat names, and byte items without running code."""

    def __init__(self, *, where: str) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._where = where

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = prove_weights_only(value.getvalue(), where=f"{self._where}: {name}")
