"""What starts again after a failure, with real processes: one node's workers where the job declares that."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.runs import Run, free_port, script, start_run, until

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
    until(lambda: all(reached(run, 3) for run in runs), "both nodes train")
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
