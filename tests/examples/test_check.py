"""The demo's checker, run on made-up evidence: it must see each thing that can be wrong with a demo."""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aimaster.core.commands import ENDED_GENERATION, Decision, Reason, StartWorkers
from aimaster.core.events import (
    Event,
    FirstStepDone,
    HangKind,
    NodeDied,
    NodePrepared,
    WorkerExited,
    WorkersHung,
)
from aimaster.core.policy import Policy
from aimaster.ids import Generation, Incarnation, NodeId
from aimaster.journal.base import Record
from aimaster.journal.sqlite import SqliteJournal

np = pytest.importorskip("numpy")
save_file = pytest.importorskip("safetensors.numpy").save_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "hello_deepspeed"
STEPS, KILLED_AT, LOST_AT, START = 30, 10, 20, 1_000_000.0

Evidence = dict[str, Any]


def step_line(
    rank: int, step: int, wall_s: float, life: tuple[int, int | None, str | None, str]
) -> dict[str, Any]:
    generation, resumed_step, tier, node = life
    return {
        "step": step,
        "loss": 9.0 - step / 10,
        "wall_s": wall_s,
        "rank": rank,
        "pid": generation * 10 + rank,
        "generation": generation,
        "resumed_step": resumed_step,
        "restored_from": tier,
        "node": node,
    }


def good_evidence() -> Evidence:
    """A demo as it should be: ten steps per life, one step done again, three seconds and eight seconds."""
    faulted: list[dict[str, Any]] = []
    for rank in (0, 1):
        lives = (
            (1, None, None, "ab"[rank], 1, KILLED_AT, START),
            (2, KILLED_AT - 1, "memory", "ab"[rank], KILLED_AT, LOST_AT, START + 12),
            (3, LOST_AT, "peer" if rank else "memory", "ac"[rank], LOST_AT + 1, STEPS, START + 32),
        )
        for generation, resumed, tier, node, first, last, begin in lives:
            faulted += [
                step_line(rank, step, begin + index, (generation, resumed, tier, node))
                for index, step in enumerate(range(first, last + 1))
            ]
    undisturbed = [
        step_line(rank, step, START + 100 + step, (1, None, None, "ab"[rank]))
        for rank in (0, 1)
        for step in range(1, STEPS + 1)
    ]
    killed, lost = START + KILLED_AT - 0.5, START + 12 + LOST_AT - KILLED_AT + 0.5
    return {
        "plan": {"steps": STEPS, "world_size": 2, "seed": 1, "faults": ["worker_killed", "node_lost"]},
        "faults": [
            {"kind": "worker_killed", "wall_s": killed, "worker_pids": [10], "processes": [], "node": ""},
            {"kind": "node_lost", "wall_s": lost, "worker_pids": [21], "processes": [], "node": "b"},
        ],
        "faulted": faulted,
        "undisturbed": undisturbed,
        "incidents": [
            {"kind": "worker_killed", "at_wall_s": killed + 0.25},
            {"kind": "node_lost", "at_wall_s": lost + 0.5},
        ],
    }


def tensors() -> dict[str, Any]:
    """Final state with a negative zero and a NaN, which only a comparison of bits tells apart rightly."""
    weight = np.array([[1.5, -0.0], [np.nan, 2.0]], dtype=np.float32)
    return {f"{kind}/w": weight.copy() for kind in ("weight", "master", "exp_avg", "exp_avg_sq")}


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_journal(path: Path, incidents: list[dict[str, Any]]) -> None:
    """A master's journal with these incidents, each of which is over a moment later."""
    path.parent.mkdir(parents=True)
    with SqliteJournal.open(path) as journal:
        journal.begin_life(Incarnation("1"), policy=Policy(), at_s=0.0, wall_s=START)
        for number, incident in enumerate(incidents, 1):
            for event, decision, later_s in story(number, incident):
                wall_s = incident["at_wall_s"] + later_s
                journal.append(
                    [Record(event=event, decision=decision, digest="", at_s=wall_s - START, wall_s=wall_s)]
                )


def story(number: int, incident: dict[str, Any]) -> list[tuple[Event, Decision, float]]:
    """What the master saw and decided about one fault: the failure, the new start, its first step."""
    node, kind = NodeId(incident.get("node", "b")), incident["kind"]
    who: dict[str, Any] = {"node": node, "incarnation": Incarnation("2"), "seq": number}
    failed: Event = NodeDied(**who, silent_s=6.0)
    if kind == "worker_killed":
        failed = WorkerExited(
            **who,
            generation=Generation(number),
            local_rank=0,
            rank=incident.get("rank", 0),
            exit_code=None,
            signal=9,
            step=1,
        )
    elif kind == "worker_hung":
        failed = WorkersHung(
            generation=Generation(number),
            kind=HangKind.STOPPED,
            node=node,
            culprits=incident["culprits"],
            stalled_s=3.0,
            limit_s=3.0,
            step=1,
        )
    new = Generation(number + 1)
    start = StartWorkers(
        node=NodeId("b"), generation=new, attempt=number, node_rank=0, nodes=1, first_rank=0, world_size=1,
        master_addr="127.0.0.1", master_port=1, saver_lead="", progress_expected=True,
    )  # fmt: skip
    return [
        (failed, Decision(commands=(), reason=Reason.WORKER_FAILED, facts={ENDED_GENERATION: number}), 0.0),
        (
            NodePrepared(**who, generation=new, rendezvous_port=1),
            Decision(commands=(start,), reason=Reason.GENERATION_PREPARED),
            0.1,
        ),
        (
            FirstStepDone(**who, generation=new, step=number),
            Decision(commands=(), reason=Reason.PROGRESS),
            3.0,
        ),
    ]


