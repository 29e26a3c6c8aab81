"""DeepSpeed engines: what ZeRO 0, 1 and 2 keep on this rank, read and written where it lies.

Theory of operation. DeepSpeed has no public access to a rank's own part of the optimizer state (its accessors
gather whole tensors from all ranks), so this file, alone, knows where the parts are. Every kind of optimizer
that an engine may hold is brought to one picture, that of `easyckpt.adapters.masters`: the optimizer steps
masters, and each master is a concatenation of ranges of parameters, or one whole parameter.

===========================  =================================  ==============================================
engine                       optimizer object                   masters
===========================  =================================  ==============================================
ZeRO 1 and 2                 ``DeepSpeedZeroOptimizer``         one flat fp32 partition per group
ZeRO 1, bf16, fp32 sums      ``BF16_Optimizer``                 one flat fp32 partition per group
stage 0, fp16 or bf16        ``FP16_UnfusedOptimizer``          an fp32 copy per parameter
                             ``FP16_Optimizer``                 one flat fp32 copy per group
stage 0, fp32                the optimizer itself               the parameters themselves
===========================  =================================  ==============================================

Stored are, by the name of the model's parameter: ``module.<name>`` (the weights that forward uses, whole),
``master.<name>`` and ``state.<key>.<name>`` (flat ranges of it, from which another partitioning can
be cut). Padding between and behind parameters is not stored: it is zero and stays zero. Plain state is the
counters of the engine, loss scaler, learning-rate scheduler and group options. Random numbers are not the
engine's: put `easyckpt.RNG` beside it.

A load never runs an optimizer step and never casts: moments that a fresh optimizer has not made yet are
created as zeros and then overwritten. One thing lives outside of Python: DeepSpeed's CPU Adam multiplies its
bias corrections up step by step inside its C++ object, which gives other bits than a power does, so they are
brought up the same way, by updates of nothing.

All of this is private to DeepSpeed. The versions it was tried with stand in `TESTED`; another one fails at
the first save or load with a message, not half-way, unless ``EASYCKPT_DEEPSPEED_UNTESTED=1``.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from easyckpt.adapters.base import Captured, Context, SavedPart
from easyckpt.adapters.masters import Master, Range, adjust_state, describe, is_ranged, set_plain, state_parts
from easyckpt.adapters.torch_native import ModuleAdapter
from easyckpt.errors import StateMismatch, UnsupportedValue

__all__ = ["ADAPTER", "TESTED", "UNTESTED_VARIABLE", "DeepSpeedAdapter"]

TESTED: tuple[str, ...] = ("0.19.0", "0.19.3", "0.19.5", "0.19.7", "0.19.8")
"""Versions of DeepSpeed that the tests of this adapter passed with."""

UNTESTED_VARIABLE = "EASYCKPT_DEEPSPEED_UNTESTED"
"""Set to 1 to try this adapter with another version, at your own risk."""

REPLAY_CALLS_MAX = 1_000_000
"""Most empty updates that bring up CPU Adam's bias corrections; a microsecond each."""

_MODULE = ModuleAdapter()
_LOG = logging.getLogger("easyckpt")
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_SCHEMA = 1


class DeepSpeedAdapter:
    """Adapter for ``deepspeed.DeepSpeedEngine``."""

    name = "deepspeed"

    def matches(self, value: object) -> bool:
        """Whether ``value`` is an engine, told by names so that DeepSpeed need not be imported."""
        return any(
            base.__name__ == "DeepSpeedEngine" and base.__module__ == "deepspeed.runtime.engine"
            for base in type(value).__mro__
        )

    def capture(self, value: Any, context: Context) -> Captured:
        """The engine's live tensors and counters; refuses between backward and step."""
        _refuse_unsupported(value, context)
        try:
            _refuse_pending_gradients(value, context)
            module = _MODULE.capture(value.module, context)
            masters = tuple(_masters(value, module, context))
            weights = (replace(part, name=f"module.{part.name}") for part in module.tensors)
            moments = state_parts(masters, _base_optimizer(value).state)
            plain = {**_plain(value, masters), "module": module.plain}
            return Captured(tensors=(*weights, *moments), plain=plain)
        except AttributeError as error:
            raise UnsupportedValue(
                f"this DeepSpeed keeps its state elsewhere ({error})",
                where=context.path,
                hint=f"use one of the versions {', '.join(TESTED)}",
            ) from error

    def prepare(self, value: Any, saved: SavedPart, context: Context) -> None:
        """Make the moments that were saved, drop those that were not."""
        _refuse_unsupported(value, context)
        masters = tuple(_masters(value, _MODULE.capture(value.module, context), context))
        _compare_shape(_shape(value, masters), saved.plain, context)
        adjust_state(masters, _base_optimizer(value).state, described=saved.plain["state"], saved=saved)
        if hasattr(value.optimizer, "_hp_optimizer_states_linked"):
            value.optimizer._hp_optimizer_states_linked = False

    def finish(self, value: Any, plain: Any, context: Context) -> None:
        """Set counters, scaler, scheduler and group options, and what DeepSpeed derives from the moments."""
        _MODULE.finish(value.module, plain["module"], context)
        for name in _COUNTERS:
            setattr(value, name, plain["engine"][name])
        base = _base_optimizer(value)
        masters = tuple(_masters(value, _MODULE.capture(value.module, context), context))
        set_plain(masters, base.state, plain["state"])
        if value.lr_scheduler is not None and plain["lr_scheduler"] is not None:
            value.lr_scheduler.load_state_dict(plain["lr_scheduler"])
        for group, options in zip(base.param_groups, plain["groups"], strict=True):
            _set_options(group, options)
        _set_scaler(value.optimizer, plain["scaler"])
        if hasattr(value.optimizer, "_lazy_init_hp_params_optimizer_state") and _has_tensors(base, masters):
            value.optimizer._lazy_init_hp_params_optimizer_state()
        _replay_cpu_adam(base, masters)


