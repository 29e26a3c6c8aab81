"""Whether a slow rank is named, how soon, and whether nobody is named where nobody is to blame.

    python -m benchmarks.slow_rank --seconds 120 --json slow.json

Four ranks of DDP on gloo under `aimaster run`, with nothing changed in the script (`ddp_loop.py`), which
together need less than two processors. In each case the kernel lets ranks run less than they want (a cgroup
quota), or other processes want the same processors; then `aimaster status` is asked until it names somebody
or the time is up.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.launchers import LOOP, end, end_on_sigterm
from tests.quota import slowed, why_not

RANKS = 4
SLOW = 2
LOAD = {"BENCH_WIDTH": "512", "BENCH_BATCH": "320", "BENCH_PAUSE_S": "0.022", "BENCH_STEPS": "1000000"}
WARM_UP_STEPS = 100
START_LIMIT_S = 120.0
ASK_S = 1.0
BUSY = "while True: pass"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One case."""

    case: str
    wanted: list[int]
    named: list[int]
    after_s: float | None
    step_ms: tuple[float, float]
    """Before and in the case."""

    @property
    def right(self) -> bool:
        """Whether those were named that should have been, and nobody else."""
        return self.named == self.wanted


class Job:
    """One training under `aimaster run`."""

    def __init__(self, folder: Path) -> None:
        env = {**os.environ, **LOAD, "OMP_NUM_THREADS": "1", "BENCH_TIMES": str(folder / "times")}
        self._run_dir = folder / "run"
        words = ["run", "--run-dir", str(self._run_dir), "--nproc-per-node", str(RANKS), str(LOOP)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aimaster", *words],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def status(self) -> dict[str, Any]:
        """As `aimaster status --json` prints it; empty while nobody answers."""
        words = ["status", "--json", "--run-dir", str(self._run_dir)]
        done = subprocess.run(
            [sys.executable, "-m", "aimaster", *words], capture_output=True, text=True, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {}
        return found

    def steps(self) -> int:
        """Of the rank that is furthest behind."""
        ranks = [rank["steps"] for node in self.status().get("nodes", ()) for rank in node.get("ranks", ())]
        return min(ranks, default=0)

    def pids(self) -> dict[int, int]:
        """Rank → process."""
        rows = self.status().get("processes", ())
        return {row["rank"]: row["pid"] for row in rows if row["role"] == "worker"}


def run_case(case: str, wanted: list[int], disturb: Callable[[Job], Any], seconds: float) -> Outcome:
    """One training, disturbed after it has warmed up."""
    with tempfile.TemporaryDirectory(prefix="slow-rank-") as folder:
        job = Job(Path(folder))
        try:
            limit = time.monotonic() + START_LIMIT_S
            while job.steps() < WARM_UP_STEPS:
                if time.monotonic() > limit:
                    raise SystemExit(f"the training did not start within {START_LIMIT_S:.0f} s")
            before_ms = _step_ms(job)
            with disturb(job):
                begin = time.monotonic()
                named: list[int] = []
                while not named and time.monotonic() < begin + seconds:
                    time.sleep(ASK_S)
                    named = (job.status().get("slow") or {}).get("ranks", [])
                after_s = time.monotonic() - begin if named else None
                return Outcome(
                    case=case, wanted=wanted, named=named, after_s=after_s, step_ms=(before_ms, _step_ms(job))
                )
        finally:
            end(job.process, job.pids().values())


def _step_ms(job: Job) -> float:
    begin, steps = time.monotonic(), job.steps()
    time.sleep(2.0)
    return 1e3 * (time.monotonic() - begin) / max(1, job.steps() - steps)


@contextlib.contextmanager
def quotas(job: Job, *, ranks: Sequence[int], share: float) -> Iterator[None]:
    """Each of these ranks alone gets that share of a processor."""
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            stack.enter_context(slowed([job.pids()[rank]], share=share))
        yield


@contextlib.contextmanager
def neighbours(_: Job, *, count: int) -> Iterator[None]:
    """Other processes that want all the time there is."""
    busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="how long each case is looked at")
    parser.add_argument("--share", type=float, default=0.18, help="of a processor, for a slow rank")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if why_not():
        print(why_not(), file=sys.stderr)
        return 4
    end_on_sigterm()
    share = arguments.share
    cases: list[tuple[str, list[int], Callable[[Job], Any]]] = [
        ("one rank slow", [SLOW], lambda job: quotas(job, ranks=[SLOW], share=share)),
        ("nothing", [], lambda job: contextlib.nullcontext()),
        ("all equally slow", [], lambda job: quotas(job, ranks=range(RANKS), share=share)),
        ("a busy machine", [], lambda job: neighbours(job, count=2)),
    ]
    outcomes = [run_case(name, wanted, disturb, arguments.seconds) for name, wanted, disturb in cases]
    print("| case | wanted | named | after | step before → in the case |\n| --- | --- | --- | --- | --- |")
    for one in outcomes:
        after = "–" if one.after_s is None else f"{one.after_s:.0f} s"
        steps = f"{one.step_ms[0]:.0f} → {one.step_ms[1]:.0f} ms"
        print(f"| {one.case} | {one.wanted or '–'} | {one.named or '–'} | {after} | {steps} |")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1))
    return 0 if all(one.right for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
