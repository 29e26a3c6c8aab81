"""Kill one process of a running job: the training ends with the weights of an undisturbed run.

The script trains on gloo with easyckpt and saves each step. What ends is compared by digest with a run of one
process that nobody touched, so that a step trained twice, skipped or resumed from wrong values shows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aimaster.core.goodput import Phase
from aimaster.journal.sqlite import SqliteJournal
from aimaster.journal.times import spans
from tests.runs import Run, alive, below, free_port, script, start_run, until

TRAIN = """
import hashlib, os, sys, time
import torch, torch.distributed as dist
import easyckpt
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
torch.manual_seed(1 + dist.get_rank())
ck = easyckpt.Checkpointer(os.environ["EASYCKPT_DIR"])
state = {"model": model, "optimizer": optimizer, "rng": easyckpt.RNG()}
step = ck.load(state) or 0
steps, pause = int(sys.argv[1]), float(sys.argv[2])
while step < steps:
    loss = model(torch.randn(8, 32)).pow(2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    step += 1
    ck.save(state, step=step)
    if dist.get_rank() == 0:
        os.write(1, f"step {step} generation {os.environ['AIMASTER_GENERATION']}\\n".encode())
    time.sleep(pause)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
if dist.get_rank() == 0:
    os.write(1, f"weights {hashlib.sha256(weights).hexdigest()}\\n".encode())
ck.close()
dist.destroy_process_group()
"""
STEPS = 60
PAUSE_S = 0.1

pytestmark = pytest.mark.slow


def weights(run: Run) -> str:
    found = [line.split()[1] for line in run.stdout.splitlines() if line.startswith("weights ")]
    assert len(found) == 1, run.stdout + run.stderr
    return found[0]


def steps_of(run: Run) -> list[int]:
    return [int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("step ")]


def reached(run: Run, step: int) -> bool:
    assert run.process.poll() is None, run.stdout + run.stderr
    return bool(steps_of(run)) and steps_of(run)[-1] >= step


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    run = start_run(
        folder, "--nproc-per-node", "2", "--ckpt-dir", folder / "ckpt", script(folder, TRAIN), str(STEPS), "0"
    )
    assert run.wait() == 0, run.stderr
    return weights(run)


def two_workers(folder: Path, *flags: str) -> Run:
    return start_run(
        folder, "--nproc-per-node", "2", "--ckpt-dir", folder / "ckpt", *flags,
        script(folder, TRAIN), str(STEPS), str(PAUSE_S),
    )  # fmt: skip


def two_nodes_and_a_spare(folder: Path) -> list[Run]:
    port = free_port()
    runs = []
    for name in ("n1", "n2", "n3"):
        runs.append(
            start_run(
                folder, "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", f"job-{port}",
                "--node-id", name, "--sanity-check", "off", "--ckpt-dir", folder / "ckpt",
                "--saver-linger", "5", script(folder, TRAIN), str(STEPS), str(PAUSE_S),
                name=name, env={"XDG_STATE_HOME": str(folder / f"state-{name}")},
            )
        )  # fmt: skip
        if name == "n1":
            until(lambda: runs[0].pids("agent"), "the master answers")
        elif name == "n2":
            until(lambda: len(runs[0].pids("worker")) == 2, "two nodes have formed a generation")
    return runs


def check_account(folder: Path, *, attempts: int) -> None:
    """Where the time went, by the journal: all of it is known, and training stopped only where it had to."""
    (path,) = (folder / "state").rglob("journal.db")
    with SqliteJournal.read(path) as journal:
        entries = tuple(journal.entries())
    kept = spans(entries)
    wall_s = entries[-1].record.at_s - entries[0].record.at_s
    known_s = sum(span.end_s - span.begin_s for span in kept if span.phase is not Phase.UNKNOWN)
    assert 0.98 * wall_s <= known_s <= wall_s + 1e-6
    assert len([span for span in kept if span.phase is Phase.TRAINING]) == attempts
    assert any(span.phase is Phase.STALL for span in kept), "saving has held the training a little"


@pytest.mark.parametrize("role", ["worker", "saver", "master", "template"])
def test_one_process_of_a_node_is_killed(tmp_path: Path, undisturbed: str, role: str) -> None:
    run = two_workers(tmp_path)
    until(lambda: reached(run, 15), "15 steps")
    os.kill(run.pids(role)[-1], signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    assert weights(run) == undisturbed
    again = len(steps_of(run)) - STEPS
    assert 0 <= again <= 1 if role == "worker" else again == 0
    assert below(run.run_dir) == []
    check_account(tmp_path, attempts=2 if role == "worker" else 1)


def test_agent_is_killed_and_the_next_one_adopts_its_saver(tmp_path: Path, undisturbed: str) -> None:
    run = two_workers(tmp_path, "--rdzv-id", "kept", "--node-id", "n", "--saver-linger", "30")
    until(lambda: reached(run, 15), "15 steps")
    workers, saver = run.pids("worker"), run.pids("saver")[0]
    run.process.kill()
    run.process.wait()
    until(lambda: not any(alive(pid) for pid in workers), "workers end with their agent")
    assert alive(saver)
    seen = steps_of(run)[-1]
    again = two_workers(tmp_path, "--rdzv-id", "kept", "--node-id", "n", "--saver-linger", "30")
    assert again.wait() == 0, again.stderr
    assert f"pid {saver}" in again.stderr
    # Nothing is done anew; the last lines may have died with the agent, which passes them on.
    assert seen <= steps_of(again)[0] <= seen + 5
    assert weights(again) == undisturbed
    assert not alive(saver)
    assert below(again.run_dir) == []


def test_agent_is_killed_and_nobody_comes_back(tmp_path: Path) -> None:
    run = two_workers(tmp_path, "--saver-linger", "1")
    until(lambda: reached(run, 15), "15 steps")
    saver = run.pids("saver")[0]
    run.process.kill()
    run.process.wait()
    until(lambda: not alive(saver) and below(run.run_dir) == [], "the saver ends and sweeps up")
    words = [sys.executable, "-m", "easyckpt.cli", "verify", str(tmp_path / "ckpt")]
    newest = subprocess.run(words, capture_output=True, check=False)
    assert newest.returncode == 0, newest.stderr


def test_node_is_lost_and_the_spare_takes_its_place(tmp_path: Path, undisturbed: str) -> None:
    first, second, spare = two_nodes_and_a_spare(tmp_path)
    until(lambda: reached(first, 15), "15 steps")
    for pid in [row["pid"] for row in first.status()["processes"] if row["node"] == "n2"]:
        os.kill(pid, signal.SIGKILL)
    second.process.wait()
    assert first.wait() == 0, first.stderr
    assert spare.wait() == 0, spare.stderr
    assert weights(first) == undisturbed
    assert 0 <= len(steps_of(first)) - STEPS <= 1


def test_stopped_node_comes_back_and_is_a_spare(tmp_path: Path, undisturbed: str) -> None:
    first, second, spare = two_nodes_and_a_spare(tmp_path)
    until(lambda: reached(first, 15), "15 steps")
    pids = [row["pid"] for row in first.status()["processes"] if row["node"] == "n2"]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: len(first.status()["incidents"]) == 1, "the node is given up")
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    for run in (first, second, spare):
        assert run.wait() == 0, run.stderr
    assert weights(first) == undisturbed
