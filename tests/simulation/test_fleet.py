"""Fleets in virtual time: scenarios with golden traces, drawn faults, and what `aimaster simulate` says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aimaster.cli.app import app
from aimaster.cli.simulate import Asked, fleet_of
from aimaster.core.policy import Policy
from aimaster.errors import UsageError
from aimaster.journal.incidents import IncidentKind
from aimaster.simulation.checkers import Violation
from aimaster.simulation.faults import Fault, FaultKind
from aimaster.simulation.fleet import Fleet, train
from aimaster.simulation.scenario import parse_duration, parse_mtbf, parse_scenario

SCENARIOS = Path(__file__).parents[1] / "data" / "scenarios"
KEPT: dict[int, str] = {}
"""Seeds of `test_a_swarm_of_fleets` that found something, and what."""


def simulated(*words: str) -> str:
    done = CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_scenario_is_decided_as_ever(path: Path) -> None:
    """`UPDATE_TRACES=1` writes the traces anew; the diff then is what a change of the core means."""
    asked = Asked(nodes=None, minutes=None, faults=str(path), seed=None, seeds=1, policies=(), as_json=False)
    told = "".join(f"{line}\n" for line in train(fleet_of(asked)).trace)
    golden = path.with_suffix(".trace")
    if os.environ.get("UPDATE_TRACES"):
        golden.write_text(told)
    assert told == golden.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*KEPT, *range(4)])
def test_a_swarm_of_fleets(seed: int) -> None:
    fleet = Fleet(nodes=16 + 8 * seed, spares=seed, minutes=20, seed=seed, mtbf_s=120.0)
    outcome = train(fleet)
    assert outcome.drained_healthy == ()
    assert outcome.faults > 0
    assert train(fleet) == outcome, "the same seed gives the same run"


def test_faults_are_seen_and_overcome_and_their_cost_is_counted() -> None:
    faults = (
        Fault(kind=FaultKind.KILL_WORKER, at_s=60.0, node=3, lasts_s=0.0),
        Fault(kind=FaultKind.KILL_NODE, at_s=120.0, node=5, lasts_s=0.0),
    )
    disturbed = train(Fleet(nodes=8, spares=1, minutes=5, faults=faults))
    calm = train(Fleet(nodes=8, spares=1, minutes=5))
    assert calm.incidents == ()
    assert {one.kind for one in disturbed.incidents} >= {IncidentKind.NODE_LOST}
    assert len(disturbed.detection_s) == len(disturbed.recovery_s) == 2
    assert disturbed.steps < calm.steps
    assert disturbed.lost_node_hours > calm.lost_node_hours
    assert disturbed.goodput == pytest.approx(disturbed.steps * 5.0 / 300.0)


def test_a_job_that_is_stuck_says_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aimaster.simulation.training.Training.join", lambda *given: None)
    with pytest.raises(Violation, match=r"stuck .*waits for"):
        train(Fleet(nodes=2, minutes=1))


def test_policies_are_compared_on_the_same_seeds(tmp_path: Path) -> None:
    patient, strict = tmp_path / "patient.yaml", tmp_path / "strict.yaml"
    patient.write_text("detector: {suspect_s: 30, dead_s: 60}\n")
    strict.write_text("worker_failures: {limit: 0}\n")
    words = ["--faults", "mtbf=2m", "--nodes", "8+2", "--minutes", "20", "--seeds", "2"]
    told = json.loads(simulated(*words, "--policy", str(patient), "--policy", str(strict), "--json"))
    assert told["schema"] == 1
    assert [one["policy"] for one in told["policies"]] == ["patient.yaml", "strict.yaml"]
    one, other = (policy["summary"] for policy in told["policies"])
    assert one["ended"] == 0
    assert other["ended"] > 0, "one failure of a worker is one too many"
    assert other["goodput"] < one["goodput"]
    assert [run["seed"] for run in told["policies"][0]["runs"]] == [0, 1]
    assert "goodput" in simulated(*words)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("at once kill_node n1", "no duration"),
        ("nodes 4\n1m explode n1", "no kind of fault"),
        ("1m kill_node", "needs one node"),
        ("1m kill_node n5-n2", "ends before"),
        ("1m crash_master n1", "strikes no node"),
        ("1m kill_node n1 for ever", "no duration"),
        ("nodes many", "nodes needs one number"),
        ("nodes -1", "must not be negative"),
    ],
)
def test_a_wrong_line_is_named(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        parse_scenario(text, where="day.txt")
    assert f"day.txt, line {text.count(chr(10)) + 1}" in str(raised.value)


def test_durations() -> None:
    assert parse_duration("2m30s") == 150.0
    assert parse_duration("1.5h") == 5400.0
    assert parse_mtbf("2000h/node", nodes=100) == 72_000.0
    for text in ("", "5", "m5", "-1s", "1 s"):
        with pytest.raises(ValueError, match="no duration"):
            parse_duration(text)


@pytest.mark.parametrize(
    "words",
    [
        ["--nodes", "0"],
        ["--minutes", "0"],
        ["--seeds", "0"],
        ["--nodes", "few"],
        ["--nodes", "3+-1"],
        ["--faults", "mtbf=soon"],
        ["--faults", "absent.txt"],
        ["--policy", "absent.yaml"],
        ["--nodes", "2", "--faults", str(SCENARIOS / "rack.txt")],
    ],
    ids=" ".join,
)
def test_bad_words_are_usage_errors(words: list[str]) -> None:
    with pytest.raises(UsageError):
        CliRunner().invoke(app, ["simulate", *words], catch_exceptions=False)


def test_the_default_policy_is_the_masters_own() -> None:
    assert Fleet(nodes=1, minutes=1).policy == Policy()
