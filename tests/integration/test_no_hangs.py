"""What looks like a hang and is none: real processes and short limits; longer ones are in virtual time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.runs import Run, script, start_run, until

LIMITS = ("--hang-timeout", "2", "--hang-busy-timeout", "20", "--nproc-per-node", "2")
HEAD = """
import os, socket, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
def steps(count):
    for _ in range(count):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()
        time.sleep(0.05)
def say(what):
    if rank == 0:
        print(what, flush=True)
def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(100, 100) @ torch.randn(100, 100)
"""
HONEST = (
    HEAD
    + """
if rank == 1:
    compute(4)                                    # one rank is late before the first step
steps(60)
if rank == 0:
    compute(4)                                    # an evaluation on rank 0
steps(20)
if rank == 0:
    here, there = socket.socketpair()
    threading.Timer(4, there.send, (b"x",)).start()
    here.recv(1)                                  # an upload that waits for its server
steps(20)
if rank == 0:
    with open(os.environ["TMP_FILE"], "wb") as file:
        for _ in range(20):
            file.write(os.urandom(100_000)); file.flush(); os.fsync(file.fileno()); time.sleep(0.2)
for accumulated in range(2):
    for _ in range(20):
        with model.no_sync():
            model(torch.randn(4, 8)).sum().backward()
        time.sleep(0.1)
    steps(1)
if rank == 0:
    time.sleep(4)                                 # finishes after the others
say("done")
dist.destroy_process_group()
"""
)


def incidents(run: Run) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.status().get("incidents", [])
    return found


def explain(run: Run) -> str:
    words = ["aimaster", "explain"]
    done = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, env=run.env, timeout=120, check=True
    )
    return done.stdout


@pytest.mark.slow
def test_honest_work_of_one_rank_is_left_alone(tmp_path: Path) -> None:
    env = {"TMP_FILE": str(tmp_path / "saved")}
    run = start_run(tmp_path, *LIMITS, script(tmp_path, HONEST), env=env)
    assert run.wait() == 0, run.stderr
    assert run.stdout.splitlines() == ["done"]
    assert "no incident" in explain(run)


@pytest.mark.slow
def test_a_person_at_a_breakpoint_is_left_alone(tmp_path: Path) -> None:
    text = HEAD + "steps(60)\nif rank == 0:\n    say('here')\n    breakpoint()\nsteps(10)\nsay('done')\n"
    words = ("--hang-timeout", "2", "--hang-busy-timeout", "4", "--nproc-per-node", "2")
    run = start_run(tmp_path, *words, script(tmp_path, text), stdin=subprocess.PIPE)
    until(lambda: "here" in run.stdout, "it stops at the prompt")

    def blind() -> bool:
        status = run.status()
        ages = [r["sight"]["still_s"] for n in status.get("nodes", ()) for r in n["ranks"] if r["sight"]]
        return "debugger" in (status.get("hang") or {}).get("blind", "") and min(ages, default=0.0) > 8

    until(blind, "the status says why nobody is judged, long after the limit")
    assert incidents(run) == []
    assert run.process.stdin is not None
    run.process.stdin.write(b"c\n")
    run.process.stdin.close()
    assert run.wait() == 0, run.stderr


@pytest.mark.slow
def test_a_machine_that_is_paused_is_no_hang(tmp_path: Path) -> None:
    text = HEAD + "steps(60)\nsay('here')\nsteps(100)\nsay('done')\n"
    run = start_run(tmp_path, *LIMITS, script(tmp_path, text))
    until(lambda: "here" in run.stdout, "it trains")
    everyone = [psutil.Process(run.process.pid)]
    everyone += everyone[0].children(recursive=True)
    for process in everyone:
        process.send_signal(signal.SIGSTOP)
    resumed_s = time.monotonic() + 6
    until(lambda: time.monotonic() > resumed_s, "a pause of three times the limit")
    for process in everyone:
        process.send_signal(signal.SIGCONT)
    assert run.wait() == 0, run.stderr
    assert "done" in run.stdout
    assert "no incident" in explain(run)


@pytest.mark.slow
def test_a_rank_that_does_nothing_after_the_others_have_finished_ends_the_job(tmp_path: Path) -> None:
    text = HEAD + "steps(40)\nif rank == 1:\n    print(os.getpid(), flush=True)\n    time.sleep(3600)\n"
    words = ("--hang-exit-timeout", "4", "--nproc-per-node", "2")
    run = start_run(tmp_path, *words, script(tmp_path, text))
    assert run.wait() == 20, run.stderr
    assert "all other ranks have finished" in run.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(run.stdout.split()[0]), 0)
