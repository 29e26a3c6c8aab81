"""Hugging Face `accelerate.Accelerator`: its prepared objects as one state for `Checkpointer.save`.

::

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    state = state_of(accelerator)
    start = checkpointer.load(state) or 0

Accelerate wraps what it prepares; here are the objects inside, by their order: ``model``, ``optimizer``,
``scheduler``, a second one as ``model_1``, and so on. With them go the gradient scaler, random numbers, what
was given to ``register_for_checkpointing``, and data loaders that know their position (torchdata's
``StatefulDataLoader``). The lists of prepared objects are private to accelerate: without them it is an error.
"""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator

from easyckpt.errors import UnsupportedValue
from easyckpt.rng import RNG

__all__ = ["TESTED", "state_of"]

TESTED = ("1.15.0",)
"""Versions of accelerate that the tests of this module passed with."""

_LISTS = {
    "model": "_models",
    "optimizer": "_optimizers",
    "scheduler": "_schedulers",
    "custom": "_custom_objects",
}
_WRAPPED = {"optimizer": "optimizer", "scheduler": "scheduler"}
"""Kind → attribute of accelerate's wrapper that holds the object itself."""


def state_of(accelerator: Accelerator) -> dict[str, Any]:
    """Everything that the accelerator has prepared. Call it once, after ``prepare``.

    Raises:
        UnsupportedValue: this accelerate keeps its objects elsewhere, or DeepSpeed has them.
    """
    if str(accelerator.distributed_type).endswith("DEEPSPEED"):
        raise UnsupportedValue(
            "DeepSpeed's engine has the state",
            hint='save {"engine": engine}, or easyckpt.integrations.deepspeed',
        )
    state: dict[str, Any] = {}
    try:
        for kind, attribute in _LISTS.items():
            for index, prepared in enumerate(getattr(accelerator, attribute)):
                inner = getattr(prepared, _WRAPPED[kind], prepared) if kind in _WRAPPED else prepared
                state[f"{kind}_{index}" if index else kind] = inner
        loaders = list(accelerator._dataloaders)
    except AttributeError as error:
        raise UnsupportedValue(
            f"this accelerate keeps its objects elsewhere ({error})", hint=f"use version {', '.join(TESTED)}"
        ) from error
    for index, loader in enumerate(loaders):
        if getattr(loader, "use_stateful_dataloader", False):
            state[f"loader_{index}" if index else "loader"] = loader
    scaler = getattr(accelerator, "scaler", None)
    if scaler is not None:
        state["scaler"] = scaler
    return {**state, "rng": RNG()}
