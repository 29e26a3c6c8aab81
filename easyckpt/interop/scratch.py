"""Room for tensors that need not fit into memory: a nameless file, mapped.

The kernel writes its pages back and drops them when memory is short, so the memory that an export or an
import *needs* is small whatever the size of the checkpoint; the file's space comes back when the process
ends, however it ends. It lies beside what is being written: the temporary folder may be memory itself.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch

from easyckpt.interop.stored import OnBytes, StoredStep
from easyckpt.storage.base import storage_error

__all__ = ["mapped", "tensors_of"]

_ALIGNMENT = 64


def mapped(length: int, folder: str | os.PathLike[str]) -> mmap.mmap:
    """Writable memory of a nameless file in a folder, all zeros, its space reserved.

    Args:
        length: bytes; an empty one has a byte all the same.
        folder: of a file system with that much space.

    Raises:
        StorageError: there is not.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # Reserved in full: a lack of space is an error here, and not a bus error later.
            os.posix_fallocate(file.fileno(), 0, max(1, length))
            return mmap.mmap(file.fileno(), max(1, length))
    except OSError as error:
        raise storage_error(error, doing="write", where=str(folder)) from error


def tensors_of(
    step: StoredStep, names: Mapping[str, str], *, folder: Path, on_bytes: OnBytes | None = None
) -> dict[str, torch.Tensor]:
    """Whole logical tensors of a step in a mapped file; tied ones share memory.

    Args:
        step: where from.
        names: stored name → name in the result.
        folder: of the mapped file.
        on_bytes: told how far it is.
    """
    places: dict[str, tuple[int, int]] = {}
    length = 0
    for name in names:
        owner = step.tensors[name].alias_of or name
        if owner not in places:
            size = step.tensors[owner].byte_count
            places[owner] = (length, length + size)
            length += size + -size % _ALIGNMENT
    memory = mapped(length, folder)
    view = memoryview(memory)
    step.scatter({name: view[begin:end] for name, (begin, end) in places.items()}, on_bytes=on_bytes)
    shared = {owner: _tensor(step, owner, view[begin:end]) for owner, (begin, end) in places.items()}
    return {wanted: shared[step.tensors[name].alias_of or name] for name, wanted in names.items()}


def _tensor(step: StoredStep, name: str, memory: memoryview) -> torch.Tensor:
    """A tensor over its own part of the memory: its storage is no larger, so `torch.save` writes no more."""
    tensor = step.tensors[name]
    dtype = getattr(torch, tensor.dtype)
    if not tensor.byte_count:
        return torch.empty(tensor.shape, dtype=dtype)
    with warnings.catch_warnings():
        # A private mapping is writable; older versions of torch warn all the same.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tensor.shape)
