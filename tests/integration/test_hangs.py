"""Workers that stop making steps, in each way that can be told from outside; nothing in the script helps."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.runs import Run, script, start_run, until

TRAIN = """
import ctypes, os, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, first = dist.get_rank(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
HOW = os.environ["HOW"]
for step in range(60):
    if first and rank == 1 and step == 30:
        print("hurt", os.getpid(), flush=True)
        if HOW == "recv":
            dist.recv(torch.zeros(4), src=0)
        if HOW == "gil":
            ctypes.PyDLL(None).sleep(3600)
        if HOW == "stop":
            os.kill(os.getpid(), 19)
        if HOW == "loader":
            lock = threading.Lock()
            class Data(torch.utils.data.Dataset):
                def __len__(self): return 8
                def __getitem__(self, index):
                    with lock:
                        return index
            lock.acquire()  # held by nobody in the worker that is forked now
            next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
        if HOW == "sleep":
            time.sleep(3600)
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.05)
print("done", rank, flush=True)
dist.destroy_process_group()
"""


def finish(run: Run) -> dict[str, Any]:
    """Wait for the incident and for the end; the incident as status told it."""

    def hung() -> list[dict[str, Any]]:
        return [i for i in run.status().get("incidents", []) if i["kind"] == "worker_hung"]

    (incident,) = until(hung, "the hang is found")
    assert run.wait() == 0, run.stderr
    assert sorted(line for line in run.stdout.splitlines() if "done" in line) == ["done 0", "done 1"]
    return incident


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "culprit"),
    [
        pytest.param("stop", 1, id="stopped"),
        pytest.param("recv", None, id="mismatched collectives"),
        pytest.param("gil", 1, id="interpreter held by a call that never returns"),
        pytest.param("loader", 1, id="data worker in a lock of its parent"),
    ],
)
def test_what_cannot_end_by_itself_is_found_and_started_again(
    tmp_path: Path, how: str, culprit: int | None
) -> None:
    run = start_run(tmp_path, "--nproc-per-node", "2", script(tmp_path, TRAIN), env={"HOW": how})
    incident = finish(run)
    assert incident["rank"] == culprit


@pytest.mark.slow
def test_work_that_never_ends_has_a_limit_of_its_own(tmp_path: Path) -> None:
    words = ("--hang-busy-timeout", "10", "--nproc-per-node", "2")
    run = start_run(tmp_path, *words, script(tmp_path, TRAIN), env={"HOW": "sleep"})
    incident = finish(run)
    assert incident["rank"] == 1


@pytest.mark.slow
def test_a_stopped_rank_behind_torchrun_is_found(tmp_path: Path) -> None:
    inner = (
        "torchrun",
        "--nproc-per-node",
        "2",
        script(
            tmp_path,
            TRAIN.replace('["TORCHELASTIC_RESTART_COUNT"]', '["AIMASTER_GENERATION"]').replace(
                '== "0"', '== "1"'
            ),
        ),
    )
    run = start_run(tmp_path, "--", *inner, env={"HOW": "stop"})
    assert finish(run)["rank"] == 1


@pytest.mark.slow
def test_with_detection_off_nobody_is_touched(tmp_path: Path) -> None:
    words = ("--no-hang-detection", "--nproc-per-node", "2")
    run = start_run(tmp_path, *words, script(tmp_path, TRAIN), env={"HOW": "stop"})
    line = until(lambda: [x for x in run.stdout.splitlines() if x.startswith("hurt")], "it stops")[0]
    ages = until(
        lambda: [
            r["sight"]["still_s"]
            for n in run.status().get("nodes", [])
            for r in n["ranks"]
            if r["sight"] and r["sight"]["activity"] == "stopped" and r["sight"]["still_s"] > 8
        ],
        "it stands still for longer than the limit",
    )
    assert ages
    assert run.status()["incidents"] == []
    os.kill(int(line.split()[1]), signal.SIGCONT)
    assert run.wait() == 0, run.stderr
