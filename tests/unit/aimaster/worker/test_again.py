"""`loop` without an agent, and what it takes for the end of a peer."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from aimaster.worker import loop
from aimaster.worker.again import LOOP_VARIABLE
from aimaster.worker.groups import is_echo


def test_without_an_agent_train_is_called_once() -> None:
    assert loop(lambda: 7) == 7


def test_an_agent_that_is_not_there_is_said_and_train_is_called_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(LOOP_VARIABLE, "/nowhere/at/all")
    calls: list[int] = []
    with pytest.raises(ValueError, match="mine"):
        loop(lambda: calls.append(1) or int("mine"))
    assert calls == [1]
    assert "/nowhere/at/all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "echo"),
    [
        # As gloo says it in torch 2.13.
        (
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
            ),
            True,
        ),
        (dist.DistBackendError("NCCL communicator was aborted on rank 3"), True),
        (dist.DistNetworkError("failed to recv, got 0 bytes"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_what_the_end_of_a_peer_looks_like(error: Exception, echo: bool) -> None:
    assert is_echo(error) is echo
