"""One rank of a small DeepSpeed training, started by ``test_deepspeed_adapter.py`` under torchrun.

    deepspeed_worker.py straight FOLDER CASE…    train, write the captured state at `SAVED`, train to the end
    deepspeed_worker.py resume FOLDER CASE…      new engine, load that state, write it again, train to the end
    deepspeed_worker.py refuse FOLDER            try what must be refused, and write the messages

The state goes through easyckpt's capture and loader and through plain files, without slots or savers: what is
tested is the adapter. Each case ends with files of all tensors and plain values, compared byte by byte.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
from safetensors.torch import load_file, save_file
from torch.optim.optimizer import register_optimizer_step_pre_hook

from easyckpt.errors import Misuse
from easyckpt.layout import ChunkSpec, build_layout, layout_from_dict, layout_to_dict
from easyckpt.loader import Loader, known_of
from easyckpt.plain import unpack
from easyckpt.rng import RNG
from easyckpt.state import capture

# Its C++ extension takes minutes to build; without it, DeepSpeed's collectives are gloo's.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

STEPS, SAVED = 7, 4
LATER = {"offload": 60}
"""Cases that are saved later: the bias corrections of CPU Adam come apart only after some tens of steps."""

_BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-2, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 5}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
}


def _case(
    *, without: tuple[str, ...] = (), zero: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    config = copy.deepcopy(_BASE)
    config["zero_optimization"].update(zero or {})
    config.update(changes)
    for key in without:
        config.pop(key)
    return config


# The loss scale moves within the few steps of a case: up every second step, down from where it overflows.
_FP16 = {"enabled": True, "initial_scale_power": 15, "loss_scale_window": 2, "hysteresis": 1}
_CPU_ADAM = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}

CASES: dict[str, dict[str, Any]] = {
    "zero1_bf16": _case(),
    "zero1_fp32": _case(without=("bf16",)),
    "zero1_bf16_fp32_sums": _case(data_types={"grad_accum_dtype": "fp32"}),
    "zero1_accumulation": _case(gradient_accumulation_steps=2),
    "zero1_aligned": _case(zero={"parameter_alignment": True}),
    "zero1_fp16": _case(without=("bf16",), fp16=_FP16),
    "zero2_bf16": _case(zero={"stage": 2}),
    "zero2_round_robin": _case(zero={"stage": 2, "round_robin_gradients": True}),
    "zero3_bf16": _case(zero={"stage": 3, "stage3_param_persistence_threshold": 40}),
    "zero3_fp32": _case(without=("bf16",), zero={"stage": 3, "sub_group_size": 300}),
    "stage0_bf16": _case(zero={"stage": 0}),
    "stage0_fp16": _case(without=("bf16",), fp16=_FP16, zero={"stage": 0}),
    "stage0_fp32": _case(without=("bf16",), zero={"stage": 0}),
    "sgd": _case(
        optimizer={"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}, zero_allow_untested_optimizer=True
    ),
    "offload": _case(zero={"offload_optimizer": {"device": "cpu"}}, optimizer=_CPU_ADAM),
}


class Net(torch.nn.Module):
    """Odd sizes, so that partitions cut parameters; tied, frozen and buffered tensors; dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(13, 37)
        self.middle = torch.nn.Linear(37, 37, bias=False)
        self.tied = torch.nn.Linear(37, 37, bias=False)
        self.tied.weight = self.middle.weight
        self.frozen = torch.nn.Linear(37, 5)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.dropout = torch.nn.Dropout(0.2)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = self.tied(self.dropout(torch.tanh(self.middle(torch.tanh(self.first(batch))))))
        return self.frozen(hidden).float().pow(2).mean()


def build(config: dict[str, Any]) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(5)
    model = Net()
    decayed = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    plain = [p for p in model.parameters() if p.requires_grad and p.dim() == 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=copy.deepcopy(config))
    torch.manual_seed(50 + torch.distributed.get_rank())
    return engine


def train(engine: deepspeed.DeepSpeedEngine, steps: int) -> None:
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps * engine.gradient_accumulation_steps()):
        engine.backward(engine(torch.randn(4, 13).to(dtype)))
        engine.step()


def write(path: Path, state: dict[str, Any]) -> None:
    taken = capture(state)
    layout = build_layout(taken.specs, state_bytes=len(taken.plain))
    tensors = {
        item.spec.name: item.tensor.detach().clone(memory_format=torch.contiguous_format)
        for item in taken.tensors
    }
    save_file(tensors, path)
    path.with_suffix(".plain").write_bytes(taken.plain)
    path.with_suffix(".json").write_text(json.dumps(layout_to_dict(layout)))


def read(path: Path, state: dict[str, Any]) -> None:
    tensors = load_file(path)
    chunks = layout_from_dict(json.loads(path.with_suffix(".json").read_text())).chunks

    def copy_chunk(spec: ChunkSpec, destination: torch.Tensor) -> None:
        assert tensors[spec.name].dtype == destination.dtype, "a load must not cast"
        destination.copy_(tensors[spec.name])

    loader = Loader(state, unpack(path.with_suffix(".plain").read_bytes()), known=known_of(chunks))
    loader.compare()
    loader.fill(copy_chunk)


def no_step(*_: Any) -> None:
    raise AssertionError("a load ran an optimizer step")


def refusals(folder: Path) -> dict[str, str]:
    """What the adapter says to states and engines that it cannot take, by the name of the trial."""
    said: dict[str, str] = {}

    def trial(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Misuse as error:
            said[name] = str(error)

    engine = build(CASES["zero1_accumulation"])
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.randn(4, 13).to(dtype)))
    trial("between backward and step", lambda: capture({"engine": engine}))
    engine.step()
    trial("half of an accumulation", lambda: capture({"engine": engine}))
    train(engine, 1)
    for _ in range(3):  # back to the border of an accumulation
        engine.backward(engine(torch.randn(4, 13).to(dtype)))
        engine.step()
    version, deepspeed.__version__ = deepspeed.__version__, "0.1.0"
    trial("another version", lambda: capture({"engine": engine}))
    deepspeed.__version__ = version
    return said


def main() -> None:
    mode, folder, names = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    torch.use_deterministic_algorithms(True)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank = torch.distributed.get_rank()
    if mode == "refuse":
        (folder / f"refusals.{rank}.json").write_text(json.dumps(refusals(folder)))
    for name in names:
        engine = build(CASES[name])
        state = {"engine": engine, "rng": RNG()}
        saved = folder / f"{name}.saved.{rank}.safetensors"
        if mode == "straight":
            train(engine, LATER.get(name, SAVED))
            write(saved, state)
        else:
            hook = register_optimizer_step_pre_hook(no_step)
            read(saved, state)
            hook.remove()
            write(folder / f"{name}.loaded.{rank}.safetensors", state)
        train(engine, STEPS - SAVED)
        write(folder / f"{name}.{mode}.{rank}.safetensors", state)
        engine.destroy()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