def judge(
    folder: Path, evidence: Evidence, finals: tuple[Any, Any] | None = None
) -> tuple[int, dict[str, Any]]:
    """Write the evidence, run the checker as the demo does, and return its exit code and report."""
    (folder / "plan.json").write_text(json.dumps(evidence["plan"]))
    write_lines(folder / "faults.jsonl", evidence["faults"])
    write_journal(folder / "faulted" / "nodes" / "a" / "state" / "journal.db", evidence["incidents"])
    for run, final in zip(("faulted", "undisturbed"), finals or (tensors(), tensors()), strict=True):
        for rank in (0, 1):
            lines = [line for line in evidence[run] if line["rank"] == rank]
            write_lines(folder / run / "steps" / f"rank{rank}.jsonl", lines)
        save_file(final, folder / run / "final.safetensors")
        held = evidence.get(f"held_{run}", {})
        empty = {"token": "none", "processes": {}, "unix_sockets": [], "shared_memory": []}
        (folder / run / "held.json").write_text(json.dumps({**empty, **held}))
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "check.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (folder / "report.json").exists(), done.stderr
    return done.returncode, json.loads((folder / "report.json").read_text())


def test_good_evidence_gives_the_report_of_the_schema(tmp_path: Path) -> None:
    code, report = judge(tmp_path, good_evidence())
    assert report["problems"] == []
    assert code == 0
    assert report["schema"] == 1
    assert report["bit_equal"] is True
    assert report["world_size"] == 2
    assert report["steps"] == STEPS
    assert report["loss_first"] == pytest.approx(8.9)
    assert report["loss_last"] == pytest.approx(6.0)
    assert report["leftovers"] == {"processes": 0, "sockets": 0, "shm_bytes": 0}
    assert report["dataset"]["name"] == "pydoc_data.topics"
    assert report["dataset"]["bytes"] > 400_000
    page = (EXAMPLE.parents[1] / "docs" / "reference" / "demo-report.md").read_text()
    fields = set(report) | {f"{name}.{key}" for name in ("dataset", "leftovers") for key in report[name]}
    fields |= {f"faults[].{key}" for key in report["faults"][0]}
    assert set(re.findall(r"^\| `([\w.\[\]]+)` ", page, flags=re.M)) == fields
    assert (
        report["faults"]
        == [
            {
                "kind": "worker_killed",
                "at_step": 10,
                "detected_s": 0.25,
                "recovered_s": 3.5,
                "resumed_step": 9,
                "recomputed_steps": 1,
                "restored_from": "memory",
            },
            {
                "kind": "node_lost",
                "at_step": 20,
                "detected_s": 0.5,
                "recovered_s": 9.5,
                "resumed_step": 20,
                "recomputed_steps": 0,
                "restored_from": "peer",
            },
        ]
        or report["faults"]
    )


def one_weight(evidence: Evidence) -> tuple[Any, Any]:
    changed = tensors()
    changed["master/w"][1, 1] = np.nextafter(np.float32(2), np.float32(3))
    return tensors(), changed


def sign_of_zero(evidence: Evidence) -> tuple[Any, Any]:
    changed = tensors()
    changed["exp_avg/w"][0, 1] = 0.0
    return changed, tensors()


def missing_tensor(evidence: Evidence) -> tuple[Any, Any]:
    changed = tensors()
    del changed["exp_avg_sq/w"]
    return tensors(), changed


@pytest.mark.parametrize("change", [one_weight, sign_of_zero, missing_tensor])
def test_one_changed_bit_is_seen(tmp_path: Path, change: Callable[[Evidence], tuple[Any, Any]]) -> None:
    evidence = good_evidence()
    code, report = judge(tmp_path, evidence, change(evidence))
    assert report["bit_equal"] is False
    assert code == 1


def other_loss(evidence: Evidence) -> str:
    evidence["undisturbed"][7]["loss"] += 1e-6
    return "losses of the two runs differ"


def lost_step(evidence: Evidence) -> str:
    evidence["faulted"] = [line for line in evidence["faulted"] if line["step"] != 15]
    return "steps have no line"


def silent_restart(evidence: Evidence) -> str:
    for line in evidence["faulted"]:
        if line["generation"] == 2:
            line["resumed_step"] = None
    return "did not resume from a checkpoint"


