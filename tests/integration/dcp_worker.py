"""A rank of an FSDP2 job that saves or loads through DCP. Started by tests, never imported by them.

``python dcp_worker.py save|load ROOT LOG``: RANK and WORLD_SIZE in the environment, a file store beside LOG.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from easyckpt.digest import bytes_digest
from easyckpt.interop.dcp import DcpReader, DcpWriter


def main() -> None:
    what, root, log = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{log}.store{world}", rank=rank, world_size=world)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    if what == "save":
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(4, 5)).square().mean().backward()
            optimizer.step()
        dcp.save(state_of(net, optimizer, 3), storage_writer=DcpWriter(root, step=3))
    else:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        state = state_of(net, optimizer, 0)
        dcp.load(state, storage_reader=DcpReader(root))
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state["progress"] == {"step": 3, "name": "run"}, state["progress"]
    digests = {name: digest(value) for name, value in flat(state_of(net, optimizer, 3)).items()}
    if rank == 0:
        log.write_text(json.dumps(digests))
    dist.destroy_process_group()


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    model, optim = get_state_dict(net, optimizer)
    return {"model": model, "optimizer": optim, "progress": {"step": step, "name": "run"}}


def flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else ()
    return {name: t for key, item in items for name, t in flat(item, f"{path}/{key}").items()}


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return bytes_digest(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
    # gloo lets go of the last collective's tensors on a thread of its own, a moment after it has answered. If
    # the interpreter is ending by then, torch aborts the process: the lock it waits for is never granted.
    os._exit(0)
