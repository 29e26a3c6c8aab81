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

import sanitycheck
from tests.runs import Run, free_port, script, start_run

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
    (kernel,) = sanitycheck.run(options=sanitycheck.Options(only=("host.kernel",))).results
    assert sanitycheck.Reason.KERNEL_OOM_KILL in {finding.reason for finding in kernel.findings}, (
        kernel.to_dict()
    )


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


TRAIN = """
import torch
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        {item}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(Data(), num_workers=1):
    model(batch[:, :4]).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_sample_that_cannot_be_read_is_tried_once_more_and_told_with_its_step(tmp_path: Path) -> None:
    text = TRAIN.format(item="return torch.zeros(4) if index < 5 else [][index]")
    run = start_run(tmp_path, script(tmp_path, text))
    assert run.wait() == 20, run.stderr
    told = story(run)
    assert (told["rule"], told["incident"]["last_step"]) == ("data_worker_exception", 5), told
    assert "same" in told["decision"], told["decision"]
    assert told["incident"]["id"] == 2, "once more, and not again"


SPOILT = """
import os
import torch, easyckpt
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
state = {"model": model, "optimizer": optimizer}
keep = easyckpt.KeepLatest(2) | easyckpt.KeepEvery(10)
checkpointer = easyckpt.Checkpointer("ckpt", disk_interval=10, keep=keep)
step = checkpointer.load(state) or 0
while step < 40:
    loss = model(torch.ones(2, 4)).sum()
    if step == 22 and not torch.isfinite(loss):
        raise ValueError("the loss is no number")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    if step == 20 and not os.path.exists("spoilt"):
        open("spoilt", "w").close()
        with torch.no_grad():
            model.weight.fill_(float("nan"))
    checkpointer.save(state, step=step, block=True).wait("durable" if step % 10 == 0 else "memory", 60)
checkpointer.close()
print("finite", bool(torch.isfinite(model.weight).all()))
"""


@pytest.mark.slow
def test_a_checkpoint_that_breaks_whoever_resumes_from_it_is_set_aside(tmp_path: Path) -> None:
    run = start_run(tmp_path, script(tmp_path, SPOILT))
    assert run.wait() == 0, run.stderr
    assert run.stdout == "finite True\n"
    told = story(run)
    assert (told["incident"]["id"], told["incident"]["resumed_step"]) == (2, 10), told
    assert told["decision"].endswith("; checkpoints from step 13 on were set aside"), told["decision"]


@pytest.mark.slow
def test_shared_memory_that_is_too_small_for_the_data_workers(tmp_path: Path) -> None:
    small = 'mount -t tmpfs -o size=4m tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", small, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no mount namespace can be made here")
    path = script(tmp_path, TRAIN.format(item="return torch.ones(8_000_000)"))
    run = start_run(tmp_path, "--max-restarts", "0", "--no-warm", path, prefix=prefix)
    assert run.wait() == 20, run.stderr
    told = story(run)
    assert (told["rule"], told["blame"]) == ("shm_too_small", "platform"), told


@pytest.mark.slow
def test_a_module_that_one_node_lacks(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "only_here.py").write_text("")
    path = script(tmp_path, "import only_here, time\ntime.sleep(600)\n")
    secret = tmp_path / "secret"
    secret.write_text("a secret of this test alone")
    secret.chmod(0o600)
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--secret-file", secret)
    words += ("--no-warm", "--sanity-check", "off")
    runs = {
        name: start_run(tmp_path, *words, "--node-id", name, path, name=name, env=env)
        for name, env in (("a", {"PYTHONPATH": str(tmp_path / "there")}), ("b", {}))
    }
    assert {name: run.wait() for name, run in runs.items()} == {"a": 20, "b": 20}, runs["b"].stderr
    told = story(runs["a"])
    assert told["rule"] == "module_missing"
    assert told["who"].endswith(" on b"), told["who"]


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
