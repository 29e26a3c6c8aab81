"""Gradients that wait for a step are part of the state; spent ones are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ckpt_nodes import Nodes, make_nodes


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        made.begin(1, [made.start()])
        yield made


class Training:
    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.state: dict[str, Any] = {"optimizer": self.optimizer, "model": self.net}

    def backward(self, number: int) -> None:
        draw = torch.Generator().manual_seed(number)
        self.net(torch.randn(4, 6, generator=draw)).square().mean().backward()

    def step(self, *, to_none: bool = True) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=to_none)

    def values(self) -> list[torch.Tensor]:
        moments = [item for entries in self.optimizer.state.values() for item in entries.values()]
        return [value.detach().clone() for value in (*self.net.parameters(), *moments)]


@pytest.mark.parametrize("stepped", [0, 2])
def test_a_save_within_an_accumulation_goes_on_bit_equal(nodes: Nodes, stepped: int) -> None:
    one = Training(1)
    (worker,) = nodes.workers()
    worker.load(one.state)
    for number in range(stepped):
        one.backward(number)
        one.step()
    one.backward(10)
    worker.save(one.state, step=1).wait("memory", 60)
    one.backward(11)
    one.step()
    nodes.begin(2, nodes.nodes, progress=True)
    two = Training(2)
    (worker,) = nodes.workers()
    assert worker.load(two.state) == 1
    worker.save(two.state, step=2).wait("memory", 60)  # they still wait
    two.backward(11)
    two.step()
    assert all(map(torch.equal, one.values(), two.values()))
    nodes.begin(3, nodes.nodes, progress=True)
    three = Training(3)
    (worker,) = nodes.workers()
    assert worker.load(three.state) == 2
    three.backward(11)
    three.step()
    assert all(map(torch.equal, one.values(), three.values()))


@pytest.mark.parametrize("how", ["kept", "zeroed", "none"])
def test_spent_gradients_are_not_stored(nodes: Nodes, how: str) -> None:
    one = Training(1)
    (worker,) = nodes.workers()
    worker.load(one.state)
    one.backward(1)
    if how == "kept":
        one.optimizer.step()
    else:
        one.step(to_none=how == "none")
    worker.save(one.state, step=1).wait("memory", 60)
    one.backward(2)
    one.step()
    worker.save(one.state, step=2, block=True).wait("memory", 60)
    nodes.begin(2, nodes.nodes, progress=True)
    two = Training(2)
    two.backward(3)  # what is lying about when a checkpoint without gradients is loaded does no harm
    (worker,) = nodes.workers()
    assert worker.load(two.state) == 2
    assert all(map(torch.equal, one.values(), two.values()))
