"""Failures of real processes, and what `aimaster explain` says about each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs import Run, script, start_run

MEMORY = Path("/sys/fs/cgroup/memory")
LIMIT_BYTES = 1_200_000_000


def story(run: Run) -> dict[str, Any]:
    words = [sys.executable, "-m", "aimaster", "explain", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=run.env, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup with a limit; needs root and cgroup v1's memory controller."""
    folder = MEMORY / f"aimaster-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT_BYTES))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made here ({error.strerror})")
    yield folder
    folder.rmdir()


@pytest.mark.slow
def test_the_kernel_killed_a_worker_for_want_of_memory(tmp_path: Path, cgroup: Path) -> None:
    greedy = "held = []\nwhile True:\n    held.append(bytearray(50_000_000))\n"
    enter = f'echo $$ > {cgroup}/cgroup.procs && exec "$@"'
    words = ("--max-restarts", "0", "--no-warm", script(tmp_path, greedy))
    run = start_run(tmp_path, *words, prefix=("sh", "-c", enter, "sh"))
    assert run.wait() == 20, run.stderr
    told = story(run)
    assert (told["rule"], told["blame"]) == ("host_out_of_memory_cgroup", "user"), told


CAUSES = {
    "segmentation_fault": "import ctypes; ctypes.string_at(0)",
    "exited": "import os; os._exit(7)",
    "disk_full": "open('/dev/full', 'w').write('x' * 100_000)",
    "address_in_use": "import socket\na = socket.create_server(('127.0.0.1', 0)); "
    "b = socket.socket(); b.bind(a.getsockname())",
    "module_missing": "import no_such_module_at_all",
    "assertion": "assert 1 == 2, 'not so'",
}


@pytest.mark.slow
def test_causes_are_told_apart(tmp_path: Path) -> None:
    for row, text in CAUSES.items():
        folder = tmp_path / row
        folder.mkdir()
        run = start_run(folder, "--max-restarts", "0", "--no-warm", script(folder, text))
        assert run.wait() == 20, run.stderr
        assert story(run)["rule"] == row


BREAKS_ONCE = """
import os, sys
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise OSError(5, "Input/output error")
"""


def test_a_node_whose_disk_failed_is_looked_at_before_it_takes_workers_again(tmp_path: Path) -> None:
    run = start_run(tmp_path, "--max-restarts", "1", "--no-warm", script(tmp_path, BREAKS_ONCE))
    assert run.wait() == 0, run.stderr
    evidence = story(run)["evidence"]
    assert any("was checked: " in line for line in evidence), evidence
