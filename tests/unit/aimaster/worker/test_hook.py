"""The hook that runs in every `import torch`: silent where nobody watches, harmless where it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aimaster.worker.progress import Phase, ProgressPage

TRAIN = """
import torch
model = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(model.parameters(), 0.1)
for _ in range({steps}):
    model(torch.ones(2)).sum().backward()
    opt.step()
print("trained", flush=True)
"""


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    page = ProgressPage(4)
    yield page
    page.close()


def _python(text: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", text], env={**os.environ, **env}, capture_output=True, text=True, check=False
    )


class Forks:
    """Scripts in forks of one process that has imported torch but for its last line, which loads the hook.

    What an optimizer imports late is there as well: it costs more than all of these scripts together.
    """

    SERVER = """
import gc, json, os, sys
import torch, torch._dynamo
gc.freeze()
for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
else:
    sys.exit()
for number in (1, 2):
    os.dup2(os.open(order["outputs"][number - 1], os.O_WRONLY | os.O_CREAT), number)
os.environ.clear()
os.environ.update(order["env"])
torch._import_device_backends()
exec(compile(order["text"], "<script>", "exec"))
"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = subprocess.Popen(
            [sys.executable, "-c", self.SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        self._runs = 0

    def run(self, text: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """As `_python`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._runs += 1
        outputs = [self._folder / f"{self._runs}.{name}" for name in ("out", "err")]
        order = {"text": text, "env": {**os.environ, **env}, "outputs": [str(path) for path in outputs]}
        print(json.dumps(order), file=self._server.stdin, flush=True)
        code = int(self._server.stdout.readline())
        return subprocess.CompletedProcess([], code, *(path.read_text() for path in outputs))

    def close(self) -> None:
        """End the process behind it."""
        self._server.communicate()


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    made = Forks(tmp_path_factory.mktemp("forks"))
    yield made
    made.close()


def _watched(page: ProgressPage, tmp_path: Path, **more: str) -> dict[str, str]:
    return {
        "AIMASTER_AGENT": str(tmp_path),
        "AIMASTER_PROGRESS_PAGE": page.path,
        "LOCAL_RANK": "0",
        "RANK": "3",
        **more,
    }


def test_import_without_an_agent_loads_nothing_of_ours_but_the_hook() -> None:
    done = _python("import torch, sys; print(sorted(m for m in sys.modules if m.startswith('aimaster')))", {})
    assert done.stdout == "['aimaster', 'aimaster.worker', 'aimaster.worker.hook']\n"


def test_the_entry_point_costs_less_than_a_millisecond() -> None:
    from aimaster.worker.hook import autoload

    begin = time.process_time()
    for _ in range(1000):
        autoload()
    assert time.process_time() - begin < 1.0


def test_steps_are_seen(page: ProgressPage, tmp_path: Path) -> None:
    done = _python(TRAIN.format(steps=25), _watched(page, tmp_path))
    assert done.stdout == "trained\n", done.stderr
    assert done.stderr == ""
    record = page.read(0)
    assert record is not None
    assert (record.steps, record.rank, record.phase) == (25, 3, Phase.EXITING)
    names = [line.split("\t")[0] for line in (tmp_path / "modules.txt").read_text().splitlines()]
    assert "torch.optim.sgd" in names


@pytest.mark.parametrize(
    "env",
    [{"AIMASTER_HOOK": "0"}, {"LOCAL_RANK": ""}, {"AIMASTER_PROGRESS_PAGE": ""}],
    ids=["off", "no worker", "no page"],
)
def test_off(page: ProgressPage, forks: Forks, tmp_path: Path, env: dict[str, str]) -> None:
    done = forks.run(TRAIN.format(steps=2), _watched(page, tmp_path, **env))
    assert done.stdout == "trained\n"
    assert page.read(0) is None
    assert not (tmp_path / "hook.log").exists()


@pytest.mark.parametrize(
    "env",
    [
        {"AIMASTER_PROGRESS_PAGE": "/proc/1/fd/999"},
        {"LOCAL_RANK": "x"},
        {"LOCAL_RANK": "100000"},
        {"RANK": "many"},
    ],
    ids=["page", "rank", "large", "global"],
)
def test_trouble_is_written_down_and_training_goes_on(
    page: ProgressPage, forks: Forks, tmp_path: Path, env: dict[str, str]
) -> None:
    done = forks.run(TRAIN.format(steps=2), _watched(page, tmp_path, **env))
    assert done.stdout == "trained\n"
    assert done.stderr == ""
    assert "Error" in (tmp_path / "hook.log").read_text()


def test_trouble_that_cannot_be_written_down_is_silent(
    page: ProgressPage, forks: Forks, tmp_path: Path
) -> None:
    env = _watched(page, tmp_path / "missing", LOCAL_RANK="x")
    assert forks.run(TRAIN.format(steps=2), env).stdout == "trained\n"


def test_trouble_in_a_step_switches_it_off(page: ProgressPage, forks: Forks, tmp_path: Path) -> None:
    broken = (
        "import torch, aimaster.worker.hook as hook\n"
        "def fail(*a): raise RuntimeError('inside')\n"
        "hook._writer.beat = fail\n" + TRAIN.format(steps=3)
    )
    done = forks.run(broken, _watched(page, tmp_path))
    assert done.stdout == "trained\n", done.stderr
    assert (tmp_path / "hook.log").read_text().count("RuntimeError: inside") == 1


def test_several_optimizers_are_one_step(page: ProgressPage, forks: Forks, tmp_path: Path) -> None:
    text = """
import torch
layers = [torch.nn.Linear(2, 2) for _ in range(5)]
opts = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
for _ in range(6):
    for layer, opt in zip(layers, opts):
        layer(torch.ones(2)).sum().backward()
        opt.step()
"""
    assert forks.run(text, _watched(page, tmp_path)).returncode == 0
    record = page.read(0)
    assert record is not None
    assert record.steps == 6


def test_one_optimizer_over_its_groups_in_turn_is_one_step(
    page: ProgressPage, forks: Forks, tmp_path: Path
) -> None:
    """As DeepSpeed's ZeRO does it."""
    text = """
import torch
layers = [torch.nn.Linear(2, 2) for _ in range(3)]
opt = torch.optim.SGD([{"params": layer.parameters()} for layer in layers], 0.1)
groups = opt.param_groups
for _ in range(4):
    for group in groups:
        opt.param_groups = [group]
        opt.step()
    opt.param_groups = groups
"""
    assert forks.run(text, _watched(page, tmp_path)).returncode == 0
    record = page.read(0)
    assert record is not None
    assert record.steps == 4


def test_children_of_a_worker_do_not_write(page: ProgressPage, forks: Forks, tmp_path: Path) -> None:
    text = (
        TRAIN.format(steps=2)
        + """
import os
if os.fork() == 0:
    for _ in range(5):
        opt.step()
    os._exit(0)
os.wait()
import multiprocessing
"""
    )
    assert forks.run(text, _watched(page, tmp_path)).returncode == 0
    record = page.read(0)
    assert record is not None
    assert record.steps == 2


def test_what_others_say_through_it(page: ProgressPage, forks: Forks, tmp_path: Path) -> None:
    text = (
        TRAIN.format(steps=1)
        + """
import os, signal, sys
hook = sys.modules["aimaster.worker.hook"]
assert hook.phase("saving") == "training"
hook.saved(700)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    assert forks.run(text, _watched(page, tmp_path)).returncode == -9
    record = page.read(0)
    assert record is not None
    assert (record.phase, record.saved_step) == (Phase.SAVING, 700)


def test_outside_a_worker_saying_something_does_nothing() -> None:
    from aimaster.worker import hook

    assert hook.phase("saving") == "saving"
    hook.saved(3)


@pytest.mark.slow
def test_a_compiled_optimizer_step_is_seen(page: ProgressPage, tmp_path: Path) -> None:
    text = """
import torch
layer = torch.nn.Linear(2, 2)
opt = torch.optim.SGD(layer.parameters(), 0.1)
step = torch.compile(lambda: opt.step(), backend="eager")
for _ in range(5):
    layer(torch.ones(2)).sum().backward()
    step()
"""
    assert _python(text, _watched(page, tmp_path)).returncode == 0
    record = page.read(0)
    assert record is not None
    assert record.steps == 5