ADAPTER = DeepSpeedAdapter()


def _refuse_unsupported(engine: Any, context: Context) -> None:
    import deepspeed

    if deepspeed.__version__ not in TESTED and os.environ.get(UNTESTED_VARIABLE) != "1":
        raise UnsupportedValue(
            f"DeepSpeed {deepspeed.__version__} was not tried with this easyckpt, which was with "
            f"{', '.join(TESTED)}",
            where=context.path,
            hint=f"install one of these, or set {UNTESTED_VARIABLE}=1 to try at your own risk",
        )
    refusals = {
        "ZeRO-3": engine.zero_optimization_stage() > 2,
        "pipeline parallelism": bool(getattr(engine, "pipeline_parallelism", False)),
        "mixture of experts": bool(getattr(engine, "has_moe_layers", False)),
        "model parallelism": getattr(engine, "mp_world_size", 1) > 1,
        "ZenFlow": bool(getattr(engine, "zenflow", False)),
        "random layer-token dropping": bool(engine.random_ltd_enabled()),
        "curriculum learning": bool(engine.curriculum_learning_enabled()),
        "an engine without an optimizer": engine.optimizer is None,
        "states moved away with offload_states()": bool(getattr(engine.optimizer, "offloaded_states", None)),
    }
    for what, refused in refusals.items():
        if refused:
            raise UnsupportedValue(
                f"{what} is not supported by the DeepSpeed adapter yet",
                where=context.path,
                hint="ZeRO stages 0, 1 and 2 with data parallelism are",
            )


def _refuse_pending_gradients(engine: Any, context: Context) -> None:
    optimizer = engine.optimizer
    managed = getattr(engine, "managed_gradient_accumulation", None)  # older versions have no other mode
    counted = engine._is_gradient_accumulation_boundary is None and (managed is None or managed())
    pending = (
        (counted and engine.micro_steps % engine.gradient_accumulation_steps() != 0)
        or any(gradients is not None for gradients in getattr(optimizer, "averaged_gradients", {}).values())
        or bool(getattr(optimizer, "_offload_accumulated_param_ids", None))
        or any(any(flags) for flags in getattr(optimizer, "fp32_groups_has_gradients", ()))
        or any(parameter.grad is not None for parameter in engine.module.parameters())
    )
    if pending:
        raise UnsupportedValue(
            "gradients are waiting for a step, and they are not part of the checkpoint",
            where=context.path,
            hint="save after engine.step(), at the end of gradient accumulation",
        )


def _base_optimizer(engine: Any) -> torch.optim.Optimizer:
    optimizer = engine.optimizer
    return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer


def _masters(engine: Any, module: Captured, context: Context) -> Iterator[Master]:
    """What the base optimizer steps, group by group."""
    optimizer = engine.optimizer
    kind = type(optimizer).__name__
    names: dict[int, str] = {}
    for part in module.tensors:  # the first name of a tied one
        names.setdefault(id(part.tensor), part.name)
    groups = _base_optimizer(engine).param_groups
    if kind == "DeepSpeedZeroOptimizer":
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
    elif kind == "FP16_UnfusedOptimizer" or optimizer is _base_optimizer(engine):
        own = optimizer is _base_optimizer(engine)
        for index, group in enumerate(groups):
            models = group["params"] if own else optimizer.fp16_groups[index]
            for place, (master, parameter) in enumerate(zip(group["params"], models, strict=True)):
                yield Master(key=f"{index}.{place}", tensor=master, ranges=None, name=names[id(parameter)],
                              is_parameter=own)  # fmt: skip
    else:
        raise UnsupportedValue(
            f"the optimizer {kind} is not known to the DeepSpeed adapter", where=context.path
        )


