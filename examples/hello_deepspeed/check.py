"""Judge a finished demo from what it left behind, and write ``report.json``.

    python check.py build/demo

Theory of operation: nothing here is told by the driver how the job went. It reads

* ``plan.json``: what was to be done: steps, ranks, seed;
* ``faults.jsonl``: what was done to the job, and when (the driver hurts it, so only the driver knows);
* ``{faulted,undisturbed}/steps/rank*.jsonl``: one line per rank and finished step, appended by the training
  script itself, over all of its lives;
* ``faulted/nodes/*/state/journal.db``: the master's journal, from which the incidents follow;
* ``{faulted,undisturbed}/final.safetensors``: final weights, masters and moments;
* ``{faulted,undisturbed}/held.json``: what the processes held of the machine.

From these follow the figures of the report; contradictions between them are problems. The exit code is 0 only
if both runs ended bit-equal, nothing is left behind and every fault was recovered as promised.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import pydoc_data.topics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from leftovers import Leftovers, measure
from rich.console import Console
from rich.table import Table
from told import check_blame, detected, read_incidents

from aimaster.journal.incidents import Incident

SCHEMA = 1
RUNS = ("faulted", "undisturbed")
TIERS = ("memory", "peer", "disk")  # nearest first
RECOVERY_LIMIT_S = {"worker_killed": 4.0, "worker_hung": 8.0, "node_lost": 15.0}
RECOMPUTED_MAX = 1
LINGER_S = 5.0  # the kernel may take a moment to take down what was killed last


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One line of a rank's step log."""

    step: int
    loss: float
    wall_s: float
    rank: int
    pid: int
    generation: int
    resumed_step: int | None
    restored_from: str | None
    node: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault of the report, with the names that the report's schema gives."""

    kind: str
    at_step: int
    detected_s: float | None
    recovered_s: float | None
    resumed_step: int | None
    recomputed_steps: int | None
    restored_from: str | None


