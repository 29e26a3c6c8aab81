"""`aimaster simulate`: what would this policy have done to a cluster of N nodes?

JSON has ``"schema": 1``; the text is made of the same object. The same options and seed give the same figures
on every machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from aimaster.errors import UsageError
from aimaster.rules.policies import PolicyFile, read_policy
from aimaster.rules.reading import read_text
from aimaster.simulation.fleet import Fleet, Outcome, train
from aimaster.simulation.scenario import Scenario, parse_mtbf, parse_scenario

__all__ = ["Asked", "fleet_of", "simulate"]

SCHEMA = 1
NODES_MAX = 100_000
SCENARIO_CHARS_MAX = 1024 * 1024
MTBF = "mtbf="

Plain = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line. None: the scenario's word, else the default."""

    nodes: str | None
    """``64``, or ``64+2`` with two spares."""
    minutes: float | None
    faults: str | None
    seed: int | None
    seeds: int
    policies: tuple[Path, ...]
    as_json: bool


def simulate(asked: Asked) -> str:
    """Run every policy on the same seeds; what `aimaster simulate` prints.

    Raises:
        UsageError: An option, the scenario or a policy is wrong.
        Violation: The core broke a promise; it says which, and how it came to that.
    """
    fleet = fleet_of(asked)
    named = [(path.name, read_policy(path)) for path in asked.policies] or [("default", PolicyFile())]
    if asked.seeds < 1:
        raise UsageError("--seeds needs a number above 0")
    begin = time.process_time()
    found = [
        (name, [_run(fleet, policy, fleet.seed + number) for number in range(asked.seeds)])
        for name, policy in named
    ]
    report = _report(fleet, found)
    if asked.as_json:
        return json.dumps(report, indent=2) + "\n"
    print(f"simulated in {time.process_time() - begin:.1f} s of processor time", file=sys.stderr)
    return _render(report)


def _run(fleet: Fleet, policy: PolicyFile, seed: int) -> Outcome:
    return train(replace(fleet, policy=policy.policy, detector=policy.detector, seed=seed))


def fleet_of(asked: Asked) -> Fleet:
    """What is simulated, from the command line and the scenario.

    Raises:
        UsageError: An option or the scenario is wrong.
    """
    by_mtbf = asked.faults is not None and asked.faults.startswith(MTBF)
    scenario = Scenario() if asked.faults is None or by_mtbf else _read(Path(asked.faults))
    told = dict(scenario.settings)
    if asked.nodes is not None:
        told["nodes"], told["spares"] = _nodes(asked.nodes)
    if asked.minutes is not None:
        told["minutes"] = asked.minutes
    if asked.seed is not None:
        told["seed"] = asked.seed
    fleet = Fleet(
        nodes=int(told.get("nodes", 64)),
        minutes=told.get("minutes", 10.0),
        seed=int(told.get("seed", 0)),
        spares=int(told.get("spares", 0)),
        min_nodes=int(told["min_nodes"]) if "min_nodes" in told else None,
        workers=int(told.get("workers", 8)),
        step_s=told.get("step_s", 5.0),
        faults=scenario.faults,
    )
    _check(fleet)
    if asked.faults is None or not by_mtbf:
        return fleet
    try:
        mtbf_s = parse_mtbf(asked.faults.removeprefix(MTBF), nodes=fleet.nodes)
    except ValueError as error:
        raise UsageError(str(error), where=f"--faults {asked.faults}") from error
    return replace(fleet, mtbf_s=mtbf_s)


def _read(path: Path) -> Scenario:
    text = read_text(path, what="the scenario", chars_max=SCENARIO_CHARS_MAX)
    return parse_scenario(text, where=str(path))


def _nodes(text: str) -> tuple[int, int]:
    """Nodes and spares."""
    nodes, _, spares = text.partition("+")
    try:
        return int(nodes), int(spares or 0)
    except ValueError:
        raise UsageError(f"--nodes {text} is no number of nodes", next_step="as in 64, or 64+2") from None


