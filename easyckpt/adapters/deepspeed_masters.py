"""Where DeepSpeed keeps its tensors: the masters of every kind of optimizer, and the partitions of ZeRO-3.

The second half of the DeepSpeed adapter (`easyckpt.adapters.deepspeed` has the table, the versions and the
guard), and like it private to DeepSpeed throughout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from easyckpt.adapters.base import Captured, Context, TensorPart
from easyckpt.adapters.masters import Master, Range
from easyckpt.errors import UnsupportedValue
from easyckpt.layout import ChunkKind

__all__ = ["STAGE3", "base_optimizer", "group_names", "masters_of", "weight_parts"]

STAGE3 = "DeepSpeedZeroOptimizer_Stage3"
"""Class of ZeRO-3's optimizer."""


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def masters_of(engine: Any, module: Captured, context: Context) -> Iterator[Master]:
    """What the base optimizer steps, group by group."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    names: dict[int, str] = {}
    for part in module.tensors:  # the first name of a tied one
        names.setdefault(id(part.tensor), part.name)
    groups = base_optimizer(engine).param_groups
    if kind == STAGE3:
        yield from _stage3_masters(optimizer, names)
    elif kind == "DeepSpeedZeroOptimizer":
        for index, group in enumerate(groups):
            parameters = optimizer.round_robin_bit16_groups[index]
            padded = getattr(optimizer, "round_robin_bit16_offsets", None)  # older versions do not pad
            offsets = _packed(parameters) if padded is None else padded[index]
            yield _partition(index, group, _cut(parameters, offsets, _bounds(optimizer, index), names))
    elif kind == "BF16_Optimizer":
        for index, group in enumerate(groups):
            parameters = optimizer.bf16_groups[index]
            yield _partition(
                index, group, _cut(parameters, _packed(parameters), _bounds(optimizer, index), names)
            )
    elif kind == "FP16_Optimizer":
        for index, group in enumerate(groups):
            parameters = optimizer.fp16_groups[index]
            whole = (0, group["params"][0].numel())
            yield _partition(index, group, _cut(parameters, _packed(parameters), whole, names))
    elif kind == "FP16_UnfusedOptimizer" or optimizer is base_optimizer(engine):
        own = optimizer is base_optimizer(engine)
        for index, group in enumerate(groups):
            models = group["params"] if own else optimizer.fp16_groups[index]
            for master, parameter in zip(group["params"], models, strict=True):
                yield Master(group=index, tensor=master, name=names[id(parameter)], is_parameter=own)
    else:
        raise UnsupportedValue(
            f"the optimizer {kind} is not known to the DeepSpeed adapter", where=context.path
        )


def _partition(index: int, group: Mapping[str, Any], ranges: tuple[Range, ...]) -> Master:
    (tensor,) = group["params"]
    return Master(group=index, tensor=tensor, ranges=ranges)


def _packed(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Where each parameter begins when they lie one behind the other."""
    return [0, *itertools.accumulate(parameter.numel() for parameter in parameters)][:-1]


def _bounds(optimizer: Any, index: int) -> tuple[int, int]:
    """Which part of a group's flat buffer is this rank's."""
    length = optimizer.optimizer.param_groups[index]["params"][0].numel()
    place = torch.distributed.get_rank(group=optimizer.real_dp_process_group[index])
    return place * length, (place + 1) * length


def _cut(
    parameters: Sequence[torch.Tensor],
    offsets: Sequence[int],
    bounds: tuple[int, int],
    names: Mapping[int, str],
) -> tuple[Range, ...]:
    """The ranges of a group's parameters that lie within ``bounds`` of its flat buffer."""
    begin, end = bounds
    ranges = []
    for parameter, offset in zip(parameters, offsets, strict=True):
        first, last = max(begin, offset), min(end, offset + parameter.numel())
        if first < last:
            ranges.append(
                Range(
                    name=names[id(parameter)],
                    shape=tuple(parameter.shape),
                    param_start=first - offset,
                    master_start=first - begin,
                    length=last - first,
                )
            )
    return tuple(ranges)


def _stage3_masters(optimizer: Any, names: Mapping[int, str]) -> Iterator[Master]:
    """One per sub-group: this rank's partitions of its parameters, one behind the other, with their
    padding."""
    for index, tensor in enumerate(optimizer.fp32_partitioned_groups_flat):
        ranges = []
        at = 0
        for parameter in optimizer.fp16_groups[index]:
            begin, length = _own_part(parameter)
            if length:
                ranges.append(
                    Range(
                        name=names[id(parameter)],
                        shape=tuple(parameter.ds_shape),
                        param_start=begin,
                        master_start=at,
                        length=length,
                    )
                )
            at += parameter.partition_numel()
        yield Master(group=optimizer.sub_group_to_group_id[index], tensor=tensor, ranges=tuple(ranges))


def _own_part(parameter: Any) -> tuple[int, int]:
    """First element of this rank's partition of a ZeRO-3 parameter, and how many there are, without
    padding."""
    place = torch.distributed.get_rank(group=parameter.ds_process_group)
    begin = min(place * parameter.partition_numel(), parameter.ds_numel)
    return begin, min(parameter.partition_numel(), parameter.ds_numel - begin)


def weight_parts(part: TensorPart) -> Iterator[TensorPart]:
    """A parameter or buffer of the model, or this rank's partition of it."""
    parameter: Any = part.tensor
    if not hasattr(parameter, "ds_id"):
        yield part
        return
    begin, length = _own_part(parameter)
    if length:
        yield replace(
            part,
            tensor=parameter.ds_tensor.detach().narrow(0, 0, length),
            kind=ChunkKind.FLAT,
            global_shape=tuple(parameter.ds_shape),
            offsets=(begin,),
        )


def group_names(engine: Any, module: Captured) -> list[list[str]]:
    """The parameters of each group, on whatever rank they are."""
    optimizer = engine.optimizer
    names: dict[int, str] = {}
    for part in module.tensors:
        names.setdefault(id(part.tensor), part.name)
    kind = type(optimizer).__name__
    groups = base_optimizer(engine).param_groups
    if kind == STAGE3:
        found: list[list[str]] = [[] for _ in groups]
        for index, members in enumerate(optimizer.fp16_groups):
            found[optimizer.sub_group_to_group_id[index]] += [names[id(parameter)] for parameter in members]
        return found
    if optimizer is base_optimizer(engine):
        return [[names[id(parameter)] for parameter in group["params"]] for group in groups]
    attribute = {"DeepSpeedZeroOptimizer": "bit16_groups", "BF16_Optimizer": "bf16_groups"}.get(
        kind, "fp16_groups"
    )
    return [[names[id(parameter)] for parameter in members] for members in getattr(optimizer, attribute)]
