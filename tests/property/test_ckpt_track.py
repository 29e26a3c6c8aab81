"""A later save, which compares and does not walk, finds what a walk would find, whatever was changed."""

from __future__ import annotations

import copy
import mmap
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from easyckpt.errors import UnsupportedValue
from easyckpt.overlap.plan import CopyPlan
from easyckpt.overlap.witness import make_witness
from easyckpt.rng import RNG
from easyckpt.snapshot import as_bytes, fit_layout, write_frame, write_plain
from easyckpt.state import Capture, capture
from easyckpt.track import Tracker

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8, torch.float64,
          torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.int8, torch.complex128]  # fmt: skip
FORMS = ["plain", "0-d", "empty", "transposed", "strided", "view", "conjugated", "large", "permuted"]


class Marked(torch.Tensor):
    """A subclass that is a plain tensor otherwise."""


def tensor_of(form: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) * 100).to(dtype)

    if form == "conjugated":
        return torch.rand(3, 4, generator=generator).to(torch.complex64).conj()
    return {
        "plain": lambda: made(3, 5),
        "0-d": lambda: made(),
        "empty": lambda: made(0, 3),
        "transposed": lambda: made(4, 6).t(),
        "strided": lambda: made(8, 6)[::2, 1::2],
        "view": lambda: made(40)[7:19],
        "large": lambda: made(90, 101),
        "permuted": lambda: made(4, 30, 33, 7).permute(0, 3, 1, 2),
    }[form]()


def bytes_of(captured: Capture, *, later: bool) -> bytes:
    """The slot, copied all at once or with a rest."""
    layout = fit_layout(captured, None)
    body = bytearray(layout.body_bytes)

    slot = mmap.mmap(-1, layout.body_bytes)
    slot[:] = b"\xa5" * layout.body_bytes
    write_frame(slot, layout)
    plan = CopyPlan(layout, captured.tensors, everything_at_once=not later)
    whole = as_bytes(slot, layout)
    witness = make_witness(plan.later, "sample")
    witness.take()
    plan.copy_at_once(whole, captured.tensors)
    for _, _, piece in plan.pieces(whole):
        piece()
    assert witness.changed(whole) == ()
    write_plain(slot, layout, captured.plain)
    del whole
    body[:] = slot[:]
    return bytes(body)


class Trial:
    """A state, and ways to change it between two saves."""

    def __init__(self, specs: list[tuple[str, torch.dtype, int]]) -> None:
        tensors = [tensor_of(*spec) for spec in specs]
        self.net = nn.Module()
        for index, tensor in enumerate(tensors):
            parameter = nn.Parameter(tensor.detach(), requires_grad=False)
            self.net.register_parameter(f"p{index}", parameter)
        self.net.register_buffer("buffer", torch.zeros(5))
        self.optimizer = torch.optim.SGD([nn.Parameter(torch.ones(4))], lr=0.1, momentum=0.9)
        self.numbers: dict[str, Any] = {f"k{index}": index for index in range(40)}
        self.bag = {f"t{index}": torch.full((3,), float(index)) for index in range(20)}
        self.bag["tied"] = self.bag["t3"]
        self.deep: Any = {"a": [({"b": OrderedDict(x=torch.ones(2))},)]}
        self.marked = torch.ones(3).as_subclass(Marked)

    @property
    def state(self) -> dict[str, Any]:
        return {"net": self.net, "optimizer": self.optimizer, "numbers": self.numbers, "bag": self.bag,
                "deep": self.deep, "rng": RNG(), "marked": self.marked, "odd.key[0]": [1.5] * 20}  # fmt: skip

    def change(self, how: str, number: int) -> None:
        first = next(self.net.parameters())
        changes: dict[str, Any] = {
            "a number": lambda: self.numbers.__setitem__("k7", number),
            "a new number": lambda: self.numbers.__setitem__(f"n{number}", number),
            "a value in place": lambda: self.bag["t5"].add_(1),
            "a tensor replaced": lambda: self.bag.__setitem__("t5", torch.full((3,), 70.0 + number)),
            "a tensor of another shape": lambda: self.bag.__setitem__("t6", torch.ones(number + 4)),
            "a tie cut": lambda: self.bag.__setitem__("tied", torch.full((3,), 9.0)),
            "a parameter appears": lambda: self.net.register_parameter(
                f"late{number}", nn.Parameter(torch.full((2, 2), float(number)))
            ),
            "a parameter through .data": lambda: setattr(first, "data", first.data.clone()),
            "another type": lambda: self.net.half(),
            "a buffer replaced": lambda: setattr(self.net, "buffer", torch.full((5,), float(number))),
            "the first step": self.step,
            "random numbers": lambda: torch.rand(1),
            "deep inside": lambda: self.deep["a"][0][0]["b"].__setitem__("x", torch.zeros(2)),
            "an entry gone": lambda: self.bag.pop("t9", None),
            "the order": lambda: self.bag.__setitem__("t0", self.bag.pop("t0")),
            "learning rate": lambda: self.optimizer.param_groups[0].__setitem__("lr", number / 7),
            "nothing": lambda: None,
        }
        changes[how]()

    def step(self) -> None:
        (parameter,) = self.optimizer.param_groups[0]["params"]
        parameter.grad = torch.ones(4)
        self.optimizer.step()
        parameter.grad = None