def ranks_apart(evidence: Evidence) -> str:
    for line in evidence["faulted"]:
        if line["generation"] == 2 and line["rank"] == 1:
            line["resumed_step"] = 8
    return "resumed from different steps"


def from_disk(evidence: Evidence) -> str:
    for line in evidence["faulted"]:
        if line["generation"] == 3 and line["rank"] == 1:
            line["restored_from"] = "disk"
    return "node_lost: restored from disk"


def not_dead(evidence: Evidence) -> str:
    for line in evidence["faulted"]:
        if line["generation"] == 2 and line["rank"] == 0:
            line["pid"] = 10
    return "has logged steps afterwards"


def too_slow(evidence: Evidence) -> str:
    for line in evidence["faulted"]:
        line["wall_s"] += 60 if line["generation"] == 3 else 0
    return "s to the next new step, promised are 15 s"


def no_incident(evidence: Evidence) -> str:
    evidence["incidents"].pop()
    return "the journal tells of no incident"


def no_journal(evidence: Evidence) -> str:
    evidence["incidents"].clear()
    return "worker_killed: the journal tells of no incident"


def lost_node_trains(evidence: Evidence) -> str:
    for line in evidence["faulted"]:
        if line["generation"] == 3 and line["rank"] == 1:
            line["node"] = "b"
    return "the lost node still trains"


def other_rank_blamed(evidence: Evidence) -> str:
    evidence["incidents"][0]["rank"] = 1
    return "worker_killed: the journal blames rank 1, hurt was rank 0"


def fault_not_made(evidence: Evidence) -> str:
    evidence["faults"].pop()
    return "not every planned fault was made"


@pytest.mark.parametrize(
    "change",
    [
        other_loss, lost_step, silent_restart, ranks_apart, from_disk, not_dead, too_slow, no_incident,
        no_journal, lost_node_trains, fault_not_made, other_rank_blamed,
    ],
)  # fmt: skip
def test_each_broken_promise_is_a_problem(tmp_path: Path, change: Callable[[Evidence], str]) -> None:
    evidence = good_evidence()
    expected = change(evidence)
    code, report = judge(tmp_path, evidence)
    assert any(expected in problem for problem in report["problems"]), report["problems"]
    assert code == 1


def blame(folder: Path, fault: dict[str, Any], incident: dict[str, Any]) -> list[str]:
    """What is said of a fault to rank 0 where the journal tells of this incident."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        told = importlib.import_module("told")
    finally:
        sys.path.remove(str(EXAMPLE))
    write_journal(folder / "nodes" / "a" / "state" / "journal.db", [{"at_wall_s": START + 1, **incident}])
    said: list[str] = []
    incidents = told.read_incidents(folder, said.append)
    told.check_blame({"wall_s": START + 0.5, **fault}, [0, 0], incidents, said.append)
    return said


@pytest.mark.parametrize(
    ("culprits", "said"),
    [
        ((0,), []),
        ((), ["worker_hung: the journal blames rank nobody, hurt was rank 0"]),
        ((1,), ["worker_hung: the journal blames rank 1, hurt was rank 0"]),
        ((0, 1), ["worker_hung: the journal blames rank 0, 1, hurt was rank 0"]),
    ],
)
def test_a_frozen_rank_must_be_blamed_and_nobody_else(
    tmp_path: Path, culprits: tuple[int, ...], said: list[str]
) -> None:
    assert blame(tmp_path, {"kind": "worker_hung"}, {"kind": "worker_hung", "culprits": culprits}) == said


@pytest.mark.parametrize("node", ["b", "c"])
def test_a_lost_node_must_be_blamed_and_no_other(tmp_path: Path, node: str) -> None:
    said = blame(tmp_path, {"kind": "node_lost", "node": "b"}, {"kind": "node_lost", "node": node})
    assert said == ([] if node == "b" else ["node_lost: the journal blames node c, hurt was b"])


@pytest.mark.slow
def test_leftovers_are_counted(tmp_path: Path) -> None:
    """A living process with the job's token, its listening socket and its memory file, and a socket file."""
    token = "a-token-of-this-test"
    script = (
        "import os, socket, sys\n"
        "memory = os.memfd_create('left'); os.write(memory, b'x' * 8192)\n"
        "server = socket.create_server(('127.0.0.1', 0))\n"
        "print('ready', flush=True); sys.stdin.read()\n"
    )
    path = str(tmp_path / "left.sock")
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(path)
        process = subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, "HELLO_DEEPSPEED_TOKEN": token},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        evidence = good_evidence()
        evidence["held_faulted"] = {"token": token, "unix_sockets": [path]}
        code, report = judge(tmp_path, evidence)
        process.communicate(b"")
    assert report["leftovers"] == {"processes": 1, "sockets": 2, "shm_bytes": 8192}
    assert code == 1


def test_missing_folder_is_a_usage_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "check.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "plan.json" in done.stderr
    assert "Traceback" not in done.stderr
