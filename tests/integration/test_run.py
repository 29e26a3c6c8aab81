"""`aimaster run` on one node, as a user of torchrun meets it: output, exit codes, restarts, no leftovers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import DEADLINE_S, alive, below, free_port, script, start_run, until

GLOO = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(x)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
os.write(1, f"rank {dist.get_rank()} sum {x.item()} attempt {attempt}\\n".encode())
if attempt < int(os.environ.get("KILLS", "0")) and dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
dist.barrier()
dist.destroy_process_group()
"""
WAIT = """
import os, sys, time
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def test_script_ends_well_and_nothing_is_left(tmp_path: Path) -> None:
    run = start_run(tmp_path, "--nproc-per-node", "2", script(tmp_path, GLOO))
    assert run.wait() == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["rank 0 sum 3.0 attempt 0", "rank 1 sum 3.0 attempt 0"]
    assert below(run.run_dir) == []


@pytest.mark.slow
def test_killed_workers_are_started_again_until_the_script_ends(tmp_path: Path) -> None:
    run = start_run(tmp_path, "--nproc-per-node", "2", script(tmp_path, GLOO), env={"KILLS": "2"})
    assert run.wait() == 0, run.stderr
    seen = [line for line in run.stdout.splitlines() if line.startswith("rank 0")]
    assert seen == [f"rank 0 sum 3.0 attempt {attempt}" for attempt in range(3)]
    assert below(run.run_dir) == []


def test_same_error_twice_ends_with_20_and_the_users_own_traceback(tmp_path: Path) -> None:
    path = script(tmp_path, "raise ValueError('no such luck')\n")
    run = start_run(tmp_path, path)
    assert run.wait() == 20
    assert run.stderr.count("ValueError: no such luck") >= 2
    assert "/aimaster/" not in run.stderr.replace(str(tmp_path), "")
    assert below(run.run_dir) == []


def test_no_restarts_allowed_ends_at_the_first_failure(tmp_path: Path) -> None:
    run = start_run(tmp_path, "--max-restarts", "0", script(tmp_path, "import sys; sys.exit(7)\n"))
    assert run.wait() == 20
    assert "exit code 7" in run.stderr


def test_a_policy_of_ones_own_decides(tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text("worker_failures: {limit: 0}\n")
    run = start_run(tmp_path, "--policy", str(policy), script(tmp_path, "import sys; sys.exit(7)\n"))
    assert run.wait() == 21, run.stderr
    assert "worker_failed" in run.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="ctrl-c"),
        pytest.param(signal.SIGTERM, 10, id="sigterm"),
        pytest.param(signal.SIGUSR1, 10, id="sigusr1", marks=pytest.mark.slow),
    ],
)
def test_signal_ends_agent_and_workers(tmp_path: Path, number: signal.Signals, code: int) -> None:
    run = start_run(tmp_path, script(tmp_path, WAIT))
    line = until(lambda: run.stdout, "the worker runs")
    run.send(number)
    assert run.wait() == code, run.stderr
    assert not alive(int(line.split()[1]))
    assert below(run.run_dir) == []


@pytest.mark.slow
def test_second_signal_ends_at_once_even_if_the_worker_will_not(tmp_path: Path) -> None:
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WAIT
    run = start_run(tmp_path, "--saver-linger", "1", script(tmp_path, stubborn))
    line = until(lambda: run.stdout, "the worker runs")
    run.send(signal.SIGINT)
    until(lambda: "stopped by" in run.stderr or "stopping the job" in run.stderr, "the first one is taken")
    run.send(signal.SIGINT)
    assert run.wait() == 130
    until(lambda: not alive(int(line.split()[1])), "the worker ends with its agent")
    until(lambda: below(run.run_dir) == [], "the saver sweeps up at its end")


@pytest.mark.slow
def test_hangup_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    path = script(tmp_path, WAIT.replace("600", "3"))
    run = start_run(tmp_path, path, prefix=("nohup",))
    until(lambda: run.stdout, "the worker runs")
    run.send(signal.SIGHUP)
    assert run.wait() == 0, run.stderr


def test_pipe_to_another_program_ends_with_the_run(tmp_path: Path) -> None:
    path = script(tmp_path, "print('{\"a\": 1}')\n")
    words = f"{sys.executable} -m aimaster run --run-dir {tmp_path / 'node'} {path} | cat"
    done = subprocess.run(
        ["bash", "-c", words],
        capture_output=True,
        timeout=DEADLINE_S,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        check=False,
    )
    assert done.stdout == b'{"a": 1}\n', done.stderr


def test_stdin_reaches_the_script(tmp_path: Path) -> None:
    with (tmp_path / "input").open("w+b") as given:
        given.write(b"some words\n")
        given.seek(0)
        run = start_run(tmp_path, script(tmp_path, "print(input().upper())\n"), stdin=given)
        assert run.wait() == 0, run.stderr
    assert run.stdout == "SOME WORDS\n"


@pytest.mark.slow
def test_two_jobs_on_one_host_do_not_meet(tmp_path: Path) -> None:
    path = script(tmp_path, GLOO)
    runs = [start_run(tmp_path, "--nproc-per-node", "2", path, name=name) for name in ("one", "two")]
    for run in runs:
        assert run.wait() == 0, run.stderr
        assert len(run.stdout.splitlines()) == 2


@pytest.mark.slow
def test_port_of_a_stranger_is_named(tmp_path: Path) -> None:
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        port = stranger.getsockname()[1]
        run = start_run(
            tmp_path, "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{port}", "--sanity-check", "off",
            "--rdzv-conf", "join_timeout=4", script(tmp_path, GLOO),
        )  # fmt: skip
        assert run.wait() == 3
    assert f"says nothing): 127.0.0.1:{port}" in run.stderr
    assert "Traceback" not in run.stderr
    assert below(run.run_dir) == []


@pytest.mark.slow
def test_master_that_never_answers_is_given_up(tmp_path: Path) -> None:
    run = start_run(
        tmp_path, "--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--sanity-check", "off",
        "--rdzv-conf", "join_timeout=3,is_host=0", script(tmp_path, GLOO),
    )  # fmt: skip
    assert run.wait() == 3
    assert "did not answer within 3 s" in run.stderr
    assert "--rdzv-endpoint" in run.stderr
    assert below(run.run_dir) == []


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_command_of_another_launcher_runs_as_it_is(tmp_path: Path, launcher: str) -> None:
    path = script(tmp_path, "import os\nos.write(1, f\"{os.environ.get('WORLD_SIZE')}\\n\".encode())\n")
    words = {
        "python": ("--", sys.executable, path),
        "torchrun": ("--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", path),
    }[launcher]
    run = start_run(tmp_path, *words)
    assert run.wait() == 0, run.stderr
    assert run.stdout.split() == {"python": ["None"], "torchrun": ["2", "2"]}[launcher]
    assert below(run.run_dir) == []
