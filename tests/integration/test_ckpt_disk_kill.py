"""Real processes on a real file system: killed at every operation, and racing each other."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from easyckpt.keep import KeepLatest
from easyckpt.retention import PruneOptions, prune_report
from easyckpt.storage import LocalStorage
from easyckpt.survey import survey, visible_steps
from easyckpt.testing import SampleRun
from easyckpt.verify import verify_step

WRITER = """
import sys
from easyckpt.keep import KeepLatest
from easyckpt.retention import PruneOptions, prune_report
from easyckpt.storage import LocalStorage
from easyckpt.testing import CrashingPosix, SampleRun
from easyckpt.testing.crash import CrashPlan

# One process forks a writer per line of its input, so that a hundred deaths do not cost a hundred starts.
import os
for line in sys.stdin:
    root, at = line.split()
    pid = os.fork()
    if pid == 0:
        plan = CrashPlan(at=int(at), kill=True)
        run = SampleRun(storage=LocalStorage(root, posix=CrashingPosix(plan)), elements=400_000)
        run.begin(1)
        for step in (10, 20, 30):
            assert run.save(step).is_visible
            with open(root + ".promised", "a") as file:
                print(step, file=file)
        options = PruneOptions(grace_s=0.0)
        prune_report(run.storage, keep=KeepLatest(2), generation=1, now_unix_s=2e9, options=options)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


def check(root: Path) -> None:
    storage = LocalStorage(root)
    promised_file = Path(f"{root}.promised")
    promised = [int(line) for line in promised_file.read_text().split()] if promised_file.exists() else []
    seen = [step.step for step in visible_steps(storage)]
    assert set(promised) - set(seen) <= {10}, "only retention may take a step away, and only the oldest"
    if 10 not in seen:
        assert promised in ([], [10, 20, 30])
    for step in visible_steps(storage):
        verdict = verify_step(storage, step.manifest)
        assert verdict.is_good, verdict
        assert verdict.is_whole
    # The next life goes on, tidies up, and finds nothing in its way.
    found = survey(storage)
    again = SampleRun(storage=storage, elements=64)
    again.begin(found.generation + 1, resumed_step=found.visible[0].step if found.visible else None)
    assert again.save(100).is_visible
    options = PruneOptions(grace_s=0.0, remains_grace_s=0.0)
    prune_report(storage, keep=KeepLatest(1), generation=again.generation, now_unix_s=4e9, options=options)
    assert storage.unfinished() == ()
    assert [step.step for step in visible_steps(storage)] == [100]


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Where a death costs no disk time, and which operations to die at: every one, if there is such a place.

    SIGKILL loses nothing that the kernel has, so that a file system in memory shows the same.
    """
    shm = Path("/dev/shm")
    if shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free > 40 << 20:
        with tempfile.TemporaryDirectory(dir=shm, prefix="easyckpt-test-") as name:
            yield Path(name), 1
    else:
        yield tmp_path, 7


@pytest.mark.slow
def test_sigkill_at_every_operation(fast_folder: tuple[Path, int]) -> None:
    folder, stride = fast_folder
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    try:
        for at in range(0, 10_000, stride):
            root = folder / f"run{at}"
            writer.stdin.write(f"{root} {at}\n")
            writer.stdin.flush()
            code = int(writer.stdout.readline())
            assert code in (0, -signal.SIGKILL)
            check(root)
            shutil.rmtree(root)
            if code == 0:
                break
    finally:
        writer.stdin.close()
        writer.wait(timeout=60)
        writer.stdout.close()
    assert at > 100, "the enumeration saw hardly any operation"


COMMITTER = """
import json, sys
from easyckpt.commit import commit_manifest
from easyckpt.manifest import Manifest
from easyckpt.storage import LocalStorage
storage = LocalStorage(sys.argv[1])
manifest = Manifest.from_json(open(sys.argv[2], "rb").read(), where="argument")
print("ready", flush=True)
sys.stdin.readline()
print(commit_manifest(storage, manifest).outcome.value, flush=True)
"""


def test_of_committers_in_several_processes_one_wins(tmp_path: Path) -> None:
    run = SampleRun(storage=LocalStorage(tmp_path / "run"), nodes=2)
    run.begin(1)
    processes = []
    try:
        refs = run.persist(10)
        for number in range(4):
            path = tmp_path / f"manifest{number}.json"
            path.write_bytes(run.manifest(10, refs, metrics={"writer": float(number % 2)}).to_json())
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", COMMITTER, str(tmp_path / "run"), str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        outcomes = sorted(process.communicate(timeout=120)[0].strip() for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    assert outcomes == ["already", "committed", "lost", "lost"]
    assert len(visible_steps(run.storage)) == 1


def test_readers_and_retention_at_once(tmp_path: Path) -> None:
    """A listing that races with retention in another process never fails and never shows half a step."""
    root = tmp_path / "run"
    script = (
        "import sys\n"
        "from easyckpt.keep import KeepLatest\n"
        "from easyckpt.retention import PruneOptions, prune_report\n"
        "from easyckpt.storage import LocalStorage\n"
        "from easyckpt.testing import SampleRun\n"
        "run = SampleRun(storage=LocalStorage(sys.argv[1]), elements=64)\n"
        "run.begin(1)\n"
        "run.save(1)\n"
        "print('ready', flush=True)\n"
        "for step in range(2, 40):\n"
        "    run.save(step)\n"
        "    prune_report(run.storage, keep=KeepLatest(2), generation=1, now_unix_s=2e9,\n"
        "                 options=PruneOptions(grace_s=1e9 if step % 2 else 0.0))\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stderr is not None
    try:
        assert writer.stdout.readline() == "ready\n"
        looks = 0
        while writer.poll() is None or looks == 0:
            found = survey(LocalStorage(root))
            assert found.visible
            assert found.troubles == ()
            looks += 1
        assert writer.returncode == 0, writer.stderr.read()
    finally:
        if writer.poll() is None:
            writer.kill()
        writer.wait()
        writer.stdout.close()
        writer.stderr.close()
    assert [step.step for step in visible_steps(LocalStorage(root))] == [39, 38]


def test_the_outcome_is_json_for_programs(tmp_path: Path) -> None:
    """The installed module, as another program calls it."""
    run = SampleRun(storage=LocalStorage(tmp_path / "run"))
    run.begin(1)
    run.save(10)
    done = subprocess.run(
        [sys.executable, "-m", "easyckpt.cli", "ls", str(tmp_path / "run"), "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert [row["step"] for row in json.loads(done.stdout)["steps"]] == [10]


LANES_WRITER = """
import os, sys, threading
from easyckpt.storage import LocalStorage, Parts
from easyckpt.testing import CrashingPosix
from easyckpt.testing.crash import CrashPlan

