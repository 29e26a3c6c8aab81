"""Kills at random moments: what was promised is there afterwards, whole, and the same on all ranks."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from easyckpt.api import Checkpointer
from easyckpt.errors import SaveNotDone, SaverUnavailable
from easyckpt.saver.disk import Vault
from easyckpt.storage import open_storage
from easyckpt.survey import survey
from easyckpt.verify import verify_step
from tests.ckpt_nodes import Node, Nodes, make_nodes, wait_until

WORKER = Path(__file__).parents[1] / "integration" / "ckpt_worker.py"
SIZE = 4_000_000


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        yield made


def state(rank: int, step: int) -> dict[str, Any]:
    return {"weight": torch.full((SIZE,), float(step * 10 + rank)), "step": step}


def check_loaded(workers: list[Checkpointer]) -> int:
    """All ranks load; one step, each its own whole values."""
    steps = set()
    for rank, worker in enumerate(workers):
        live: dict[str, Any] = {"weight": torch.zeros(SIZE), "step": -1}
        step = worker.load(live)
        assert step is not None
        assert live["step"] == step
        assert bool((live["weight"] == step * 10 + rank).all())
        steps.add(step)
    assert len(steps) == 1
    return steps.pop()


def check_visible_steps(root: Path) -> None:
    """Every step that storage shows can be proved to its last byte."""
    storage = open_storage(root)
    for item in survey(storage).visible:
        report = verify_step(storage, item.manifest)
        assert not report.findings, report
        assert report.bytes_proved == report.bytes_total > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_node_killed_at_any_moment_costs_no_step_that_was_replicated(nodes: Nodes, seed: int) -> None:
    dice = random.Random(seed)
    alive = [nodes.start(tcp=True), nodes.start(tcp=True)]
    generation, step, promised = 1, 0, 0
    nodes.begin(generation, alive)
    workers = nodes.workers()
    for worker in workers:
        assert worker.load(state(0, 0)) is None
    for _ in range(4):
        for _ in range(dice.randint(1, 3)):
            step += 1
            handles = [
                worker.save(state(rank, step), step=step, block=True) for rank, worker in enumerate(workers)
            ]
            if dice.random() < 0.7:
                for handle in handles:
                    handle.wait("replicated", 60)
                promised = step
        victim = dice.randrange(2)
        time.sleep(dice.random() * 0.15)
        alive[victim].kill()
        alive[victim] = nodes.start(tcp=True)
        generation += 1
        nodes.begin(generation, alive, progress=promised > 0)
        workers = nodes.workers()
        if promised == 0:
            return
        step = check_loaded(workers)
        assert step >= promised
        promised = 0
        for node in alive:
            wait_until(
                lambda node=node, step=step: replicated(node, step), "the restored step has its copies again"
            )
        promised = step
    check_visible_steps(nodes.folder / "ckpt")


def replicated(node: Node, step: int) -> bool:
    status = node.status()
    return step in (status.replicated_step, status.memory_step) and status.replicated_step == step


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_a_saver_killed_while_it_writes_leaves_only_whole_steps(nodes: Nodes, seed: int) -> None:
    dice = random.Random(seed)
    root = nodes.folder / "ckpt"
    for _ in range(3):
        node = nodes.start()
        nodes.begin(1, [node], ranks=2)
        workers = nodes.workers()
        loaded = [worker.load({"weight": torch.zeros(SIZE), "step": -1}) for worker in workers]
        assert loaded[0] == loaded[1]
        step = loaded[0] or 0
        before = Vault(str(root)).look().on_disk if root.exists() else ()
        assert step == max((item.step for item in before), default=0)
        for _ in range(3):
            step += 1
            for rank, worker in enumerate(workers):
                worker.save(state(rank, step), step=step, block=True)
        time.sleep(dice.random() * 0.1)
        node.kill()
        with pytest.raises((SaverUnavailable, SaveNotDone)):
            workers[0].close()
        if root.exists():
            check_visible_steps(root)


@pytest.mark.slow
def test_workers_killed_at_random_train_bit_equal_to_the_end(nodes: Nodes) -> None:
    dice = random.Random(5)
    steps = 30
    results = []
    for name, kills in (("calm", 0), ("stormy", 3)):
        node = nodes.start()
        log = nodes.folder / f"{name}.log"
        for attempt in range(kills + 1):
            before = len(lines(log))
            nodes.begin(attempt + 1, [node], ranks=2)
            ranks = [start_rank(nodes, node, rank, log=log, steps=steps) for rank in range(2)]
            if attempt < kills:
                target = steps * (attempt + 1) // (kills + 1)
                # A step of this attempt: one that the attempt before had already reached says nothing.
                wait_until(
                    lambda log=log, before=before, target=target: newest(lines(log)[before:]) >= target,
                    f"step {target}",
                )
                time.sleep(dice.random() * 0.1)
                os.kill(ranks[dice.randrange(2)].pid, signal.SIGKILL)
                for process in ranks:
                    process.kill()
                    process.wait()
            else:
                assert [process.wait(120) for process in ranks] == [0, 0]
        found = lines(log)
        results.append(
            (
                {(line["rank"], line["step"]): line["loss"] for line in found if line["event"] == "step"},
                {line["rank"]: (line["digest"], line["draw"]) for line in found if line["event"] == "end"},
            )
        )
        for line in found:  # also those that were computed again after a kill
            if line["event"] == "step":
                assert line["loss"] == results[0][0][line["rank"], line["step"]]
        if kills:
            loads = [line for line in found if line["event"] == "loaded"][2:]
            assert {line["tier"] for line in loads} == {"memory"}
            assert [loads[i]["step"] for i in (0, 2, 4)] == [loads[i]["step"] for i in (1, 3, 5)]
        node.kill()
        (nodes.folder / "ckpt").rename(nodes.folder / f"ckpt-{name}")
        check_visible_steps(nodes.folder / f"ckpt-{name}")
    (calm, calm_end), (stormy, stormy_end) = results
    assert stormy_end == calm_end
    # A rank that is killed between a save and its line in the log has done the step all the same.
    assert len(calm) - len(stormy) <= 2 * 3


def start_rank(nodes: Nodes, node: Node, rank: int, *, log: Path, steps: int) -> subprocess.Popen[bytes]:
    assert node.begun is not None
    environment = {
        **os.environ,
        "EASYCKPT_SAVER": node.options.socket_path,
        "EASYCKPT_GENERATION": str(node.begun.generation),
        "AIMASTER_JOB_ID": node.options.job_id,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(WORKER), str(nodes.folder / "ckpt"), str(steps), str(log), "pause=0.03"]
    return subprocess.Popen(command, env=environment)


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def newest(found: Iterable[dict[str, Any]]) -> int:
    """The newest step that both ranks have saved, by these lines."""
    steps = {0: 0, 1: 0}
    for line in found:
        if line["event"] == "step":
            steps[line["rank"]] = max(steps[line["rank"]], line["step"])
    return min(steps.values())
