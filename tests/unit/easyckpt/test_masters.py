"""Naming, making and dropping of optimizer state over masters, without a framework."""

from __future__ import annotations

import torch

from easyckpt.adapters.base import SavedPart, SavedTensor
from easyckpt.adapters.deepspeed import ADAPTER
from easyckpt.adapters.masters import Master, Range, adjust_state, describe, set_plain, state_parts
from easyckpt.layout import ChunkKind


def flat_master(elements: int = 10) -> Master:
    """A partition that holds the end of one parameter and the beginning of the next, with padding."""
    return Master(
        key="0.0",
        tensor=torch.arange(elements, dtype=torch.float32),
        ranges=(
            Range(name="a", shape=(2, 3), param_start=2, master_start=0, length=4),
            Range(name="b", shape=(9,), param_start=0, master_start=4, length=5),
        ),
    )


def test_parts_are_named_after_parameters_and_share_memory() -> None:
    master = flat_master()
    state = {master.tensor: {"step": torch.tensor(3.0), "exp_avg": torch.ones(10), "note": 7}}
    parts = {part.name: part for part in state_parts([master], state)}
    assert set(parts) == {"master.a", "master.b", "state.step.@0.0", "state.exp_avg.a", "state.exp_avg.b"}
    assert parts["master.a"].kind is ChunkKind.FLAT
    assert parts["master.a"].offsets == (2,)
    assert parts["master.a"].global_shape == (2, 3)
    parts["master.b"].tensor.fill_(-1)
    assert master.tensor.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, 9]


def test_whole_parameters_keep_their_shape() -> None:
    weight = torch.zeros(2, 3)
    master = Master(key="0.1", tensor=weight, name="w", is_parameter=True)
    parts = list(state_parts([master], {weight: {"momentum": torch.zeros(2, 3)}}))
    assert [(part.name, tuple(part.tensor.shape)) for part in parts] == [("state.momentum.w", (2, 3))]


def test_fresh_optimizer_gets_the_saved_state_in_the_saved_order_and_type() -> None:
    old = flat_master()
    described = {
        "0.0": describe(
            old, {"step": torch.tensor(3.0), "exp_avg": torch.ones(10, dtype=torch.bfloat16), "n": 5}
        )
    }
    name = "state.exp_avg.a"
    saved = SavedPart(
        tensors={
            name: SavedTensor(
                name=name,
                dtype="bfloat16",
                global_shape=(2, 3),
            )
        },
        plain=None,
    )
    fresh = flat_master()
    state: dict[torch.Tensor, dict[str, object]] = {}
    adjust_state([fresh], state, described=described, saved=saved)
    made = state[fresh.tensor]
    assert list(made) == ["step", "exp_avg", "n"]
    moment, step = made["exp_avg"], made["step"]
    assert isinstance(moment, torch.Tensor)
    assert isinstance(step, torch.Tensor)
    assert moment.dtype == torch.bfloat16
    assert moment.shape == fresh.tensor.shape
    assert step.shape == ()
    made["n"] = 0
    set_plain([fresh], state, described)
    assert made["n"] == 5


def test_present_tensors_stay_and_unsaved_ones_go() -> None:
    master = flat_master()
    kept = torch.ones(10)
    state: dict[torch.Tensor, dict[str, object]] = {master.tensor: {"extra": 1, "exp_avg": kept}}
    adjust_state(
        [master], state, described={"0.0": [["exp_avg", "ranged"]]}, saved=SavedPart(tensors={}, plain=None)
    )
    assert state[master.tensor] == {"exp_avg": kept}
    adjust_state([master], state, described={}, saved=SavedPart(tensors={}, plain=None))
    assert state == {}


def test_other_objects_are_not_engines() -> None:
    assert not ADAPTER.matches(torch.nn.Linear(1, 1))
    assert not ADAPTER.matches(object())
