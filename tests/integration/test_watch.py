"""`aimaster status --watch` beside a real job: lines in a log, a picture on a terminal; over with the job."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from tests.runs import AIMASTER, DEADLINE_S, Run, script, start_run, until

LOOP = """
import os, signal, time
print("pid", os.getpid(), flush=True)
while not os.path.exists("enough"):
    time.sleep(0.05)
"""


def job(folder: Path) -> Run:
    run = start_run(folder, script(folder, LOOP))
    until(lambda: run.stdout, "the worker runs")
    return run


def watching(run: Run, *words: str, stdout: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*AIMASTER, "status", "--watch", "--run-dir", str(run.run_dir), *words],
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        env={**run.env, "TERM": "xterm", "COLUMNS": "150", "LINES": "50"},
    )


@pytest.mark.slow
def test_a_line_for_what_changes_until_the_job_is_over(tmp_path: Path) -> None:
    run = job(tmp_path)
    watcher = watching(run, stdout=subprocess.PIPE)
    lines: list[str] = []
    assert watcher.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(watcher.stdout or ()))
    reader.start()
    until(lambda: any("running, generation 1" in line for line in lines), "it says that the job runs")
    os.kill(int(run.stdout.split()[1]), signal.SIGKILL)
    until(lambda: any("generation 2" in line for line in lines), "it says that workers were started again")
    (tmp_path / "enough").touch()
    assert run.wait() == 0
    assert watcher.wait(DEADLINE_S) == 0
    reader.join(DEADLINE_S)
    watcher.stdout.close()
    assert any("worker killed" in line for line in lines)
    assert len(lines) < 30, "not a line for every look"


@pytest.mark.slow
def test_a_picture_on_a_terminal_and_nothing_without_a_job(tmp_path: Path) -> None:
    run = job(tmp_path)
    mine, its = os.openpty()
    watcher = watching(run, stdout=its)
    os.close(its)
    seen = b""
    while b"checkpoint step" not in seen:
        seen += os.read(mine, 65536)
    (tmp_path / "enough").touch()
    assert run.wait() == 0
    try:
        while chunk := os.read(mine, 65536):
            seen += chunk
    except OSError:  # how Linux says that nobody holds the other end
        pass
    assert watcher.wait(DEADLINE_S) == 0
    os.close(mine)
    assert b"\x1b[" in seen, "drawn anew in its place"
    alone = watching(run, stdout=subprocess.PIPE)
    said, _ = alone.communicate(timeout=DEADLINE_S)
    assert alone.returncode == 3
    assert "aimaster:" in said
