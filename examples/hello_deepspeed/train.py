"""Masked-language-model training of a small BERT with DeepSpeed, made to survive with a few easyckpt lines.

    torchrun --nproc-per-node 2 train.py --checkpoint_dir /tmp/hello
    aimaster run --nproc-per-node 2 train.py --checkpoint_dir /tmp/hello

Everything here is what a DeepSpeed user would write; the lines that end in ``# easyckpt`` are what was added.
Without them the script runs as well, and a restart begins at step 0.

Two undisturbed runs with the same seed, world size and thread count end with bit-equal weights, and so does a
run that was killed and resumed: every operation is deterministic, and the engine, the sampler and the random
number generators are part of the checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by deepspeed at import; drop it on a GPU machine

import deepspeed
import numpy as np
import torch
from safetensors.torch import save_file
from text_data import MaskTokens, ResumableSampler, Windows, load_or_build
from transformers import BertConfig, BertForMaskedLM

import easyckpt  # easyckpt

SEQUENCE_LENGTH = 64


def parse_arguments() -> argparse.Namespace:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--ds_config", type=Path, default=here / "ds_config.json", help="DeepSpeed configuration"
    )
    parser.add_argument("--checkpoint_dir", type=Path, help="where checkpoints go (EASYCKPT_DIR)")
    parser.add_argument(
        "--cache_dir", type=Path, default=Path("build/hello_deepspeed"), help="tokenizer and ids"
    )
    parser.add_argument("--tensorboard", type=Path, help="folder for TensorBoard event files")
    parser.add_argument("--step_log", type=Path, help="folder that gets one JSON line per rank and step")
    parser.add_argument("--export", type=Path, help="file for the final weights and optimizer state")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save_interval", type=int, default=1, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--offload", action="store_true", help="keep the optimizer's state in host memory")
    parser.add_argument("--fp32", action="store_true", help="train in fp32 instead of bf16")
    parser.add_argument("--zero_stage", type=int, choices=(0, 1, 2), help="instead of the configuration's")
    arguments = parser.parse_args()
    if arguments.steps < 1 or arguments.save_interval < 1:
        parser.error("--steps and --save_interval must be at least 1")
    return arguments


def read_config(arguments: argparse.Namespace) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(arguments.ds_config.read_text())
    if arguments.fp32:
        config.pop("bf16", None)
    if arguments.zero_stage is not None:
        config["zero_optimization"]["stage"] = arguments.zero_stage
    if arguments.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        config["optimizer"]["params"].pop("torch_adam", None)  # DeepSpeed's own CPU Adam goes with offload
    return config


def build_engine(arguments: argparse.Namespace, *, vocab_size: int) -> deepspeed.DeepSpeedEngine:
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=vocab_size,
            hidden_size=arguments.hidden_size,
            num_hidden_layers=arguments.layers,
            num_attention_heads=max(1, arguments.hidden_size // 32),
            intermediate_size=4 * arguments.hidden_size,
            max_position_embeddings=SEQUENCE_LENGTH,
            pad_token_id=0,
        )
    )
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=read_config(arguments)
    )
    return engine


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def export(engine: deepspeed.DeepSpeedEngine, path: Path) -> None:
    """Final weights, fp32 masters and moments of every parameter, through DeepSpeed's public accessors."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().clone()
        if engine.zero_optimization():  # the accessors gather from all ranks
            tensors[f"master/{name}"] = safe_get_full_fp32_param(parameter).clone()
            for key in ("exp_avg", "exp_avg_sq"):
                tensors[f"{key}/{name}"] = safe_get_full_optimizer_state(parameter, key).clone()
    if engine.global_rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, str(path) + ".tmp")
        os.replace(str(path) + ".tmp", path)


class StepLog:
    """One JSON line per step, appended, so that the lines of all attempts lie in one file per rank."""

    def __init__(self, folder: Path, *, rank: int, resumed: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = open(folder / f"rank{rank}.jsonl", "a", buffering=1)  # noqa: SIM115 - open to the end
        generation = os.environ.get("AIMASTER_GENERATION") or os.environ.get(
            "TORCHELASTIC_RESTART_COUNT", "0"
        )
        node = os.environ.get("AIMASTER_NODE_ID")
        self._same = {
            "rank": rank,
            "pid": os.getpid(),
            "generation": int(generation),
            "node": node,
            **resumed,
        }

    def write(self, step: int, loss: float) -> None:
        self._file.write(json.dumps({"step": step, "loss": loss, "wall_s": time.time(), **self._same}) + "\n")


def main() -> None:
    arguments = parse_arguments()
    torch.use_deterministic_algorithms(True)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokenizer, ids = load_or_build(arguments.cache_dir, vocab_size=arguments.vocab_size)

    seed_everything(arguments.seed)  # the same model on every rank …
    engine = build_engine(arguments, vocab_size=tokenizer.get_vocab_size())
    seed_everything(arguments.seed + 1 + rank)  # … and other masks and dropout
    windows = Windows(ids, length=SEQUENCE_LENGTH)
    sampler = ResumableSampler(
        len(windows),
        batch=engine.train_micro_batch_size_per_gpu(),
        rank=rank,
        world_size=world_size,
        seed=arguments.seed,
    )
    loader = torch.utils.data.DataLoader(
        windows,
        batch_sampler=sampler,
        collate_fn=MaskTokens(tokenizer),
        generator=torch.Generator(),  # else each new iterator draws from the global one
    )

    start, resumed = 0, {"resumed_step": None, "restored_from": None}
    checkpointer = easyckpt.init(arguments.checkpoint_dir)  # easyckpt
    state = {"engine": engine, "sampler": sampler, "rng": easyckpt.RNG()}  # easyckpt
    start = easyckpt.load(state) or 0  # easyckpt
    resumed = {"resumed_step": start or None, "restored_from": checkpointer.restored_from}  # easyckpt

    log = StepLog(arguments.step_log, rank=rank, resumed=resumed) if arguments.step_log else None
    board = None
    if arguments.tensorboard and rank == 0:
        from torch.utils.tensorboard import SummaryWriter

        board = SummaryWriter(str(arguments.tensorboard), purge_step=start)

    engine.train()
    batches = iter(loader)
    for step in range(start + 1, arguments.steps + 1):
        batch = next(batches)
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if log:
            log.write(step, loss.item())
        if board:
            board.add_scalar("loss", loss.item(), step)
        if rank == 0 and (step % 20 == 0 or step == arguments.steps):
            print(f"step {step}/{arguments.steps} loss {loss.item():.4f}", flush=True)
        last = step == arguments.steps  # easyckpt
        if last or step % arguments.save_interval == 0:  # easyckpt
            easyckpt.save(state, step=step, block=last)  # easyckpt

    easyckpt.close()  # easyckpt
    if board:
        board.close()
    if arguments.export:
        export(engine, arguments.export)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
