"""Distributed tensors: a rank's shard as a box of the logical tensor, without any collective.

FSDP2 (`fully_shard`), tensor parallelism and hand-made DTensors all end here: parameters, moments and
values of the state alike. Only public parts of torch are used (placements, the mesh's coordinate, the local
tensor).

A dimension that is sharded over a mesh dimension is cut as `torch.chunk` cuts: pieces of the rounded-up
size, the last ones shorter or empty. Several mesh dimensions cut one after the other, from the left. A mesh
dimension that replicates leaves the box as it is.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from easyckpt.adapters.base import TensorPart
from easyckpt.errors import UnsupportedValue

__all__ = ["is_distributed", "local_of", "localise"]


def is_distributed(value: object) -> bool:
    """Whether it is a DTensor; imports nothing."""
    kind: Any = type(value)  # mypy takes no class for hashable
    return _is_distributed_type(kind)


@functools.lru_cache(maxsize=256)
def _is_distributed_type(kind: type[Any]) -> bool:
    return any(
        base.__name__ == "DTensor" and base.__module__.startswith("torch.distributed.")
        for base in kind.__mro__
    )


def local_of(value: Any) -> torch.Tensor:
    """The memory of this rank's shard. Cheap: each save asks it of every parameter.

    ``_local_tensor`` is private to torch and what ``to_local`` returns a view of; without it that is called.
    """
    local = getattr(value, "_local_tensor", None)
    return local if type(local) is torch.Tensor else value.detach().to_local()


def localise(part: TensorPart, path: str) -> TensorPart:
    """The part with this rank's shard in the place of a DTensor; any other part as it is.

    Raises:
        UnsupportedValue: it is not cut into boxes (partial sums, interleaved shards).
    """
    value: Any = part.tensor
    if type(value) is torch.Tensor or not is_distributed(value):
        return part
    offsets, sizes = _box(value, path)
    local = value.detach().to_local()
    if tuple(local.shape) != sizes:
        raise UnsupportedValue(
            f"its local shard has shape {list(local.shape)} and should have {list(sizes)}",
            where=path,
            hint="shard evenly, or as torch.chunk does",
        )
    return replace(part, tensor=local, global_shape=tuple(value.shape), offsets=offsets)


def _box(value: Any, path: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of this rank's shard."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        raise UnsupportedValue("this rank is not part of the tensor's device mesh", where=path)
    offsets = [0] * value.dim()
    sizes = list(value.shape)
    for mesh_dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise UnsupportedValue(
                f"a distributed tensor with placement {placement} is not cut into boxes",
                where=path,
                hint="placements Shard and Replicate can be stored",
            )
        dim = placement.dim
        pieces = value.device_mesh.size(mesh_dim)
        step = -(-sizes[dim] // pieces)
        begin = min(step * coordinate[mesh_dim], sizes[dim])
        end = min(begin + step, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = end - begin
    return tuple(offsets), tuple(sizes)
