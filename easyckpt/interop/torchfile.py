"""Files of ``torch.save``: one nested dict of tensors and values, read back weights-only."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch

from easyckpt.errors import CorruptCheckpoint, Misuse
from easyckpt.interop.publish import new_path
from easyckpt.interop.scratch import tensors_of
from easyckpt.interop.statedict import STEP_KEY, from_state_dict, to_state_dict
from easyckpt.interop.stored import OnBytes, StoredStep

__all__ = ["export_torch", "load_weights_only", "read_torch"]


def export_torch(step: StoredStep, target: str, *, on_bytes: OnBytes | None = None) -> None:
    """Write a step as one file that ``torch.load(…, weights_only=True)`` reads.

    Its keys are those of the state; the values are the state dicts of the objects.

    Raises:
        Misuse: the file is there already.
        CheckpointFault: the step is damaged.
        StorageError: the file system refuses.
    """
    tree = step.tree()
    with new_path(target) as path:
        tensors = tensors_of(
            step, {name: name for name in step.tensors}, folder=path.parent, on_bytes=on_bytes
        )
        torch.save({**to_state_dict(tree, tensors.__getitem__), STEP_KEY: step.step}, path)


def read_torch(
    source: str, *, objects: Collection[str] = (), parameters: Sequence[str] = ()
) -> dict[str, Any]:
    """A file of ``torch.save`` as a tree for `commit_state`. See `from_state_dict` for the arguments.

    Raises:
        Misuse: it is not there, or holds what only unpickling could read.
    """
    return from_state_dict(load_weights_only(source), objects=objects, parameters=parameters)


def load_weights_only(source: str | os.PathLike[str]) -> Any:
    """What a torch file holds, its tensors mapped where the file allows it.

    Raises:
        Misuse: it is not there, or holds what only unpickling could read.
        CorruptCheckpoint: it cannot be read.
    """
    path = Path(source)
    if not path.is_file():
        raise Misuse("there is no such file", where=str(path))
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the older format cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError) as error:
        raise CorruptCheckpoint(f"it cannot be read: {_first_line(error)}", where=str(path)) from error
    except Exception as error:
        # pickle.UnpicklingError, without importing pickle.
        if type(error).__name__ != "UnpicklingError":
            raise
        raise Misuse(
            f"it holds what only unpickling could read: {_unsafe(path) or _first_line(error)}",
            where=str(path),
            hint="load it with torch.load in a program of yours, and call Checkpointer.save there",
        ) from error


def _unsafe(path: Path) -> str:
    """What the file would import beyond what a weights-only load allows."""
    try:
        return ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path)[:5])
    except (ValueError, RuntimeError, AttributeError):
        return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
