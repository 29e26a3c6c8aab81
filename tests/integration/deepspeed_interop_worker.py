"""One rank of DeepSpeed trainings for ``test_interop_deepspeed.py``; started under torchrun, in one folder.

    deepspeed_interop_worker.py save FOLDER    train; save by DeepSpeed, then by us through its calls
    deepspeed_interop_worker.py load FOLDER    go on from ours, from DeepSpeed's own, and from our export

Each training writes the losses of two more steps; all have to be equal.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from torch import nn

from easyckpt.integrations.deepspeed import attach

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
}


def make(**changes: Any) -> Any:
    torch.manual_seed(len(changes))  # a fresh engine begins elsewhere
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    engine, *_ = deepspeed.initialize(
        model=net, model_parameters=net.parameters(), config={**CONFIG, **changes}
    )
    return engine


def train(engine: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        loss = engine(torch.rand(4, 6, generator=generator).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    rank = int(os.environ["RANK"])
    results: dict[str, Any] = {}
    deepspeed.init_distributed("gloo")
    if what == "save":
        engine = make()
        train(engine, 0, 3)
        engine.save_checkpoint(str(folder / "theirs"), client_state={"epoch": 1})
        attached = attach(engine)
        assert engine.save_checkpoint(str(folder / "ours"), client_state={"epoch": 1})
        assert attached.last is not None
        attached.last.wait("durable", timeout=200)
        results["undisturbed"] = train(engine, 3, 2)
        results["fp32"] = {name: value.tolist() for name, value in masters(engine).items()}
        attached.close()
        assert "save_checkpoint" not in vars(engine)
    else:
        for name in ("ours", "theirs"):
            engine = make(steps_per_print=100)
            attached = attach(engine)
            path, client = engine.load_checkpoint(str(folder / name))
            assert path is not None
            assert client["epoch"] == 1, client
            assert engine.global_steps == 3
            results[name] = train(engine, 3, 2)
            attached.close()
        engine = make(checkpoint={"load_universal": True})
        path, _ = engine.load_checkpoint(str(folder / "universal"))
        assert path is not None
        assert engine.global_steps == 3
        results["universal"] = train(engine, 3, 2)
        attached = attach(engine)
        assert engine.load_checkpoint(str(folder / "nothing")) == (None, {})
        attached.close()
    (folder / f"{what}-{rank}.json").write_text(json.dumps(results))


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """By DeepSpeed's own accessor, which gathers."""
    from deepspeed.utils import safe_get_full_fp32_param

    return {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}


if __name__ == "__main__":
    main()