@dataclass(slots=True)
class Problems:
    """What is not as promised, in the order in which it was found."""

    found: list[str] = field(default_factory=list)

    def add(self, text: str) -> None:
        self.found.append(text)

    def unless(self, promise: bool, text: str) -> None:
        if not promise:
            self.add(text)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file, none if it does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def read_steps(folder: Path, problems: Problems) -> list[Step]:
    """All step lines of a run, in the order of their time."""
    steps = []
    for path in sorted(folder.glob("rank*.jsonl")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                steps.append(Step(**json.loads(line)))
            except (ValueError, TypeError) as error:
                problems.add(f"{path.name}:{number} cannot be read: {error}")
    return sorted(steps, key=lambda line: line.wall_s)


def check_steps(run: str, steps: list[Step], plan: dict[str, Any], problems: Problems) -> dict[Any, float]:
    """Every rank must have done every step, and a step done twice must have had the same loss.

    Returns:
        Loss by rank and step.
    """
    losses: dict[tuple[int, int], float] = {}
    for line in steps:
        known = losses.setdefault((line.rank, line.step), line.loss)
        same = known == line.loss or (math.isnan(known) and math.isnan(line.loss))
        problems.unless(same, f"{run}: rank {line.rank} did step {line.step} again with another loss")
    expected = {(rank, step) for rank in range(plan["world_size"]) for step in range(1, plan["steps"] + 1)}
    missing = sorted(expected - set(losses))
    problems.unless(
        not missing, f"{run}: {len(missing)} steps have no line, the first is (rank, step) {missing[:1]}"
    )
    problems.unless(set(losses) <= expected, f"{run}: lines of steps or ranks that were not planned")
    return losses


def judge_fault(
    fault: dict[str, Any], steps: list[Step], told: tuple[Incident, ...], problems: Problems
) -> Fault:
    """What the logs say about one fault."""
    kind, when = fault["kind"], fault["wall_s"]
    before = [line for line in steps if line.wall_s <= when]
    if not before:
        problems.add(f"{kind}: no step was logged before it")
        return Fault(kind=kind, at_step=0, detected_s=None, recovered_s=None, resumed_step=None,
                     recomputed_steps=None, restored_from=None)  # fmt: skip
    old = before[-1].generation
    at_step = max(line.step for line in steps if line.generation == old)
    killed = set(fault["worker_pids"])
    problems.unless(
        any(line.pid in killed for line in before), f"{kind}: the killed process is in no step log"
    )
    problems.unless(
        not any(line.pid in killed for line in steps if line.wall_s > when + 1),
        f"{kind}: a process that was killed has logged steps afterwards",
    )
    check_blame(fault, (line.rank for line in before if line.pid in killed), told, problems.add)
    later = [line for line in steps if line.generation > old]
    first = [line for line in later if line.generation == min(one.generation for one in later)]
    resumed = {line.resumed_step for line in first}
    problems.unless(
        len(resumed) == 1, f"{kind}: ranks resumed from different steps {sorted(map(str, resumed))}"
    )
    resumed_step = next(iter(resumed)) if len(resumed) == 1 else None
    problems.unless(resumed_step is not None, f"{kind}: training did not resume from a checkpoint")
    if fault.get("node"):
        problems.unless(
            not any(line.node == fault["node"] for line in later), f"{kind}: the lost node still trains"
        )
    return Fault(
        kind=kind,
        at_step=at_step,
        detected_s=detected(kind, when, told, problems.add),
        recovered_s=_recovered(at_step + 1, when, later, problems, kind),
        resumed_step=resumed_step,
        recomputed_steps=max(0, at_step - resumed_step) if resumed_step is not None else None,
        restored_from=_farthest(line.restored_from for line in first),
    )


def _recovered(step: int, when: float, later: list[Step], problems: Problems, kind: str) -> float | None:
    """From the fault until every rank has finished a step that nobody had finished before."""
    ranks = {line.rank for line in later}
    done: dict[int, float] = {}
    for line in later:
        if line.step == step:
            done.setdefault(line.rank, line.wall_s)
    if not done or set(done) != ranks:
        problems.add(f"{kind}: step {step} was never finished")
        return None
    return round(max(done.values()) - when, 3)


def _farthest(tiers: Iterable[str | None]) -> str | None:
    known = [tier for tier in tiers if tier in TIERS]
    return max(known, key=TIERS.index) if known else None


def read_tensors(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name → type, shape and bytes, straight from the file's own header, so that no library can round."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(raw)[8 + length :]
    return {
        name: (entry["dtype"], tuple(entry["shape"]), bytes(body[slice(*entry["data_offsets"])]))
        for name, entry in header.items()
    }


def compare_finals(folder: Path, problems: Problems) -> bool:
    """Whether the final weights and optimizer states are equal, bit by bit."""
    paths = [folder / run / "final.safetensors" for run in RUNS]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        problems.add(f"no final state: {', '.join(missing)}")
        return False
    one, other = map(read_tensors, paths)
    differing = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    problems.unless(bool(one), "the final state holds no tensors")
    for prefix in ("weight/", "master/", "exp_avg/", "exp_avg_sq/"):
        problems.unless(
            any(name.startswith(prefix) for name in one), f"the final state holds no {prefix} tensors"
        )
    if differing:
        problems.add(f"{len(differing)} of {len(one)} final tensors differ: {', '.join(differing[:4])}")
    return bool(one) and not differing


def find_leftovers(folder: Path, problems: Problems) -> Leftovers:
    """What both runs left on the machine."""
    end = time.monotonic() + LINGER_S
    while True:
        found = [measure(folder / run / "held.json") for run in RUNS]
        total = Leftovers(
            processes=sum(one.processes for one in found),
            sockets=sum(one.sockets for one in found),
            shm_bytes=sum(one.shm_bytes for one in found),
            names=tuple(name for one in found for name in one.names),
        )
        if not (total.processes or total.sockets or total.shm_bytes) or time.monotonic() > end:
            break
        time.sleep(0.1)
    for name in total.names:
        problems.add(f"left behind: {name}")
    problems.unless(not total.shm_bytes, f"left behind: {total.shm_bytes} bytes of shared memory")
    return total


def dataset() -> dict[str, Any]:
    """The corpus as it lies on this machine."""
    text_bytes = sum(len(text.encode()) for text in pydoc_data.topics.topics.values())
    spec = importlib.util.find_spec("pydoc_data.topics")
    file = Path(spec.origin) if spec and spec.origin else None
    file_bytes = file.stat().st_size if file and file.suffix == ".py" and file.exists() else text_bytes
    return {"name": "pydoc_data.topics", "bytes": file_bytes, "text_bytes": text_bytes}


def build_report(folder: Path, limits: dict[str, float]) -> dict[str, Any]:
    """All figures and problems of the demo in ``folder``."""
    problems = Problems()
    plan = json.loads((folder / "plan.json").read_text())
    faults = read_lines(folder / "faults.jsonl")
    steps = {run: read_steps(folder / run / "steps", problems) for run in RUNS}
    losses = {run: check_steps(run, steps[run], plan, problems) for run in RUNS}
    problems.unless(losses["faulted"] == losses["undisturbed"], "the losses of the two runs differ")
    problems.unless(
        sorted(fault["kind"] for fault in faults) == sorted(plan["faults"]),
        "not every planned fault was made",
    )
    told = read_incidents(folder / "faulted", problems.add)
    judged = [judge_fault(fault, steps["faulted"], told, problems) for fault in faults]
    for fault in judged:
        check_promises(fault, limits, problems)
    left = find_leftovers(folder, problems)
    first, last = (_mean_loss(losses["faulted"], plan, step) for step in (1, plan["steps"]))
    problems.unless(last < first, f"the loss did not fall: {first} at step 1, {last} at the end")
    return {
        "schema": SCHEMA,
        "dataset": dataset(),
        "world_size": plan["world_size"],
        "steps": plan["steps"],
        "loss_first": first,
        "loss_last": last,
        "bit_equal": compare_finals(folder, problems),
        "leftovers": {"processes": left.processes, "sockets": left.sockets, "shm_bytes": left.shm_bytes},
        "faults": [asdict(fault) for fault in judged],
        "problems": problems.found,
    }


def check_promises(fault: Fault, limits: dict[str, float], problems: Problems) -> None:
    """A fault must be recovered in time, from memory or a peer, with at most one step done again."""
    limit = limits.get(fault.kind, math.inf)
    if fault.recovered_s is not None and fault.recovered_s > limit:
        problems.add(f"{fault.kind}: {fault.recovered_s} s to the next new step, promised are {limit:g} s")
    problems.unless(
        fault.restored_from in ("memory", "peer"), f"{fault.kind}: restored from {fault.restored_from}"
    )
    if fault.recomputed_steps is not None and fault.recomputed_steps > RECOMPUTED_MAX:
        problems.add(f"{fault.kind}: {fault.recomputed_steps} steps were done again")


def _mean_loss(losses: dict[Any, float], plan: dict[str, Any], step: int) -> float:
    values = [losses[rank, step] for rank in range(plan["world_size"]) if (rank, step) in losses]
    return round(float(np.mean(values)), 4) if values else math.nan


def show(report: dict[str, Any], console: Console) -> None:
    """The incidents as a table, and the verdict."""
    table = Table(title="What happened, and how training went on")
    for title in (
        "fault",
        "at step",
        "detected after",
        "next new step after",
        "resumed at",
        "recomputed",
        "from",
    ):
        table.add_column(title, justify="left" if title in ("fault", "from") else "right")
    for fault in report["faults"]:
        table.add_row(
            fault["kind"].replace("_", " "),
            str(fault["at_step"]),
            _seconds(fault["detected_s"]),
            _seconds(fault["recovered_s"]),
            str(fault["resumed_step"]),
            str(fault["recomputed_steps"]),
            str(fault["restored_from"]),
        )
    console.print(table)
    equal = "bit-equal" if report["bit_equal"] else "NOT equal"
    console.print(
        f"weights and optimizer state of the faulted and the undisturbed run: {equal}", highlight=False
    )
    console.print(f"left behind: {report['leftovers']}", highlight=False)
    for problem in report["problems"]:
        console.print(f"not as promised: {problem}", style="red", highlight=False, markup=False)


def tell_stories(folder: Path, console: Console) -> None:
    """What `aimaster explain` says of every incident in the journal."""
    aimaster = str(Path(sysconfig.get_path("scripts")) / "aimaster")
    told = read_incidents(folder / "faulted", Problems())
    for path in sorted(folder.glob("faulted/nodes/*/state/journal.db")):
        for incident in told:
            done = subprocess.run(
                [aimaster, "explain", str(incident.id), "--state-dir", str(path.parent)],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            console.print(done.stdout.split("\n\n")[0] or done.stderr, highlight=False, markup=False)


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description="Judge a finished demo from what it left behind.")
    parser.add_argument("folder", type=Path, help="the demo's folder, for example build/demo")
    parser.add_argument(
        "--time_factor", type=float, default=1.0, help="multiplies the promised times (slow machine)"
    )
    arguments = parser.parse_args()
    if not (arguments.folder / "plan.json").exists():
        print(f"check: {arguments.folder} holds no plan.json; run demo.py first", file=sys.stderr)
        return 2
    limits = {kind: limit * arguments.time_factor for kind, limit in RECOVERY_LIMIT_S.items()}
    report = build_report(arguments.folder, limits)
    target = arguments.folder / "report.json"
    target.write_text(json.dumps(report, indent=2) + "\n")
    console = Console(width=None if sys.stdout.isatty() else 120)
    tell_stories(arguments.folder, console)
    show(report, console)
    console.print(f"report: {target}", highlight=False)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