def _partition(index: int, group: Mapping[str, Any], ranges: tuple[Range, ...]) -> Master:
    (tensor,) = group["params"]
    return Master(key=f"{index}.0", tensor=tensor, ranges=ranges)


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


def _plain(engine: Any, masters: tuple[Master, ...]) -> dict[str, Any]:
    base = _base_optimizer(engine)
    scheduler = engine.lr_scheduler
    return {
        "schema": _SCHEMA,
        "shape": _shape(engine, masters),
        "engine": {name: getattr(engine, name) for name in _COUNTERS},
        "groups": [
            {key: item for key, item in group.items() if key != "params"} for group in base.param_groups
        ],
        "state": {
            master.key: describe(master, base.state[master.tensor])
            for master in masters
            if master.tensor in base.state
        },
        "scaler": _scaler(engine.optimizer),
        "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
    }


def _shape(engine: Any, masters: tuple[Master, ...]) -> dict[str, Any]:
    """What must be equal for a checkpoint to fit; other partitionings come with resharding."""
    return {
        "zero_stage": int(engine.zero_optimization_stage()),
        "optimizer": type(engine.optimizer).__name__,
        "base_optimizer": type(_base_optimizer(engine)).__name__,
        "data_parallel_ranks": int(engine.dp_world_size),
        "masters": len(masters),
        "elements": sum(master.tensor.numel() for master in masters),
    }


def _compare_shape(now: Mapping[str, Any], plain: Any, context: Context) -> None:
    if not isinstance(plain, dict) or plain.get("schema") != _SCHEMA:
        raise StateMismatch("this is not a DeepSpeed engine of a known schema", where=context.path)
    then = plain["shape"]
    changed = tuple(
        f"{key}: saved {then.get(key)}, now {now[key]}" for key in now if then.get(key) != now[key]
    )
    if changed:
        raise StateMismatch(
            f"the engine differs from the saved one: {'; '.join(changed)}",
            changed=changed,
            where=context.path,
            hint="start with the configuration and the number of ranks that it was saved with",
        )


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, item in options.items():
        if isinstance(group.get(key), torch.Tensor):
            group[key].copy_(torch.as_tensor(item))
        else:
            group[key] = item


def _scaler_holder(optimizer: Any) -> Any:
    """The object that holds the loss scale: a scaler, or a configuration object at stage 0."""
    return getattr(optimizer, "loss_scaler", None) or getattr(optimizer, "loss_scale_config", None)


def _scaler(optimizer: Any) -> dict[str, Any]:
    holder = _scaler_holder(optimizer)
    found = {name: getattr(holder, name) for name in _SCALER_FIELDS if hasattr(holder, name)}
    autocast = getattr(optimizer, "torch_autocast_gradscaler", None)
    if autocast is not None:
        found["autocast"] = autocast.state_dict()
    return found


def _set_scaler(optimizer: Any, saved: Mapping[str, Any]) -> None:
    holder = _scaler_holder(optimizer)
    for name in _SCALER_FIELDS:
        if name in saved and hasattr(holder, name):
            setattr(holder, name, saved[name])
    if "autocast" in saved:
        optimizer.torch_autocast_gradscaler.load_state_dict(saved["autocast"])


def _has_tensors(base: torch.optim.Optimizer, masters: tuple[Master, ...]) -> bool:
    return all(
        any(is_ranged(master, item) for item in base.state.get(master.tensor, {}).values())
        for master in masters
    )


def _replay_cpu_adam(base: Any, masters: tuple[Master, ...]) -> None:
    """Bring the bias corrections inside CPU Adam's C++ object to where the saved steps had brought them.

    The object multiplies beta to the power of the step up by one factor per call. A fresh one starts with
    ``pow``, whose last bits differ. Updates of empty tensors go through the same multiplications and touch
    nothing. Once a power is below float32's resolution of one, the corrections are one either way.
    """
    if type(base).__name__ != "DeepSpeedCPUAdam" or not masters:
        return
    steps = base.state.get(masters[0].tensor, {}).get("step", 0)
    beta1, beta2 = base.param_groups[0]["betas"]
    same = all(tuple(group["betas"]) == (beta1, beta2) for group in base.param_groups)
    slowest = max(beta1, beta2)
    if not steps or not same or (slowest > 0 and steps * math.log2(slowest) < -30):
        return
    if steps > REPLAY_CALLS_MAX:
        _LOG.warning(
            "CPU Adam's bias corrections after %d steps are restored by power, not bit by bit", steps
        )
        return
    nothing = torch.empty(0)
    for step in range(1, steps + 1):
        base.ds_opt_adam.adam_update(
            base.opt_id, step, 0.0, beta1, beta2, 1e-8, 0.0, True, nothing, nothing, nothing, nothing
        )
