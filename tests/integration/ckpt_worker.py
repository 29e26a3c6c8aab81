"""A rank that trains, saves every step and can be killed anywhere. Started by tests, never imported by them.

``python ckpt_worker.py ROOT STEPS LOG [KEY=VALUE …]``: appends one line of JSON to LOG for its load and for
each step. ``kill=N`` sends itself SIGKILL in the middle of the copy of step N; ``again=N`` opens, loads and
closes N times more at the end; ``store=1`` makes rank 0 the host of the job's TCPStore, as a launcher would.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import easyckpt
from easyckpt.overlap import stager


def main() -> None:
    root, steps, log_path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    options = dict(item.split("=", 1) for item in sys.argv[4:])
    rank = int(os.environ.get("RANK", "0"))
    store = host_store() if options.get("store") and rank == 0 else None

    def say(**what: Any) -> None:
        with log_path.open("a") as log:
            log.write(json.dumps({"rank": rank, "pid": os.getpid(), **what}) + "\n")

    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    state = {"model": net, "optimizer": optimizer, "rng": easyckpt.RNG(), "count": 0}
    checkpointer = easyckpt.Checkpointer(root)
    start = checkpointer.load(state) or 0
    say(event="loaded", step=start, tier=checkpointer.restored_from, generation=generation_of(checkpointer))
    if "kill" in options:
        die_in_copy(int(options["kill"]))
    for step in range(start + 1, steps + 1):
        loss = net(torch.randn(16, 32)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state["count"] = step
        handle = checkpointer.save(state, step=step, block=options.get("block") == "1")
        say(event="step", step=step, loss=loss.item(), stage=handle.stage, reason=handle.reason)
        time.sleep(float(options.get("pause", "0")))
    digest = {key: value.sum(dtype=torch.float64).item() for key, value in net.state_dict().items()}
    say(event="end", digest=digest, draw=torch.rand(1).item())
    if options.get("close", "1") == "1":
        checkpointer.close()
        say(event="closed")
    for _ in range(int(options.get("again", "0"))):
        with easyckpt.Checkpointer(root) as checkpointer:
            say(event="again", step=checkpointer.load(state), tier=checkpointer.restored_from)
    if store is not None:
        time.sleep(0.5)  # the other ranks may still be asking it


def generation_of(checkpointer: easyckpt.Checkpointer) -> int:
    mooring = checkpointer._mooring
    assert mooring is not None
    return mooring.seat.generation


def host_store() -> Any:
    """What init_process_group or the launcher does."""
    return torch.distributed.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False
    )


def die_in_copy(step: int) -> None:
    """Write rubbish over half of the slot, then die."""
    write_plain = stager.write_plain

    def half(slot: Any, layout: Any, plain: bytes) -> None:
        if plain.find(b"\xa5count" + bytes([step])) >= 0:
            slot[: layout.body_bytes // 2] = b"\xee" * (layout.body_bytes // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        write_plain(slot, layout, plain)

    stager.write_plain = half


if __name__ == "__main__":
    main()