def _check(fleet: Fleet) -> None:
    total = fleet.nodes + fleet.spares
    if fleet.nodes < 1 or fleet.spares < 0 or total > NODES_MAX:
        raise UsageError(f"1 to {NODES_MAX} nodes can be simulated, got {fleet.nodes}+{fleet.spares}")
    if fleet.min_nodes is not None and not 1 <= fleet.min_nodes <= fleet.nodes:
        raise UsageError(f"min_nodes needs 1 to {fleet.nodes}, got {fleet.min_nodes}")
    if not (fleet.minutes > 0 and fleet.step_s > 0 and fleet.workers > 0):
        raise UsageError("minutes, step_s and workers need numbers above 0")
    last = max((fault.node for fault in fleet.faults), default=0)
    if last >= total:
        raise UsageError(f"the scenario strikes n{last}, nodes are n0 to n{total - 1}")


def _report(fleet: Fleet, found: Sequence[tuple[str, Sequence[Outcome]]]) -> Plain:
    return {
        "schema": SCHEMA,
        "nodes": fleet.nodes,
        "spares": fleet.spares,
        "minutes": fleet.minutes,
        "step_s": fleet.step_s,
        "seeds": [outcome.seed for outcome in found[0][1]],
        "policies": [
            {"policy": name, "summary": _summary(runs), "runs": [_plain(run) for run in runs]}
            for name, runs in found
        ],
    }


def _summary(runs: Sequence[Outcome]) -> Plain:
    detection = [delay for run in runs for delay in run.detection_s]
    recovery = [delay for run in runs for delay in run.recovery_s]
    return {
        "goodput": _mean([run.goodput for run in runs]),
        "lost_node_hours": _mean([run.lost_node_hours for run in runs]),
        "faults": sum(run.faults for run in runs),
        "incidents": sum(len(run.incidents) for run in runs),
        "detection_median_s": _median(detection),
        "detection_max_s": _rounded(max(detection, default=None)),
        "recovery_median_s": _median(recovery),
        "recovery_max_s": _rounded(max(recovery, default=None)),
        "healthy_drained": sum(len(run.drained_healthy) for run in runs),
        "ended": sum(run.exit_code is not None for run in runs),
    }


def _plain(run: Outcome) -> Plain:
    return {
        "seed": run.seed,
        "exit_code": run.exit_code,
        "steps": run.steps,
        "goodput": _rounded(run.goodput),
        "lost_node_hours": _rounded(run.lost_node_hours),
        "faults": run.faults,
        "incidents": dict(sorted(Counter(one.kind.value for one in run.incidents).items())),
        "healthy_drained": list(run.drained_healthy),
        "core_steps": run.core_steps,
        "digest": run.digest,
    }


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(statistics.fmean(values))


def _median(values: Sequence[float]) -> float | None:
    return _rounded(statistics.median(values)) if values else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


_ROWS = (
    ("goodput", "goodput", "{:.2%}"),
    ("lost_node_hours", "lost node-hours", "{:.1f}"),
    ("faults", "faults that struck", "{}"),
    ("incidents", "incidents", "{}"),
    ("detection_median_s", "detected after, median", "{:.2f} s"),
    ("detection_max_s", "detected after, most", "{:.2f} s"),
    ("recovery_median_s", "new step after, median", "{:.2f} s"),
    ("recovery_max_s", "new step after, most", "{:.2f} s"),
    ("healthy_drained", "healthy nodes drained", "{}"),
    ("ended", "jobs that ended", "{}"),
)


def _render(report: Plain) -> str:
    policies = report["policies"]
    seeds = report["seeds"]
    assert isinstance(policies, list)
    assert isinstance(seeds, list)
    table = Table(
        title=f"{report['nodes']} nodes, {report['spares']} spares, {report['minutes']:g} minutes, "
        f"{len(seeds)} {'run' if len(seeds) == 1 else 'runs'}"
    )
    table.add_column("policy")
    for one in policies:
        table.add_column(one["policy"], justify="right")
    for key, title, shape in _ROWS:
        values = [one["summary"][key] for one in policies]
        table.add_row(title, *("–" if value is None else shape.format(value) for value in values))
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(table)
    return capture.get()
