"""Whether gradients wait for a step is asked of the gradients themselves, not of their addresses."""

from __future__ import annotations

import torch
from torch import nn

from easyckpt.adapters.gradients import are_pending, watch_steps


def _stepped() -> tuple[nn.Parameter, torch.optim.SGD]:
    watch_steps()
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(3)
    assert are_pending(optimizer)
    optimizer.step()
    assert not are_pending(optimizer)
    return parameter, optimizer


def test_a_new_gradient_at_the_address_of_a_spent_one_waits() -> None:
    parameter, optimizer = _stepped()
    address = id(parameter.grad)
    parameter.grad = None
    for _ in range(1000):  # CPython gives a freed address to the next object of that size
        parameter.grad = torch.ones(3)
        assert are_pending(optimizer)
        if id(parameter.grad) == address:
            break
        parameter.grad = None


def test_what_is_added_to_a_spent_gradient_waits() -> None:
    parameter, optimizer = _stepped()
    optimizer.zero_grad(set_to_none=False)
    assert not are_pending(optimizer)
    (parameter * 2).sum().backward()
    assert are_pending(optimizer)


def test_a_compiled_step_is_noted() -> None:
    parameter, optimizer = _stepped()
    torch.compile(optimizer.step, backend="eager")()
    assert not are_pending(optimizer)
    parameter.grad = None
    parameter.grad = torch.ones(3)
    assert are_pending(optimizer)
