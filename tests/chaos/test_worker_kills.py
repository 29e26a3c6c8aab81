"""Kills at moments that nobody chose: never two sets of workers, never one that nobody watches."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest

from aimaster.agent import proc
from aimaster.agent.reaper import OWNER_VARIABLE
from tests.workers import run_agent, start_agent

pytestmark = pytest.mark.slow

DEADLINE_S = 60.0
STARTS = 8
KILLS = 6


@pytest.fixture
def sleeper(tmp_path: Path) -> Path:
    path = tmp_path / "sleep.py"
    path.write_text("import time\ntime.sleep(600)\n")
    return path


def test_the_template_dies_while_it_forks(tmp_path: Path, sleeper: Path, seed: int) -> None:
    draw = random.Random(seed)
    actions: list[dict[str, object]] = []
    for _ in range(STARTS):
        actions += [{"start_and_kill_template": draw.uniform(0, 0.06)}, {"stop": 5}]
    run = run_agent(tmp_path / "agent", target=str(sleeper), nproc=3, actions=actions)
    for start, stop in zip(run.seen[::2], run.seen[1::2], strict=True):
        found = start["start_and_kill_template"]
        assert found["sessions"] == sorted(found["pids"]), found
        assert stop["stop"]["unkillable"] == []
        assert len(stop["stop"]["exits"]) == 3


def test_the_agent_dies_while_it_starts_workers(tmp_path: Path, sleeper: Path, seed: int) -> None:
    """Whatever stage the start is in: nothing that carries the agent's mark outlives it."""
    draw = random.Random(seed)
    for number in range(KILLS):
        folder = tmp_path / f"agent{number}"
        agent = start_agent(
            folder,
            target=str(sleeper),
            nproc=2,
            warm=number % 3 > 0,
            actions=[{"tell": str(folder / "up")}, {"start": {}}, {"for_ever": None}],
        )
        deadline = time.monotonic() + DEADLINE_S
        while not (folder / "up").exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 3.5))
        agent.send_signal(signal.SIGKILL)
        agent.wait()
        while _marked(folder) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not _marked(folder), json.dumps(_marked(folder))


def _marked(folder: Path) -> list[str]:
    """Live processes whose ownership mark is that of the agent with this run directory."""
    import hashlib

    digest = hashlib.blake2s(str(folder / "run").encode(), digest_size=8).hexdigest()
    return [
        proc.describe(entry)
        for entry in proc.everything().values()
        if not entry.ended and (proc.variable(entry.pid, OWNER_VARIABLE) or "").startswith(digest)
    ]
