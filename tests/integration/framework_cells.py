"""Runs cells: a few ranks each, forked from one process that has imported the frameworks. Started by tests.

    framework_cells.py FOLDER        reads one cell a line on stdin (JSON), answers with one line each

A cell is ``{"kind", "dtype", "ranks", "job", "root", "do", …}``. Its ranks are children of this process, so
that their saver, which belongs to the launcher and the job's name, is found again by the next cell of that
job: with another number of ranks, or another framework. ``do`` is one of

* ``save``: train ``steps``, save, write the logical tensors to ``expect``;
* ``load``: another training loads and compares with ``expect``; ``close`` ends the saver;
* ``run``: train to ``steps`` from wherever the newest checkpoint is, saving each; with ``kill`` rank
  ``victim`` ends itself with SIGKILL in that step; at the end the logical tensors go to ``expect``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import easyckpt
from tests.integration.frameworks import Training


def run_rank(cell: dict[str, Any], rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(cell["ranks"]), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=cell["job"], LOCAL_WORLD_SIZE=str(cell["ranks"]),
    )  # fmt: skip
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    training = Training(cell["kind"], cell.get("dtype", "float32"), seed=cell.get("seed", 1))
    checkpointer = easyckpt.Checkpointer(cell["root"])
    if cell["do"] == "load":
        training.step()  # other values everywhere, and moments of its own
        training.state["step"] = -1
    start = checkpointer.load(training.state)
    if cell["do"] == "load":
        expected = torch.load(cell["expect"], weights_only=True)
        got = training.logical()
        assert start == int(expected["step"]), f"step {start} was loaded"
        assert set(got) == set(expected), sorted(set(got) ^ set(expected))
        wrong = [name for name in expected if not torch.equal(got[name], expected[name])]
        assert not wrong, f"differ: {wrong}"
        late = time.monotonic() > cell["lingers_until"]  # a very busy machine: the memory may be gone
        tiers = {cell["tier"], "disk"} if late else {cell["tier"]}
        assert checkpointer.restored_from in tiers, checkpointer.restored_from
        training.step()
    else:
        for step in range(start or 0, cell["steps"]):
            if cell.get("kill") == step and cell.get("victim") == rank:
                os.kill(os.getpid(), signal.SIGKILL)
            training.step()
            if cell["do"] == "run" or step + 1 == cell["steps"]:
                handle = checkpointer.save(training.state, step=step + 1, block=True)
        if start != cell["steps"]:
            handle.wait("durable" if cell["do"] == "save" else "memory", timeout=120)
        found = training.logical()
        if rank == 0:
            torch.save(found, cell["expect"])
    if cell.get("close"):
        checkpointer.close()
    dist.barrier()


def start_rank(cell: dict[str, Any], rank: int, *, port: int, log: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        run_rank(cell, rank, port)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def run_cell(cell: dict[str, Any], log: Path) -> str:
    """Empty if all went well, else what the ranks said."""
    log.write_text("")
    port = free_port()
    ranks = [start_rank(cell, rank, port=port, log=log) for rank in range(cell["ranks"])]
    left = set(ranks)
    codes = {}
    while left:
        pid, status = os.wait()
        if pid in left:
            left.discard(pid)
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid]:  # as a launcher does: the others would wait for it
                for other in left:
                    os.kill(other, signal.SIGKILL)
    expected = {ranks[cell["victim"]]: -signal.SIGKILL} if "kill" in cell else {}
    if "kill" in cell and codes[ranks[cell["victim"]]] == -signal.SIGKILL:
        return ""
    if any(code for pid, code in codes.items() if pid not in expected):
        return f"{codes}\n{log.read_text()[-6000:]}"
    return ""


def main() -> None:
    folder = Path(sys.argv[1])
    for number, line in enumerate(sys.stdin):
        error = run_cell(json.loads(line), folder / f"cell{number}.log")
        print(json.dumps(error), flush=True)


if __name__ == "__main__":
    main()
