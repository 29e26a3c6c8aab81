"""Many restarts in a row: what grows in the agent, the master, the saver, the template, the folders.

    python -m benchmarks.restarts --restarts 50
    python -m benchmarks.restarts --restarts 50 --kind loop      # survivors keep their process

After each start of all ranks the processes are looked at from outside (`/proc`), then one rank is killed.
Told is the median of the last looks less that of those after a tenth of the restarts: what a process holds
for good it has by then, and what it loses with each restart shows. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BARE = """
import os, time
folder = os.environ["LOOK"]
name = f"{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}"
with open(f"{folder}/.{name}", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/.{name}", f"{folder}/{name}")
while not os.path.exists(f"{folder}/end"):
    time.sleep(0.02)
"""
DDP = """
import os
import torch, torch.distributed as dist

def train():
    folder, attempt = os.environ["LOOK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    told = False
    while True:
        over = torch.tensor([float(os.path.exists(f"{folder}/end"))])
        dist.all_reduce(over)
        if over:
            break
        optimizer.zero_grad()
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        if not told:
            told, name = True, f"{attempt}.{dist.get_rank()}"
            with open(f"{folder}/.{name}", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"{folder}/.{name}", f"{folder}/{name}")
    dist.destroy_process_group()

"""
SCRIPTS = {
    "bare": BARE,
    "ddp": DDP + "train()\n",
    "loop": DDP + "from aimaster.worker import loop\nloop(train)\n",
}
POLICY = "worker_failures: {limit: 100000}\nfruitless_attempts_max: 100000\n"
START_S_MAX = 120.0
LOOK_S = 0.01
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def looked_at(pid: int) -> dict[str, int]:
    """What one process holds; empty where it is gone."""
    try:
        rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
        return {
            "rss_kb": rss // 1024,
            "fds": len(os.listdir(f"/proc/{pid}/fd")),
            "threads": len(os.listdir(f"/proc/{pid}/task")),
        }
    except (OSError, ValueError):
        return {}


def helpers(run_dir: Path) -> dict[str, int]:
    """Processes of the agent that are no workers, as it has written them down; the template may change."""
    rows = [
        row for path in run_dir.rglob("processes.json") for row in json.loads(path.read_text())["processes"]
    ]
    return {row["role"]: row["pid"] for row in rows if row["role"] in ("agent", "master", "saver")}


def files_below(*folders: Path) -> int:
    """Files and folders, as far as they can be counted while others work in them."""
    return sum(1 for folder in folders for _ in _walk(folder))


def _walk(folder: Path) -> Iterator[str]:
    for _, names, files in os.walk(folder):
        yield from names
        yield from files


class Look:
    """One run, and what was seen of it after each start."""

    def __init__(self, folder: Path, *, kind: str, nproc: int) -> None:
        self.folder, self.nproc = folder, nproc
        self.looks: list[dict[str, dict[str, int]]] = []
        self.stayed = 0
        (folder / "look").mkdir()
        (folder / "script.py").write_text(SCRIPTS[kind])
        (folder / "policy.yaml").write_text(POLICY)
        env = {**os.environ, "LOOK": str(folder / "look"), "XDG_STATE_HOME": str(folder / "state")}
        words = [sys.executable, "-m", "aimaster", "run", "--run-dir", str(folder / "run")]
        words += ["--policy", str(folder / "policy.yaml"), "--nproc-per-node", str(nproc)]
        with (folder / "output").open("wb") as out:
            self.process = subprocess.Popen(
                [*words, str(folder / "script.py")], env=env, stdout=out, stderr=out, cwd=folder
            )

    def started(self, attempt: int) -> list[int]:
        """Wait until all ranks of an attempt have told their process.

        Raises:
            RuntimeError: they did not in time, or the run ended.
        """
        deadline = time.monotonic() + START_S_MAX
        paths = [self.folder / "look" / f"{attempt}.{rank}" for rank in range(self.nproc)]
        while not all(path.exists() for path in paths):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((self.folder / "output").read_text()[-2000:])
            time.sleep(LOOK_S)
        return [int(path.read_text()) for path in paths]

    def take(self, restarts: int) -> None:
        """Kill one rank after the other, and look."""
        before: list[int] = []
        for attempt in range(restarts + 1):
            pids = self.started(attempt)
            self.stayed += len(set(pids) & set(before))
            look = {role: looked_at(pid) for role, pid in helpers(self.folder / "run").items()}
            look["longest_worker"] = looked_at(pids[0])
            look["folders"] = {"files": files_below(self.folder / "run", self.folder / "state")}
            self.looks.append(look)
            if attempt < restarts:
                # The first rank is the last to go, so that in a loop one process lives through all.
                os.kill(pids[1 + attempt % (self.nproc - 1)] if self.nproc > 1 else pids[0], signal.SIGKILL)
            before = pids
        (self.folder / "look" / "end").touch()

    def end(self) -> int:
        """The exit code of the run, which is ended if it must be."""
        try:
            return self.process.wait(START_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def growth(looks: list[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """For each process and measure the median of the last looks less that of those after the first tenth."""
    some = max(1, len(looks) // 10)
    early, late = looks[some : 2 * some + 1], looks[-some - 1 :]
    found: dict[str, dict[str, int]] = {}
    for role, last in looks[-1].items():
        for what in last:
            first = [look[role][what] for look in early if what in look.get(role, {})]
            final = [look[role][what] for look in late if what in look.get(role, {})]
            if first and final:
                difference = statistics.median(final) - statistics.median(first)
                found.setdefault(role, {})[what] = round(difference)
    return found


def measure(*, restarts: int, kind: str, nproc: int) -> dict[str, Any]:
    """One run with so many restarts."""
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    begin = time.monotonic()
    look = Look(folder, kind=kind, nproc=nproc)
    try:
        look.take(restarts)
    finally:
        if len(look.looks) <= restarts:
            look.process.send_signal(signal.SIGTERM)
        code = look.end()
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "kind": kind,
        "restarts": restarts,
        "nproc": nproc,
        "exit_code": code,
        "seconds": round(time.monotonic() - begin, 1),
        "stayed": look.stayed,
        "at_the_end": look.looks[-1],
        "growth": growth(look.looks),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--restarts", type=int, default=50)
    parser.add_argument("--kind", choices=sorted(SCRIPTS), default="ddp")
    parser.add_argument("--nproc", type=int, default=2)
    words = parser.parse_args()
    print(json.dumps(measure(restarts=words.restarts, kind=words.kind, nproc=words.nproc)))


if __name__ == "__main__":
    main()