def write(store, number):
    parts = Parts(bytes=1 << 20, check=lambda begin, part: None)
    for turn in range(2):
        store.write_durable(f"node/body{number}", bytes([turn + 1]) * (5 << 20), parts=parts)
        with open(f"{store.root}.promised", "a") as file:
            print(number, turn, file=file)

for line in sys.stdin:
    root, at = line.split()
    pid = os.fork()
    if pid == 0:
        store = LocalStorage(root, posix=CrashingPosix(CrashPlan(at=int(at), kill=True)), lanes=3)
        threads = [threading.Thread(target=write, args=(store, number)) for number in range(2)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


def test_killed_while_bodies_are_written_in_lanes(fast_folder: tuple[Path, int]) -> None:
    """Two bodies, three parts of each in flight: what was promised is whole, what is visible is whole."""
    folder, _ = fast_folder
    writer = subprocess.Popen(
        [sys.executable, "-c", LANES_WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    codes = set()
    try:
        for at in range(0, 200, 3):
            root = folder / f"at{at}"
            print(root, at, file=writer.stdin, flush=True)
            code = int(writer.stdout.readline())
            codes.add(code)
            store = LocalStorage(root)
            promised: dict[str, int] = {}
            if Path(f"{root}.promised").exists():
                lines = [line.split() for line in Path(f"{root}.promised").read_text().splitlines()]
                promised = {number: int(turn) for number, turn in lines}
            seen = {entry.path: store.read(entry.path) for entry in store.list()}
            for number in ("0", "1"):
                body = seen.get(f"node/body{number}")
                assert body is not None or number not in promised
                if body is not None:
                    assert body in (b"\1" * (5 << 20), b"\2" * (5 << 20))
                    assert body[0] > promised.get(number, 0), "never older than promised"
            for entry in store.unfinished():
                store.delete(entry.path)
            shutil.rmtree(root, ignore_errors=True)
            if code == 0:
                break
    finally:
        writer.stdin.close()
        assert writer.wait(timeout=60) == 0
        writer.stdout.close()
    assert codes == {0, -signal.SIGKILL}
