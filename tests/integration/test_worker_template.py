"""When workers are forked, when they are not, and that `warmth` says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers import AgentRun, run_agent

pytestmark = pytest.mark.slow

ONCE: list[dict[str, Any]] = [{"start": {}}, {"exits_of": 1}, {"stop": 5}]
SCRIPT = "import sys, torch\nprint('ran', float(torch.ones(2) @ torch.ones(2)))\n"
TRAIN = """\
import os, torch
import {module}
opt = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)
print("{module}", getattr({module}, "SEEN", None), flush=True)
while not os.path.exists(os.environ["END"]):
    opt.step()
    import time; time.sleep(0.02)
"""


def _run(tmp: Path, script: Path, actions: list[dict[str, Any]], **spec: Any) -> AgentRun:
    return run_agent(tmp / "agent", target=str(script), actions=actions, **spec)


def _warmth(run: AgentRun, number: int = 0) -> str:
    found: list[str] = [entry["start"]["warmth"] for entry in run.seen if "start" in entry]
    return found[number]


def test_a_module_beside_the_script_that_hides_a_library_means_cold(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sympy\nprint('ran', sympy.MINE)\n")
    (tmp_path / "sympy.py").write_text("MINE = 1\n")
    run = _run(tmp_path, tmp_path / "train.py", ONCE)
    assert _warmth(run) == "cold: sympy beside the script hides a module that the template has imported"
    assert run.stdout == "ran 1\n"


def test_a_folder_of_data_that_has_the_name_of_a_library_does_not(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "torch").mkdir()
    assert _warmth(_run(tmp_path, tmp_path / "train.py", ONCE)) == "warm"


def test_torch_that_cannot_be_imported_means_cold(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "torch").mkdir(parents=True)
    (elsewhere / "torch" / "__init__.py").write_text("raise ImportError('no CUDA library')\n")
    (tmp_path / "train.py").write_text("print('ran')\n")
    clean_env.setenv("PYTHONPATH", str(elsewhere))
    run = _run(tmp_path, tmp_path / "train.py", ONCE)
    assert _warmth(run) == "cold: torch cannot be imported (no CUDA library)"
    assert run.stdout == "ran\n"


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        ("threading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "behind"),
        ("SOCKET = socket.socket()", "behind"),
        ("subprocess.Popen(['sleep', '600'])", "behind"),
        ("os._exit(3)", "did not come up"),
        ("os.kill(os.getpid(), 11)", "did not come up"),
        ("torch.cuda.is_initialized = lambda: True", "CUDA was initialised"),
        ("os.register_at_fork(after_in_child=lambda: time.sleep(600))", "canary"),
    ],
    ids=["thread", "socket", "child", "exit", "crash", "cuda", "hang"],
)
def test_a_template_that_may_not_be_forked_means_cold(
    tmp_path: Path, clean_env: pytest.MonkeyPatch, trouble: str, why: str
) -> None:
    """A package that torch loads when it is imported does what must not be forked."""
    plugin = tmp_path / "elsewhere" / "plugin-1.dist-info"
    plugin.mkdir(parents=True)
    (plugin / "entry_points.txt").write_text("[torch.backends]\nplugin = plugin_of_torch:load\n")
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1\n")
    (plugin.parent / "plugin_of_torch.py").write_text(
        "import os, socket, subprocess, threading, time\ndef load():\n    global SOCKET\n"
        "    import torch\n    if 'RANK' not in os.environ:\n        " + trouble + "\n"
    )
    (tmp_path / "train.py").write_text(SCRIPT)
    clean_env.setenv("PYTHONPATH", str(plugin.parent))
    run = _run(tmp_path, tmp_path / "train.py", ONCE)
    assert _warmth(run).startswith("cold: "), run.stderr
    assert why in _warmth(run)
    assert run.stdout == "ran 2.0\n"


def test_a_template_that_dies_harms_no_worker_and_is_replaced(tmp_path: Path) -> None:
    end = tmp_path / "end"
    (tmp_path / "train.py").write_text(TRAIN.format(module="json"))
    run = _run(
        tmp_path,
        tmp_path / "train.py",
        [
            {"start": {"END": str(end)}},
            {"steps": 1},
            {"kill_template": None},
            {"better_template": 0},
            {"tell": str(end)},
            {"exits_of": 1},
            {"stop": 5},
            {"start": {"END": str(end)}},
            {"exits_of": 1},
        ],
    )
    assert run.seen[3]["better_template"]
    assert [entry["exit_code"] for entry in run.seen[5]["exits_of"]] == [0]
    assert _warmth(run, 1) == "warm"


def test_what_the_last_attempt_had_loaded_is_imported_ahead_but_for_the_users_own(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    """A library that reads RANK when it is imported is left to the workers, with whoever imports it."""
    end = tmp_path / "end"
    site = tmp_path / "venv" / "lib"
    site.mkdir(parents=True)
    (tmp_path / "mine.py").write_text(
        "import os, transformers, torch.utils.data\nSEEN = os.environ['RANK']\n"
    )
    (tmp_path / "train.py").write_text(TRAIN.format(module="mine"))
    run = _run(
        tmp_path,
        tmp_path / "train.py",
        [
            {"start": {"END": str(end)}},
            {"steps": 3},
            {"better_template": 0},
            {"loaded": ["transformers", "mine"]},
            {"tell": str(end)},
            {"exits_of": 1},
            {"stop": 5},
            {"start": {"END": str(end)}},
            {"exits_of": 1},
        ],
    )
    assert run.seen[3]["loaded"] == [True, False]
    assert run.stdout == "mine 0\nmine 0\n"
    assert _warmth(run, 1) == "warm"
