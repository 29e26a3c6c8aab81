"""DeepSpeed engines: what ZeRO 0 to 3 keeps on this rank, read and written where it lies.

Theory of operation. DeepSpeed has no public access to a rank's own part of the optimizer state (its accessors
gather whole tensors from all ranks), so this file, alone, knows where the parts are. Every kind of optimizer
that an engine may hold is brought to one picture, that of `easyckpt.adapters.masters`: the optimizer steps
masters, and each master is a concatenation of ranges of parameters, or one whole parameter.

===========================  =================================  ==============================================
engine                       optimizer object                   masters
===========================  =================================  ==============================================
ZeRO 3                       ``DeepSpeedZeroOptimizer_Stage3``  one flat fp32 partition per sub-group
ZeRO 1 and 2                 ``DeepSpeedZeroOptimizer``         one flat fp32 partition per group
ZeRO 1, bf16, fp32 sums      ``BF16_Optimizer``                 one flat fp32 partition per group
stage 0, fp16 or bf16        ``FP16_UnfusedOptimizer``          an fp32 copy per parameter
                             ``FP16_Optimizer``                 one flat fp32 copy per group
stage 0, fp32                the optimizer itself               the parameters themselves
===========================  =================================  ==============================================

Stored are, by the name of the model's parameter: ``module.<name>`` (the weights that forward uses: whole,
or in ZeRO 3 this rank's flat range of them), ``master.<name>`` and ``state.<name>.<key>`` (flat ranges,
from which another partitioning, or a plain optimizer's state, can be cut: see `easyckpt.bridge`). Padding
between and behind parameters is not stored: no gradient ever reaches it. Plain state is the counters of the
engine, loss scaler, learning-rate scheduler and group options. Random numbers are not the engine's: put
`easyckpt.RNG` beside it.

A load never runs an optimizer step and never casts: moments that a fresh optimizer has not made yet are
created as zeros and then overwritten. One thing lives outside of Python: DeepSpeed's CPU Adam multiplies its
bias corrections up step by step inside its C++ object, which gives other bits than a power does, so they are
brought up the same way, by updates of nothing.

All of this is private to DeepSpeed. The versions it was tried with stand in `TESTED`; another one fails at
the first save or load with a message, not half-way, unless ``EASYCKPT_DEEPSPEED_UNTESTED=1``.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from easyckpt.adapters.base import Captured, Context, SavedPart
from easyckpt.adapters.deepspeed_masters import (
    STAGE3,
    base_optimizer,
    group_names,
    masters_of,
    weight_parts,
)
from easyckpt.adapters.masters import Master, adjust_state, is_ranged, plain_of, set_plain, state_parts
from easyckpt.adapters.torch_native import ModuleAdapter, compare_groups
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
_SCHEMA = 2


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
            masters = tuple(masters_of(value, module, context))
            weights = (
                part
                for whole in module.tensors
                for part in weight_parts(replace(whole, name=f"module.{whole.name}"))
            )
            moments = state_parts(masters, base_optimizer(value).state)
            plain = {**_plain(value, module, masters), "module": module.plain}
            known = frozenset(part.name for part in module.tensors)
            return Captured(
                tensors=(*weights, *moments), plain=plain, elsewhere=lambda name: _parameter_of(name) in known
            )
        except AttributeError as error:
            raise UnsupportedValue(
                f"this DeepSpeed keeps its state elsewhere ({error})",
                where=context.path,
                hint=f"use one of the versions {', '.join(TESTED)}",
            ) from error

    def prepare(self, value: Any, saved: SavedPart, context: Context) -> None:
        """Make the moments that were saved, drop those that were not."""
        _refuse_unsupported(value, context)
        module = _MODULE.capture(value.module, context)
        masters = tuple(masters_of(value, module, context))
        optimizer = _saved_optimizer(saved.plain, context)
        if optimizer is not None:
            base = base_optimizer(value)
            names = group_names(value, module)
            compare_groups(type(base).__name__, names, plain=optimizer, context=context)
            adjust_state(masters, base.state, plain=optimizer, saved=saved)
        if hasattr(value.optimizer, "_hp_optimizer_states_linked"):
            value.optimizer._hp_optimizer_states_linked = False

    def finish(self, value: Any, plain: Any, context: Context) -> None:
        """Set counters, scaler, scheduler and group options, and what DeepSpeed derives from the moments."""
        _MODULE.finish(value.module, plain["module"], context)
        own = plain.get("engine") is not None  # else a plain module and optimizer were saved
        base = base_optimizer(value)
        masters = tuple(masters_of(value, _MODULE.capture(value.module, context), context))
        optimizer = plain["optimizer"]
        if optimizer is not None:
            set_plain(masters, base.state, optimizer)
            for group, options in zip(base.param_groups, optimizer["groups"], strict=False):
                _set_options(group, options, new=own)
        if own:
            for name in _COUNTERS:
                setattr(value, name, plain["engine"][name])
            _set_scaler(value.optimizer, plain["scaler"])
        if value.lr_scheduler is not None and plain.get("lr_scheduler") is not None:
            value.lr_scheduler.load_state_dict(plain["lr_scheduler"])
        if hasattr(value.optimizer, "_lazy_init_hp_params_optimizer_state") and _has_tensors(base, masters):
            value.optimizer._lazy_init_hp_params_optimizer_state()
        _drop_gathered(value.optimizer)
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
        "a secondary partition of ZeRO-3 (hpZ)": getattr(engine.optimizer, "zero_hpz_partition_size", 1) > 1,
        "ZeRO-3 with offload to NVMe": bool(getattr(engine.optimizer, "swap_optimizer", False))
        or bool(getattr(engine.optimizer, "params_in_nvme_and_cpu", False)),
        "ZeRO-3 with quantized weights": engine.zero_optimization_stage() > 2
        and bool(engine.zero_quantized_weights() or engine.zero_quantized_nontrainable_weights()),
        "MiCS": type(engine.optimizer).__name__ == "MiCS_Optimizer",
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
                hint="ZeRO stages 0 to 3 with data parallelism are",
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


def _drop_gathered(optimizer: Any) -> None:
    """Parameters that ZeRO-3 keeps whole on every rank are gathered anew from their loaded partitions."""
    kept = getattr(optimizer, "persistent_parameters", None)
    if type(optimizer).__name__ == STAGE3 and kept:
        kept[0].partition(kept)


def _parameter_of(name: str) -> str:
    """The parameter's name in a tensor's: ``state.<parameter>.<key>`` or ``<kind>.<parameter>``."""
    kind, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if kind == "state" else rest


def _plain(engine: Any, module: Captured, masters: tuple[Master, ...]) -> dict[str, Any]:
    scheduler = engine.lr_scheduler
    return {
        "schema": _SCHEMA,
        "engine": {name: getattr(engine, name) for name in _COUNTERS},
        "optimizer": plain_of(base_optimizer(engine), masters, names=group_names(engine, module)),
        "scaler": _scaler(engine.optimizer),
        "lr_scheduler": scheduler.state_dict() if scheduler is not None else None,
    }


def _saved_optimizer(plain: Any, context: Context) -> dict[str, Any] | None:
    if not isinstance(plain, dict) or plain.get("schema", _SCHEMA) != _SCHEMA:
        raise StateMismatch("this is not a DeepSpeed engine of a known schema", where=context.path)
    found = plain["optimizer"]
    assert found is None or isinstance(found, dict)
    return found


def _set_options(group: dict[str, Any], options: Mapping[str, Any], *, new: bool) -> None:
    """Set a group's options; those that it does not have yet only if ``new``."""
    for key, item in options.items():
        if key == "params" or (key not in group and not new):
            continue
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
