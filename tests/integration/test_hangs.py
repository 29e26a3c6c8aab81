"""Workers that stop making steps, in each way that can be told from outside; nothing in the script helps.

One job suffers one hang after the other, since most of a run's time goes into its start.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import Run, script, start_run

TRAIN = """
import ctypes, os, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["AIMASTER_GENERATION"]) - 1
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
ways = os.environ["HOW"].split(",")
how = ways[attempt] if attempt < len(ways) else ""
begin = 120 if "sleep" in ways else 20  # work has a narrow limit only when the pace is known well
for step in range(10 * len(ways) + begin):
    if rank == 1 and step == begin + 10 * attempt:  # each attempt gets further than the one before
        if how == "recv":
            dist.recv(torch.zeros(4), src=0)
        if how == "gil":
            ctypes.PyDLL(None).sleep(3600)
        if how == "stop":
            os.kill(os.getpid(), 19)
        if how == "loader":
            lock = threading.Lock()
            class Data(torch.utils.data.Dataset):
                def __len__(self): return 8
                def __getitem__(self, index):
                    with lock:
                        return index
            lock.acquire()  # held by nobody in the worker that is forked now
            next(iter(torch.utils.data.DataLoader(Data(), num_workers=1)))
        if how == "sleep":
            time.sleep(3600)
    loss = model(torch.randn(4, 8)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    time.sleep(0.05)
os.write(1, f"done {rank}\\n".encode())  # one write: the ranks share a stream
dist.destroy_process_group()
"""


def hung(run: Run, *, ranks: int = 2) -> list[tuple[str, str]]:
    """Kinds and culprits of the hangs of a job that has ended well, by its journal."""
    from aimaster.core.events import WorkersHung
    from aimaster.journal.sqlite import SqliteJournal

    assert run.wait(170) == 0, run.stderr
    done = sorted(line for line in run.stdout.splitlines() if "done" in line)
    assert done == [f"done {rank}" for rank in range(ranks)]
    (path,) = Path(run.env["XDG_STATE_HOME"]).glob("aimaster/*/journal.db")
    with SqliteJournal.read(path) as journal:
        events = [entry.record.event for entry in journal.entries()]
    return [
        (event.kind.value, ",".join(map(str, event.culprits)))
        for event in events
        if isinstance(event, WorkersHung)
    ]


def explained(run: Run, number: int) -> dict[str, Any]:
    """One incident as `aimaster explain` tells it after the job's end."""
    words = ["aimaster", "explain", str(number), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env=run.env, timeout=120, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "found"),
    [
        pytest.param("stop,recv", [("stopped", "1"), ("deadlock", "")], id="stopped, mismatched"),
        pytest.param("gil,loader", [("stuck", "1"), ("stuck", "1")], id="interpreter, data worker"),
        pytest.param("sleep", [("busy", "1")], id="work without an end"),
    ],
)
def test_every_hang_is_found_and_its_culprit_named(
    tmp_path: Path, how: str, found: list[tuple[str, str]]
) -> None:
    words = ("--hang-busy-timeout", "8", "--nproc-per-node", "2")
    run = start_run(tmp_path, *words, script(tmp_path, TRAIN), env={"HOW": how})
    assert hung(run) == found
    for number, (_, culprit) in enumerate(found, start=1):
        told = explained(run, number)
        assert told["who"].startswith(f"rank {culprit} on " if culprit else "nobody can be blamed")
        evidence = "\n".join(told["evidence"])
        assert re.search(r"rank 0: idle, waits: collective, in all_reduce #\d+\n    _engine_run", evidence)
        assert re.search(r"rank 1: .*\n    \S+ \(", evidence), "the culprit's stack"
        assert min(told["rule"], told["decision"], told["do"]) != ""


@pytest.mark.slow
def test_of_three_ranks_the_one_that_waits_for_something_else_is_named(tmp_path: Path) -> None:
    run = start_run(tmp_path, "--nproc-per-node", "3", script(tmp_path, TRAIN), env={"HOW": "recv"})
    assert hung(run, ranks=3) == [("deadlock", "1")]
    told = explained(run, 1)
    assert told["who"].startswith("rank 1 on ")
    groups = {group["ranks"]: group for group in told["incident"]["hang"]["groups"]}
    assert set(groups) == {"0,2", "1"}
    assert re.fullmatch(r"all_reduce #\d+", groups["0,2"]["collective"])
    assert groups["1"]["where"].startswith("recv ")
    assert re.fullmatch(r"after all_reduce #\d+", groups["1"]["collective"])


@pytest.mark.slow
def test_a_stopped_rank_behind_torchrun_is_found(tmp_path: Path) -> None:
    inner = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script(tmp_path, TRAIN))
    run = start_run(tmp_path, "--", *inner, env={"HOW": "stop"})
    assert hung(run) == [("stopped", "1")]
