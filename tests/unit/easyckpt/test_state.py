"""What a state may consist of, and that it comes back bit by bit, in place."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from easyckpt.errors import Misuse, StateMismatch, UnsupportedValue
from easyckpt.rng import RNG
from easyckpt.state import capture
from tests.ckpt_bytes import from_bytes, to_bytes, write


class Net(nn.Module):
    """Tied weights, buffers of both kinds, extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        x = torch.randint(0, 10, (8,))
        loss = nn.functional.cross_entropy(net(x), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "adam_tensor_lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_equal_in_a_fresh_process_state(name: str) -> None:
    torch.manual_seed(1)
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state: dict[str, Any] = {
        "optimizer": optimizer,
        "model": net,
        "rng": RNG(),
        "scheduler": scheduler,
        "loss": [0.0],
    }
    state["loss"] = train(net, optimizer, 3)
    scheduler.step()
    layout, body = to_bytes(state)
    expected = train(net, optimizer, 3)
    drawn = (random.random(), float(np.random.rand()))

    torch.manual_seed(7)
    fresh = Net()
    other = OPTIMIZERS[name](fresh.parameters())
    again: dict[str, Any] = {
        "optimizer": other,
        "model": fresh,
        "rng": RNG(),
        "scheduler": torch.optim.lr_scheduler.StepLR(other, 2),
        "loss": [],
    }
    identities = {key: value.data_ptr() for key, value in fresh.state_dict(keep_vars=True).items()
                  if isinstance(value, torch.Tensor)}  # fmt: skip
    from_bytes(layout, body, again)
    assert len(again["loss"]) == 3
    assert fresh.calls == 3
    assert train(fresh, other, 3) == expected
    assert (random.random(), float(np.random.rand())) == drawn
    for key, value in fresh.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, net.state_dict()[key]), key
            assert value.data_ptr() == identities[key], f"{key} was not written in place"


def test_a_load_never_steps_or_casts() -> None:
    net = nn.Linear(3, 3).bfloat16()
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        optimizer.state[parameter] = {
            "step": torch.tensor(5.0),
            "exp_avg": torch.randn(parameter.shape, dtype=torch.float32),
            "exp_avg_sq": torch.rand(parameter.shape, dtype=torch.float64),
        }
    saved = {key: value.clone() for key, value in optimizer.state[net.weight].items()}
    layout, body = to_bytes({"model": net, "optimizer": optimizer})
    fresh = nn.Linear(3, 3).bfloat16()
    other = torch.optim.AdamW(fresh.parameters())
    steps = []
    other.register_step_pre_hook(lambda *_: steps.append(1))
    from_bytes(layout, body, {"model": fresh, "optimizer": other})
    assert not steps
    for key, value in other.state[fresh.weight].items():
        assert value.dtype == saved[key].dtype
        assert torch.equal(value, saved[key])


def test_optimizer_state_that_was_not_saved_is_gone() -> None:
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    layout, body = to_bytes({"model": net, "optimizer": optimizer})
    train(net, optimizer, 1)
    from_bytes(layout, body, {"model": net, "optimizer": optimizer})
    assert not any(optimizer.state.values())


def test_wrappers_of_torch_do_not_change_names() -> None:
    net = Net()
    layout, body = to_bytes({"model": torch.compile(nn.DataParallel(net))})
    assert "model.embed.weight" in {chunk.name for chunk in layout.chunks}
    fresh = Net()
    from_bytes(layout, body, {"model": fresh})
    assert torch.equal(fresh.embed.weight, net.embed.weight)


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    net = Net()
    layout, body = to_bytes({"model": net})
    (alias,) = [chunk for chunk in layout.chunks if chunk.alias_of]
    assert (alias.name, alias.alias_of) == ("model.head.weight", "model.embed.weight")
    fresh = Net()
    from_bytes(layout, body, {"model": fresh})
    assert fresh.head.weight is fresh.embed.weight


def test_weights_that_are_tied_only_here_are_an_error() -> None:
    net = Net()
    net.head.weight = nn.Parameter(torch.randn(10, 4))
    layout, body = to_bytes({"model": net})
    with pytest.raises(StateMismatch, match="tied to"):
        from_bytes(layout, body, {"model": Net()})


def test_every_kind_of_tensor_comes_back(tmp_path: Any) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.ones(1, 3).expand(4, 3),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "complex": torch.randn(3, dtype=torch.complex128),
        "big": torch.randn(5000),
        "nan": torch.tensor([float("nan"), -0.0]),
    }
    for dtype in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float64",
                  "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"):  # fmt: skip
        tensors[dtype] = torch.arange(5).to(getattr(torch, dtype))
    layout, body = to_bytes({"t": dict(tensors)})
    blank = {
        key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in tensors.items()
    }
    from_bytes(layout, body, {"t": blank})
    for key, value in tensors.items():
        assert raw(blank[key]) == raw(value), key
    path = tmp_path / "body.safetensors"
    path.write_bytes(body[: layout.body_bytes])
    stored = safetensors.torch.load_file(path)
    assert torch.equal(stored["t.big"], tensors["big"])
    assert torch.equal(stored["t.transposed"], base.t())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_equal_states_give_equal_bytes_whatever_the_slot_held() -> None:
    state = {"a": torch.ones(3000), "b": torch.ones(3), "n": 1}
    layout, body = to_bytes(state)
    captured = capture(state)
    dirty = type(body)(-1, layout.body_bytes)
    dirty[:] = b"\xff" * layout.body_bytes
    write(dirty, layout, captured)
    assert dirty[:] == body[:]


