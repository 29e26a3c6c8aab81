"""What starts again after a failure, with real processes: one node's workers where the job declares that."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.runs import Run, free_port, script, start_run, until
from tests.workers import run_agent

OWN_WORLD = """
import os, time
from pathlib import Path
import torch, torch.distributed as dist
import easyckpt
dist.init_process_group("gloo")
ck = easyckpt.Checkpointer(os.environ["EASYCKPT_DIR"])
state = {"total": torch.zeros(1)}
step = ck.load(state) or 0
names = ("GROUP_RANK", "RANK", "WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
told = " ".join(os.environ[name] for name in names)
os.write(1, f"start {told} pid {os.getpid()} step {step}\\n".encode())
while True:
    step += 1
    over = torch.tensor([float(Path("end").exists())])
    dist.all_reduce(over)
    state["total"] += 1
    ck.save(state, step=step, block=True)
    os.write(1, f"step {step}\\n".encode())
    if over:
        break
    time.sleep(0.05)
ck.close()
dist.destroy_process_group()
"""


def starts(run: Run) -> list[list[str]]:
    return [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("start ")]


def reached(run: Run, step: int) -> bool:
    assert run.process.poll() is None, run.stdout + run.stderr
    return f"step {step}\n" in run.stdout


@pytest.mark.slow
def test_a_killed_worker_restarts_its_node_and_the_other_node_goes_on(tmp_path: Path) -> None:
    port = free_port()
    runs = []
    for name in ("n1", "n2"):
        runs.append(
            start_run(
                tmp_path, "--nnodes", "2", "--nproc-per-node", "2", "--restart-scope", "node",
                "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"job-{port}", "--node-id", name,
                "--sanity-check", "off", "--ckpt-dir", tmp_path / "ckpt", script(tmp_path, OWN_WORLD),
                name=name, env={"XDG_STATE_HOME": str(tmp_path / f"state-{name}")},
            )
        )  # fmt: skip
        until(lambda: runs[0].pids("agent"), "the master answers")
    first, second = runs
    until(lambda: all(reached(run, 6) for run in runs), "both nodes train")
    before = first.pids("worker", node="n1")
    os.kill(first.pids("worker", node="n2")[0], signal.SIGKILL)
    until(lambda: len(starts(second)) == 4, "the second node starts again")
    assert first.status()["phase"] == "running"
    assert first.pids("worker", node="n1") == before
    (tmp_path / "end").touch()
    assert [run.wait() for run in runs] == [0, 0], first.stderr + second.stderr
    ranks = [told[:6] for told in starts(first)]
    assert sorted(ranks) == [["0", "0", "2", "0", "4", "0"], ["0", "1", "2", "1", "4", "0"]]
    again = [told for told in starts(second) if told[5] == "1"]
    assert sorted(told[:6] for told in again) == [
        ["1", "0", "2", "2", "4", "1"],
        ["1", "1", "2", "3", "4", "1"],
    ]
    # It continues from its own checkpoint, which lies apart from the other node's.
    assert all(int(told[-1]) >= 3 for told in again)
    assert sorted(path.name for path in (tmp_path / "ckpt").iterdir()) == ["node0", "node1"]


LOOP = """
import hashlib, os, time
from pathlib import Path
import torch, torch.distributed as dist
import easyckpt
from aimaster.worker import loop
held = torch.randn(1000, generator=torch.Generator().manual_seed(os.getpid()))
calls = 0
def train():
    global calls
    calls += 1
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    with easyckpt.Checkpointer(os.environ["EASYCKPT_DIR"]) as ck:
        state = {"model": model, "optimizer": optimizer}
        step = ck.load(state) or 0
        told = [os.environ[n] for n in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")]
        memory = hashlib.sha256(held.numpy().tobytes()).hexdigest()[:8]
        os.write(1, f"start {' '.join(told)} pid {os.getpid()} calls {calls} held {memory}\\n".encode())
        while step < 2000:
            over = torch.tensor([float(Path("end").exists())])
            dist.all_reduce(over)
            if over:
                break
            torch.manual_seed(step + 1000 * dist.get_rank())
            loss = model(torch.randn(4, 8)).pow(2).mean()
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            step += 1
            ck.save(state, step=step)
            if dist.get_rank() == 0:
                os.write(1, f"step {step}\\n".encode())
            if Path(f"fail{dist.get_rank()}").exists():
                Path(f"fail{dist.get_rank()}").unlink()
                raise ValueError("this rank's own mistake")
            time.sleep(0.05)
    dist.destroy_process_group()
loop(train)
"""


def after(run: Run, attempt: int) -> dict[str, tuple[str, int, str]]:
    """By rank the process, how often it has called train, and what it holds, once all three train."""
    until(lambda: len(starts(run)) >= 3 * (attempt + 1), f"all three train in attempt {attempt}")
    assert run.process.poll() is None
    told = [line for line in starts(run) if line[2] == str(attempt)]
    assert sorted(line[0] for line in told) == ["0", "1", "2"]
    return {line[0]: (line[4], int(line[6]), line[8]) for line in told}


@pytest.mark.slow
def test_survivors_keep_their_process_and_memory(tmp_path: Path) -> None:
    """Gloo misses the end of a peer now and then (see the how-to page): then a survivor is started anew, and
    the test looks at the next failure."""
    run = start_run(
        tmp_path, "--nproc-per-node", "3", "--ckpt-dir", tmp_path / "ckpt", script(tmp_path, LOOP)
    )
    until(lambda: reached(run, 5), "five steps")
    before, stayed = after(run, 0), []
    for attempt in range(1, 6):
        if attempt == 1:
            (tmp_path / "fail1").touch()  # an exception of its own
        else:
            os.kill(int(before["0"][0]), signal.SIGKILL)  # the one that holds the store
        now = after(run, attempt)
        failed = "1" if attempt == 1 else "0"
        assert now[failed][0] != before[failed][0]
        for rank in {"0", "1", "2"} - {failed}:
            pid, calls, held = before[rank]
            kept = now[rank] == (pid, calls + 1, held)
            assert kept or now[rank][0] != pid, (now, before)
            stayed.append(kept)
        before = now
        if attempt > 1 and all(stayed[-2:]):
            break
    (tmp_path / "end").touch()
    assert run.wait() == 0, run.stderr
    assert all(stayed[-2:]), run.stderr
    assert "this rank's own mistake" in run.stderr


STAYS = """
import os, sys, time
import torch
from aimaster.worker import loop
calls = 0
weight = torch.nn.Parameter(torch.zeros(1))
weight.grad = torch.ones(1)
optimizer = torch.optim.SGD([weight], 0.1)
def train():
    global calls
    calls += 1
    with open(f"{sys.argv[1]}/up", "a") as file:
        file.write(f"{os.environ['RANK']} {os.getpid()} {calls}\\n")
    while True:
        optimizer.step()
        time.sleep(0.01)
loop(train) if os.environ["RANK"] == "0" else train()
"""


def test_a_worker_that_knows_nothing_of_loop_is_started_anew_beside_one_that_stays(tmp_path: Path) -> None:
    actions: list[dict[str, object]] = [
        {"start": {}},
        {"steps": 1},
        {"stop_but": 60.0},
        {"start": {}},
        {"steps": 1},
        {"stop": 0.5},
    ]
    path = script(tmp_path, STAYS)
    run = run_agent(
        tmp_path / "agent", target=str(path), args=[str(tmp_path)], actions=actions, nproc=2, loop=True
    )
    before, after = run.seen[0]["start"]["pids"], run.seen[3]["start"]["pids"]
    assert run.seen[2]["stop_but"]["stayed"] == 1
    assert run.seen[2]["stop_but"]["unkillable"] == []
    assert before[0] in after
    assert before[1] not in after
    ups = [line.split() for line in (tmp_path / "up").read_text().splitlines()]
    assert sorted((rank, calls) for rank, _, calls in ups) == [("0", "1"), ("0", "2"), ("1", "1"), ("1", "1")]
