"""`aimaster run` on hosts of their own: a host that loses power, one whose cable is pulled, a frozen one.

Each host is a network namespace with its own address, so the agents, savers and workers of different hosts
speak to each other as on a real network, with a secret, and a lost host is really gone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster, Host

pytestmark = [pytest.mark.netns, pytest.mark.slow, pytest.mark.timeout(400)]

DEADLINE_S = 150.0
STEPS = 60
RUN = [sys.executable, "-c", "import sys; from aimaster.cli import main; sys.exit(main())", "run"]

TRAIN = """
import json, os, sys, time
import torch
import torch.distributed as dist
import easyckpt

out, steps = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
weights = torch.zeros(1000, dtype=torch.float64)
state = {"weights": weights, "rng": easyckpt.RNG()}
ck = easyckpt.Checkpointer(os.environ["EASYCKPT_DIR"])
start = ck.load(state) or 0
for step in range(start + 1, steps + 1):
    gradient = torch.full_like(weights, step * (rank + 1))
    dist.all_reduce(gradient)
    weights += gradient
    ck.save(state, step=step)
    with open(f"{out}/rank{rank}.jsonl", "a") as log:
        line = {"step": step, "generation": int(os.environ["AIMASTER_GENERATION"]), "resumed": start}
        line |= {"ranks": dist.get_world_size(), "tier": ck.restored_from}
        log.write(json.dumps({**line, "node": os.environ["AIMASTER_NODE_ID"]}) + "\\n")
    time.sleep(0.1)
ck.close()
if rank == 0:
    with open(f"{out}/result.json", "w") as file:
        json.dump(weights.tolist(), file)
dist.destroy_process_group()
"""


class Job:
    """One training on a cluster: an agent per host, two of them in the job, the rest spares."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.out = folder / "out"
        self.out.mkdir()
        self.script = folder / "train.py"
        self.script.write_text(TRAIN)
        self.secret = folder / "secret"
        self.secret.write_text("known to these hosts alone")
        self.secret.chmod(0o600)
        self.ckpt = folder / "ckpt"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, host: Host, *, nnodes: str = "2") -> None:
        words = [
            "--nnodes",
            nnodes,
            "--rdzv-endpoint",
            f"{self.cluster[0].address}:29400",
            "--rdzv-id",
            "cluster",
        ]
        words += ["--secret-file", str(self.secret), "--ckpt-dir", str(self.ckpt), "--sanity-check", "off"]
        words += ["--local-addr", host.address, "--node-id", host.name]
        self.agents[host.name] = host.popen([*RUN, *words, str(self.script), str(self.out), str(STEPS)])

    def lines(self, rank: int) -> list[dict[str, object]]:
        path = self.out / f"rank{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def newest(self, rank: int) -> list[dict[str, object]]:
        """Lines of the newest generation; an older one may still write while it is being left behind."""
        lines = self.lines(rank)
        newest = max((str(line["generation"]).zfill(9) for line in lines), default="")
        return [line for line in lines if str(line["generation"]).zfill(9) == newest]

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: any(line["step"] == step for line in self.lines(0)), f"step {step}")

    def wait(self, check: Callable[[], bool], what: str, *, running: bool = True) -> None:
        """Wait for something; fail at once if the first agent ends where it has to be `running`."""
        deadline = time.monotonic() + DEADLINE_S
        while not check():
            if time.monotonic() > deadline or (running and self.agents["h0"].poll() is not None):
                hosts = [host for host in self.cluster.hosts if host.name in self.agents]
                logs = {host.name: host.log(self.agents[host.name])[-3000:] for host in hosts}
                pytest.fail(f"never happened: {what}\n" + "\n".join(f"--- {k}\n{v}" for k, v in logs.items()))
            time.sleep(0.05)

    def wait_for_exit(self, *hosts: Host) -> list[int]:
        agents = [self.agents[host.name] for host in hosts]
        self.wait(lambda: all(agent.poll() is not None for agent in agents), "the agents end", running=False)
        return [agent.wait() for agent in agents]


@pytest.fixture
def job(make_cluster: Callable[[int], Cluster], tmp_path: Path) -> Job:
    cluster = make_cluster(3)
    job = Job(cluster, tmp_path)
    job.start(cluster[0])
    job.start(cluster[1])
    job.wait_for_step(3)
    job.start(cluster[2])  # after the first two are in, so that it is the spare
    return job


def expected() -> float:
    """The weights after all steps: every rank adds its share of each step exactly once."""
    return float(sum(step * (1 + 2) for step in range(1, STEPS + 1)))


def check_result(job: Job) -> None:
    weights = json.loads((job.out / "result.json").read_text())
    assert set(weights) == {expected()}
    for rank in (0, 1):
        lines = job.lines(rank)
        assert {line["step"] for line in lines} == set(range(1, STEPS + 1))
        last = job.newest(rank)
        assert last[0]["generation"] != lines[0]["generation"]
        assert all(line["resumed"] for line in last), "started from nothing"


def test_a_host_loses_power_and_its_disk(job: Job) -> None:
    job.wait_for_step(10)
    job.cluster[1].kill()
    job.cluster[1].wipe()
    assert job.wait_for_exit(job.cluster[0], job.cluster[2]) == [0, 0]
    check_result(job)
    assert {line["node"] for rank in (0, 1) for line in job.newest(rank)} == {"h0", "h2"}


def test_a_host_is_cut_off_and_comes_back(job: Job) -> None:
    """The cut host's workers must harm nothing when the cable is plugged in again."""
    job.wait_for_step(10)
    job.cluster[1].cut()
    generation = job.newest(0)[0]["generation"]
    job.wait(lambda: job.newest(0)[0]["generation"] != generation, "the job goes on without it")
    job.cluster[1].heal()
    assert job.wait_for_exit(job.cluster[0], job.cluster[2]) == [0, 0]
    check_result(job)


def test_a_host_freezes_and_wakes(job: Job) -> None:
    job.wait_for_step(10)
    job.cluster[1].stop()
    generation = job.newest(0)[0]["generation"]
    job.wait(lambda: job.newest(0)[0]["generation"] != generation, "the job goes on without it")
    job.cluster[1].cont()
    assert job.wait_for_exit(job.cluster[0], job.cluster[2]) == [0, 0]
    check_result(job)


def test_a_job_goes_on_with_fewer_hosts_from_what_their_memory_holds(
    make_cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(2)
    job = Job(cluster, tmp_path)
    for host in cluster.hosts:
        job.start(host, nnodes="1:2")
    job.wait(
        lambda: any(line["ranks"] == 2 and line["step"] >= 10 for line in job.lines(0)), "step 10 of two"
    )
    cluster[1].kill()
    assert job.wait_for_exit(cluster[0]) == [0]
    last = job.newest(0)
    assert {line["ranks"] for line in last} == {1}
    assert {line["tier"] for line in last} == {"memory"}  # its own piece, and the copy of the lost host's
    resumed = last[0]["resumed"]
    assert isinstance(resumed, int)
    assert resumed >= 5, "a step from before the loss"
    weights = json.loads((job.out / "result.json").read_text())
    two, one = range(1, resumed + 1), range(resumed + 1, STEPS + 1)
    assert set(weights) == {float(3 * sum(two) + sum(one))}