def test_the_layout_stays_while_plain_state_grows_in_its_room() -> None:
    state: dict[str, Any] = {"w": torch.ones(10), "losses": [0.1]}
    layout, _ = to_bytes(state)
    state["losses"] = [0.1] * 500
    same, _ = to_bytes(state, layout)
    assert same is layout
    state["losses"] = [0.1] * 50_000
    larger, body = to_bytes(state, layout)
    assert larger is not layout
    from_bytes(larger, body, state)
    assert len(state["losses"]) == 50_000


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.pop("b"), "not in the state: b"),
        (lambda s: s.update(c=torch.ones(1)), "missing in the checkpoint: c"),
        (lambda s: s.update(b=torch.ones(4)), "b (float32[4] here, float32[3] saved)"),
        (lambda s: s.update(b=torch.ones(3, dtype=torch.int32)), "b (int32[3] here, float32[3] saved)"),
        (lambda s: s.update(b=nn.Linear(1, 1)), "b (torch.module here, TensorRef saved)"),
        (lambda s: s.update(m=nn.Linear(2, 3)), "m.weight (float32[3, 2] here, float32[2, 2] saved)"),
        (lambda s: s.update(m=nn.Linear(2, 2, bias=False)), "not in the state: m.bias"),
        (lambda s: s["d"].update(x=torch.ones(2)), "missing in the checkpoint: d.x"),
    ],
)
def test_differences_are_named_and_nothing_is_changed(change: Any, named: str) -> None:
    state = {
        "a": torch.ones(2),
        "b": torch.ones(3),
        "m": nn.Linear(2, 2),
        "d": {"t": torch.ones(1)},
        "n": 5,
    }
    layout, body = to_bytes(state)
    other: dict[str, Any] = {
        "a": torch.zeros(2),
        "b": torch.zeros(3),
        "m": nn.Linear(2, 2),
        "d": {"t": torch.zeros(1)},
        "n": 0,
    }
    change(other)
    with pytest.raises(StateMismatch) as caught:
        from_bytes(layout, body, other)
    assert named in str(caught.value)
    assert not other["a"].any()
    assert other["n"] == 0
    from_bytes(layout, body, other, strict=False)
    assert other["a"].all()
    assert other["n"] == 5


def test_an_optimizer_with_other_groups_is_an_error() -> None:
    net = Net()
    layout, body = to_bytes({"m": net, "o": torch.optim.SGD(net.parameters(), lr=0.1)})
    groups = [{"params": [net.embed.weight]}, {"params": list(net.norm.parameters())}]
    with pytest.raises(StateMismatch, match="parameter groups differ"):
        from_bytes(layout, body, {"m": net, "o": torch.optim.SGD(groups, lr=0.1)})
    with pytest.raises(StateMismatch, match="cannot take the state of SGD"):
        from_bytes(layout, body, {"m": net, "o": torch.optim.Adam(net.parameters())})


def test_what_cannot_be_stored_is_named_by_its_path() -> None:
    class Thing:
        pass

    loop: list[Any] = []
    loop.append(loop)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"a": {"b": [1, Thing()]}}, "a.b[1]"),
        ({"f": lambda: 0}, "f: "),
        ({"loop": loop}, "in itself"),
        ({"meta": torch.empty(2, device="meta")}, "meta: a tensor without memory"),
        ({"sparse": torch.eye(2).to_sparse()}, "sparse: a tensor of layout"),
        ({"lazy": nn.LazyLinear(2)}, "lazy.weight: a lazy parameter"),
        ({"e": np.array([object()])}, "e: a value of type numpy.ndarray"),
    ]
    for state, named in cases:
        with pytest.raises(UnsupportedValue) as caught:
            capture(state)
        assert named in str(caught.value)
    with pytest.raises(Misuse, match="must be a dict with text keys"):
        capture([1])  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="reserved"):
        to_bytes({"__state__": torch.ones(1)})


def test_schedulers_of_torch_can_be_stored() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    lrs = torch.optim.lr_scheduler
    made = [
        lrs.CosineAnnealingLR(optimizer, 10),
        lrs.MultiStepLR(optimizer, [2, 4]),
        lrs.OneCycleLR(optimizer, 0.1, total_steps=10),
        lrs.ReduceLROnPlateau(optimizer),
        lrs.LambdaLR(optimizer, lambda step: 1.0 / (step + 1)),
        lrs.SequentialLR(optimizer, [lrs.ConstantLR(optimizer), lrs.LinearLR(optimizer)], [2]),
    ]
    for scheduler in made:
        state = {"s": scheduler, "scaler": torch.amp.GradScaler("cpu")}
        layout, body = to_bytes(state)
        from_bytes(layout, body, state)


def test_containers_with_live_things_are_filled_and_others_replaced() -> None:
    layout, body = to_bytes(
        {"mix": [torch.ones(2), 7, ("x", 1)], "log": {"a": [1, 2]}, "none": {"t": torch.ones(1)}}
    )
    live = torch.zeros(2)
    log: dict[str, Any] = {"old": 1}
    state: dict[str, Any] = {"mix": [live, 0, None], "log": log, "none": {}}
    from_bytes(layout, body, state)
    assert state["mix"][0] is live
    assert live.all()
    assert state["mix"][1:] == [7, ("x", 1)]
    assert state["log"] is log
    assert log == {"a": [1, 2]}
    assert torch.equal(state["none"]["t"], torch.ones(1))
