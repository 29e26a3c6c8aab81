"""A scheduler sends SIGTERM: the newest step becomes durable, code 10, the next job goes on from it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aimaster.core.requeue import Requeued
from aimaster.journal.sqlite import SqliteJournal
from tests.chaos.test_run_kills import PAUSE_S, STEPS, TRAIN, reached, steps_of, weights
from tests.runs import Run, below, script, start_run, until

pytestmark = pytest.mark.slow

STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"


def job(folder: Path, text: str, *, grace_s: str, pause_s: float) -> Run:
    return start_run(
        folder, "--nproc-per-node", "2", "--ckpt-dir", folder / "ckpt", "--rdzv-id", "queued",
        "--preemption-grace", grace_s, script(folder, text), str(STEPS), str(pause_s),
    )  # fmt: skip


def test_a_preempted_job_goes_on_where_it_was(tmp_path: Path) -> None:
    """Its workers do not even listen: they are killed when half of the grace is over."""
    undisturbed = start_run(
        tmp_path, "--nproc-per-node", "2", "--ckpt-dir", tmp_path / "other",
        script(tmp_path, TRAIN), str(STEPS), "0", name="undisturbed",
    )  # fmt: skip
    assert undisturbed.wait() == 0, undisturbed.stderr
    first = job(tmp_path, STUBBORN + TRAIN, grace_s="5", pause_s=PAUSE_S)
    until(lambda: reached(first, 5), "5 steps")
    os.kill(first.pids("worker")[-1], signal.SIGKILL)  # the next job knows of it
    until(lambda: reached(first, 15), "15 steps")
    seen = steps_of(first)[-1]
    first.send(signal.SIGTERM)
    assert first.wait() == 10, first.stderr
    found = re.search(r"step (\d+) is durable; a requeued job continues from it", first.stderr)
    assert found, first.stderr
    durable = int(found[1])
    assert durable >= seen // 2, "a save may be skipped while another one is written, but not for long"
    listed = subprocess.run(
        [sys.executable, "-m", "easyckpt.cli", "ls", str(tmp_path / "ckpt"), "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert listed.returncode == 0, listed.stderr
    assert max(row["step"] for row in json.loads(listed.stdout)["steps"]) == durable
    again = job(tmp_path, TRAIN, grace_s="5", pause_s=0.0)
    assert again.wait() == 0, again.stderr
    assert steps_of(again)[0] == durable + 1
    assert weights(again) == weights(undisturbed)
    (path,) = Path(again.env["XDG_STATE_HOME"]).glob("aimaster/queued/journal.db")
    with SqliteJournal.read(path) as journal:
        begin = next(journal.entries()).record.event
    assert isinstance(begin, Requeued)
    assert (begin.history.restarts, begin.generation) == (1, 2)
    assert below(again.run_dir) == []