HOWS = ["a number", "a new number", "a value in place", "a tensor replaced", "a tensor of another shape",
        "a tie cut", "a parameter appears", "a parameter through .data", "another type", "a buffer replaced",
        "the first step", "random numbers", "deep inside", "an entry gone", "the order", "learning rate",
        "nothing"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(FORMS), st.sampled_from(DTYPES), st.integers(0, 99)), max_size=4),
    st.lists(st.sampled_from(HOWS), min_size=1, max_size=6),
)
def test_a_tracked_capture_is_that_of_a_walk(specs: list[Any], hows: list[str]) -> None:
    trial = Trial([("plain", torch.float32, 1), *specs])
    tracker = Tracker()
    tracker.capture(trial.state)
    for number, how in enumerate(hows):
        trial.change(how, number)
        tracked = tracker.capture(trial.state).capture
        walked = capture(trial.state)
        assert {item.spec for item in tracked.tensors} == {item.spec for item in walked.tensors}
        assert tracked.plain == walked.plain
        assert bytes_of(tracked, later=True) == bytes_of(tracked, later=False)
        stored = {item.spec.name: item.tensor for item in tracked.tensors}
        for item in walked.tensors:
            assert stored[item.spec.name].data_ptr() == item.tensor.data_ptr() or "rng" in item.spec.name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_later_and_at_once_give_equal_bytes(form: str, dtype: torch.dtype) -> None:
    net = nn.Module()
    net.register_parameter("p", nn.Parameter(tensor_of(form, dtype, 3), requires_grad=False))
    captured = capture({"net": net})
    assert bytes_of(captured, later=True) == bytes_of(captured, later=False)


def test_what_is_the_same_is_not_walked_again() -> None:
    trial = Trial([("plain", torch.float32, 1)])
    trial.step()
    tracker = Tracker()
    tracker.capture(trial.state)
    trial.change("a value in place", 0)
    trial.change("a number", 77)
    torch.rand(3)
    assert tracker.capture(trial.state).same
    assert tracker.capture(copy.copy(trial.state)).same  # the dict itself may be a new one each time
    trial.change("a parameter appears", 1)
    assert not tracker.capture(trial.state).same


class Strange(torch.Tensor):
    """A subclass whose data only it understands."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def test_a_subclass_that_holds_its_data_elsewhere_is_refused_by_name() -> None:
    strange = torch.Tensor._make_wrapper_subclass(Strange, (3,))
    with pytest.raises((UnsupportedValue, TypeError)):
        capture({"deep": {"strange": strange}})


def test_ten_thousand_plain_values() -> None:
    state: dict[str, Any] = {"values": {f"k{n}": n if n % 2 else float(n) for n in range(10_000)}}
    tracker = Tracker()
    tracker.capture(state)
    assert tracker.capture(state).same
    state["values"]["k7"] = "text"
    assert tracker.capture(state).capture.plain == capture(state).plain
