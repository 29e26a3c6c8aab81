"""Naming, making and dropping of optimizer state over masters, without a framework."""

from __future__ import annotations

from typing import Any

import torch

from easyckpt.adapters.base import SavedPart, SavedTensor
from easyckpt.adapters.deepspeed import ADAPTER
from easyckpt.adapters.masters import Master, Range, adjust_state, plain_of, set_plain, state_parts
from easyckpt.layout import ChunkKind

RANGES = (
    Range(name="a", shape=(2, 3), param_start=2, master_start=0, length=4),
    Range(name="b", shape=(9,), param_start=0, master_start=4, length=5),
)


def flat_master(elements: int = 10, ranges: tuple[Range, ...] = RANGES) -> Master:
    """A partition that holds the end of one parameter and the beginning of the next, with padding."""
    return Master(group=0, tensor=torch.arange(elements, dtype=torch.float32), ranges=ranges)


def optimizer_of(master: Master, **state: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([master.tensor.requires_grad_(False)], lr=0.5)
    if state:
        optimizer.state[master.tensor] = dict(state)
    return optimizer


def saved_of(**tensors: tuple[str, tuple[int, ...]]) -> SavedPart:
    named = {name.replace("__", "."): spec for name, spec in tensors.items()}
    return SavedPart(
        tensors={
            name: SavedTensor(name=name, dtype=dtype, global_shape=shape)
            for name, (dtype, shape) in named.items()
        },
        plain=None,
    )


def test_parts_are_named_after_parameters_and_share_memory() -> None:
    master = flat_master()
    state = {master.tensor: {"step": torch.tensor(3.0), "exp_avg": torch.ones(10), "note": 7}}
    parts = {part.name: part for part in state_parts([master], state)}
    assert set(parts) == {
        "master.a",
        "master.b",
        "state.a.step",
        "state.b.step",
        "state.a.exp_avg",
        "state.b.exp_avg",
    }
    assert parts["master.a"].kind is ChunkKind.FLAT
    assert parts["master.a"].offsets == (2,)
    assert parts["master.a"].global_shape == (2, 3)
    assert parts["state.a.step"].tensor.data_ptr() == parts["state.b.step"].tensor.data_ptr()
    parts["master.b"].tensor.fill_(-1)
    assert master.tensor.tolist() == [0, 1, 2, 3, -1, -1, -1, -1, -1, 9]


def test_whole_parameters_keep_their_shape() -> None:
    weight = torch.zeros(2, 3)
    master = Master(group=0, tensor=weight, name="w", is_parameter=True)
    parts = list(state_parts([master], {weight: {"momentum": torch.zeros(2, 3)}}))
    assert [(part.name, tuple(part.tensor.shape)) for part in parts] == [("state.w.momentum", (2, 3))]


def test_a_fresh_optimizer_gets_the_saved_state_whichever_ranges_it_has_now() -> None:
    old = flat_master()
    optimizer = optimizer_of(old, step=torch.tensor(3.0), exp_avg=torch.ones(10), n=5)
    plain = plain_of(optimizer, [old], names=[["a", "b", "c"]])
    assert plain["groups"][0]["params"] == ["a", "b", "c"]
    assert plain["tensors"]["c"] == ["step", "parameter", "exp_avg", "parameter"]
    saved = saved_of(
        state__a__exp_avg=("bfloat16", (2, 3)),
        state__c__exp_avg=("float32", (4,)),
        state__a__step=("float32", ()),
        state__c__step=("float32", ()),
        master__a=("float32", (2, 3)),
        master__c=("float32", (4,)),
    )
    other = (Range(name="c", shape=(4,), param_start=1, master_start=0, length=3),)
    for ranges, dtype in ((RANGES, torch.bfloat16), (other, torch.float32), ((), torch.bfloat16)):
        fresh = flat_master(ranges=ranges)
        state: dict[torch.Tensor, dict[str, Any]] = {}
        adjust_state([fresh], state, plain=plain, saved=saved)
        made = state[fresh.tensor]
        assert made["exp_avg"].dtype == dtype
        assert made["exp_avg"].shape == fresh.tensor.shape
        assert made["step"].shape == ()
        made["n"] = 0
        set_plain([fresh], state, plain)
        assert made["n"] == 5


def test_present_tensors_stay_and_unsaved_ones_go() -> None:
    master = flat_master()
    kept = torch.ones(10)
    plain = plain_of(optimizer_of(master, exp_avg=kept), [master], names=[["a", "b"]])
    state: dict[torch.Tensor, dict[str, Any]] = {master.tensor: {"extra": 1, "exp_avg": kept}}
    adjust_state([master], state, plain=plain, saved=saved_of())
    assert state[master.tensor] == {"exp_avg": kept}
    empty = plain_of(optimizer_of(master), [master], names=[["a", "b"]])
    adjust_state([master], state, plain=empty, saved=saved_of())
    assert state == {}


def test_other_objects_are_not_engines() -> None:
    assert not ADAPTER.matches(torch.nn.Linear(1, 1))
    assert not ADAPTER.matches(object())
