"""One small training under DDP, FSDP2 and ZeRO 1 to 3, built alike. Imported by `framework_cells.py` alone.

The net has odd sizes, so that shards and partitions are uneven and some are empty. All of it is made from
seeds, so that two runs of one kind do the same arithmetic.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import easyckpt

# Its C++ extension takes minutes to build; without it, DeepSpeed's collectives are gloo's.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

KINDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
MOMENTS = ("exp_avg", "exp_avg_sq")
LR = 1e-2


class Net(nn.Module):
    """Shapes that no number of ranks divides; a parameter of one element; a buffer that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 3)
        self.last = nn.Linear(3, 1)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.middle(self.dropout(torch.tanh(self.first(batch)))))
        return self.last(hidden).float().square().mean()


class Training:
    """One rank's training.

    Args:
        kind: of `KINDS`.
        dtype: ``float32`` or ``bfloat16``; the latter for ZeRO alone.
        seed: of the weights.
    """

    def __init__(self, kind: str, dtype: str, *, seed: int) -> None:
        self.kind = kind
        torch.manual_seed(seed)
        net = Net()
        self.net: nn.Module = net
        self.engine: Any = None
        if kind.startswith("zero"):
            self.engine, *_ = deepspeed.initialize(
                model=net, model_parameters=net.parameters(), config=_config(int(kind[-1]), dtype)
            )
            self.state: dict[str, Any] = {"model": self.engine}
        else:
            if kind == "ddp":
                self.net = nn.parallel.DistributedDataParallel(net)
            else:
                fully_shard(net.first)
                fully_shard(net)
            self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=LR, weight_decay=0.1)
            self.state = {"model": self.net, "optimizer": self.optimizer}
        self.state["step"] = 0
        self.state["rng"] = easyckpt.RNG()
        self._dtype = getattr(torch, dtype)
        torch.manual_seed(seed * 1000 + dist.get_rank())

    def step(self) -> None:
        """One optimizer step, on random data."""
        batch = torch.randn(4, 5).to(self._dtype)
        if self.engine is not None:
            self.engine.backward(self.engine(batch))
            self.engine.step()
        else:
            self.optimizer.zero_grad()
            self.net(batch).backward()
            self.optimizer.step()
        self.state["step"] += 1

    def logical(self) -> dict[str, torch.Tensor]:
        """Every logical tensor, whole, by name: weights in fp32, and moments. All ranks call it."""
        found: dict[str, torch.Tensor] = {}
        module = self.engine.module if self.engine is not None else self.net
        for raw, parameter in module.named_parameters():
            name = raw.removeprefix("module.")
            if self.engine is not None:
                found[name] = safe_get_full_fp32_param(parameter)
                for key in MOMENTS:
                    found[f"{name}.{key}"] = safe_get_full_optimizer_state(parameter, key)
            else:
                found[name] = _whole(parameter)
                for key in MOMENTS:
                    found[f"{name}.{key}"] = _whole(self.optimizer.state[parameter][key])
        for raw, buffer in module.named_buffers():
            found[raw.removeprefix("module.")] = buffer
        found["step"] = torch.tensor(self.state["step"])
        return {name: value.detach().clone().cpu().float().reshape(-1) for name, value in found.items()}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def _config(stage: int, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": LR, "weight_decay": 0.1}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100,
            "allgather_bucket_size": 100,
            "stage3_param_persistence_threshold": 4,
            "sub_group_size": 30,
        },
    }
    if dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    return config
