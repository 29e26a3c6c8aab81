"""Facts of a group judged without one; joining, refusing and missing nodes with real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import sanitycheck
from sanitycheck.catalogue import by_id
from sanitycheck.catalogue.fleet import FLEET_CHECKS
from sanitycheck.cli import main
from sanitycheck.cli.slurm import first_host, slurm_place
from sanitycheck.drill import parse
from sanitycheck.errors import GroupError, UsageError
from sanitycheck.group.lead import Lead, Schedule
from sanitycheck.group.member import Member
from sanitycheck.group.run import GroupPlace, run_group
from sanitycheck.group.wire import LINE_BYTES_MAX, Lines, send_line
from sanitycheck.group.worker import BOOTSTRAP
from sanitycheck.judge import judge
from sanitycheck.options import Options
from sanitycheck.outcome import Cannot
from sanitycheck.process import probe_environment, search_path
from sanitycheck.reasons import Reason
from sanitycheck.render.sentences import describe, next_step
from sanitycheck.render.text import coverage_line
from sanitycheck.result import Level, Result, Verdict

NAMES = "abcd"
LONG_S = 240.0


def judged(check: str, facts: Mapping[str, Any]) -> Result:
    drill = parse({"schema": 1, "checks": {check: {"facts": facts}}}, path="test")
    return sanitycheck.run(options=Options(only=(check,)), drill=drill).results[0]


def group(*, bad: Mapping[str, float | None] | None = None, me: str = "a", **facts: Any) -> dict[str, Any]:
    """Four nodes that met each other; ``bad`` names pairs (``ab``) and what they reached."""
    pairs = [("ab", "cd"), ("ac", "bd"), ("ad", "bc"), *(((pair,)) for pair in bad or {} if bad)]
    meetings = [
        {"first": pair[0], "second": pair[1], "round": number, "mb_s": (bad or {}).get(pair, 1000.0)}
        for number, row in enumerate(pairs)
        for pair in row
    ]
    members = [{"name": name, "rank": rank, "alone": 100.0} for rank, name in enumerate(NAMES)]
    return {"me": me, "expected": 4, "members": members, "meetings": meetings, **facts}


SLOW_B = {"ab": 10.0, "bd": None, "bc": 20.0}
VERSIONS = [
    {"name": name, "rank": rank, "versions": {"driver": "580", "torch": "2.13"}}
    for rank, name in enumerate(NAMES)
]
MIXED = [*VERSIONS[:3], {"name": "d", "rank": 3, "versions": {"driver": "550", "torch": "2.13"}}]
GONE = [*group()["members"][:3], {"name": "d", "rank": 3, "left": True}]

DRILLS: list[tuple[str, dict[str, Any], str, str, bool]] = [
    ("sw.fleet", {"members": VERSIONS}, "pass", "fleet_equal", False),
    ("sw.fleet", {"members": MIXED}, "fail", "fleet_differs", False),
    ("coll.pair", group(), "pass", "pairs", False),
    ("coll.pair", {"meetings": []}, "skipped", "pair_none", False),
    ("coll.pair", group(bad={"ab": 100.0}), "warn", "pair_slow", False),
    ("coll.pair", group(bad={"ab": None}), "warn", "pair_failed", False),
    ("coll.all", {"together": {"nodes": 4}}, "pass", "all_together", False),
    ("coll.all", {}, "skipped", "all_not_run", False),
    ("coll.all", {"together": {"nodes": 4, "mb_s": None}}, "fail", "all_failed", False),
    ("coll.localise", group(), "pass", "fleet_clear", False),
    ("coll.localise", group(bad=SLOW_B), "fail", "node_bad", False),
    ("coll.localise", group(bad=SLOW_B, me="b"), "fail", "node_bad", True),
    ("coll.localise", group(bad={"ab": None}), "fail", "link_bad", False),
    (
        "coll.localise",
        group(bad=dict.fromkeys(("ab", "cd", "ac", "bd", "ad", "bc"))),
        "fail",
        "common_cause",
        False,
    ),
    ("coll.localise", group(missing=[4], expected=5), "unknown", "group_missing", False),
    ("coll.localise", group(members=GONE), "unknown", "group_left", False),
    ("coll.localise", group(ended="its time was over"), "unknown", "group_ended", False),
    ("coll.localise", group(meetings=[]), "unknown", "group_untested", False),
]


@pytest.mark.parametrize(
    ("check", "facts", "verdict", "reason", "blocking"),
    DRILLS,
    ids=[f"{one[0]}-{one[3]}-{place}" for place, one in enumerate(DRILLS)],
)
def test_drill(check: str, facts: dict[str, Any], verdict: str, reason: str, blocking: bool) -> None:
    result = judged(check, facts)
    assert (result.verdict.value, result.blocking) == (verdict, blocking)
    assert Reason(reason) in {finding.reason for finding in result.findings}
    for finding in result.findings:
        assert finding.reason in by_id(check).reasons
        assert "?" not in describe(finding)
        if finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN):
            assert next_step(finding)


def test_every_reason_of_a_group_is_tried() -> None:
    tried = {(drill[0], drill[3]) for drill in DRILLS}
    wanted = {(check.id, reason.value) for check in FLEET_CHECKS for reason in check.reasons}
    assert wanted - {("coll.localise", "node_doubtful")} <= tried


def test_the_line_about_software_names_node_version_and_majority() -> None:
    (finding,) = judged("sw.fleet", {"members": MIXED}).findings
    assert describe(finding) == "d: driver 550 (others 580)"


def test_without_a_group_its_checks_are_skipped() -> None:
    report = sanitycheck.run(options=Options(only=tuple(check.id for check in FLEET_CHECKS)))
    assert {result.verdict for result in report.results} == {Verdict.SKIPPED}


@pytest.mark.parametrize(
    "args",
    [
        ("--nnodes", "2", "--node-rank", "0"),
        ("--nnodes", "2", "--rdzv-endpoint", "127.0.0.1:1"),
        ("--nnodes", "1", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:1"),
        ("--nnodes", "2", "--node-rank", "2", "--rdzv-endpoint", "127.0.0.1:1"),
        ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "nohost"),
        ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "192.0.2.1:29450"),
        ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1:0", "--pair-share", "3"),
        ("--nnodes", "auto"),
    ],
)
def test_a_group_that_cannot_be_is_a_matter_of_usage(
    args: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    assert main(["run", "--only", "host.limits", *args]) == 2
    assert capsys.readouterr().err.startswith("sanitycheck: ")


@pytest.mark.parametrize(
    ("listed", "first"),
    [("gpu[03-07,12],login1", "gpu03"), ("a", "a"), ("rack1-node[1,5]", "rack1-node1"), ("x1,x2", "x1")],
)
def test_the_first_host_of_slurms_list(listed: str, first: str) -> None:
    assert first_host(listed) == first


def test_slurm_says_where_this_node_stands() -> None:
    step = {"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "2", "SLURM_STEP_NODELIST": "n[1-4]"}
    assert slurm_place(step) == (4, 2, "n1:29450")
    with pytest.raises(UsageError, match="srun"):
        slurm_place({})


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(GroupError, match="in use"):
        Lead(taken.getsockname(), nnodes=2, group="g", schedule=Schedule())


def test_strangers_and_members_of_another_group_are_not_let_in() -> None:
    endpoint = ("127.0.0.1", free_port())
    lead = Lead(endpoint, nnodes=2, group="mine", schedule=Schedule(join_s=30.0, report_s=1.0))
    lead.start()
    try:
        with socket.create_connection(endpoint) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(100) == b""
        other = Member(endpoint, rank=1, group="theirs", join_s=10.0)
        outcome = other.take_part({}, limit_s=30.0, stopped=lambda: False)
        assert isinstance(outcome, Cannot)
        assert "refused" in outcome.message
        other.close()
    finally:
        lead.stop()
        lead.join()


def test_nobody_to_join_is_unknown_and_never_a_bad_node() -> None:
    member = Member(("127.0.0.1", free_port()), rank=1, group="g", join_s=0.5)
    outcome = member.take_part({}, limit_s=5.0, stopped=lambda: False)
    member.close()
    assert isinstance(outcome, Cannot)
    assert "cannot be joined" in outcome.message


@pytest.mark.slow
def test_a_group_that_is_stopped_is_unknown_and_calls_nobody_bad() -> None:
    endpoint = ("127.0.0.1", free_port())
    lead = Lead(endpoint, nnodes=2, group="g", schedule=Schedule(join_s=60.0))
    lead.start()
    member = Member(endpoint, rank=1, group="g", join_s=10.0)
    lead.stop()
    outcome = member.take_part({}, limit_s=60.0, stopped=lambda: False)
    member.close()
    lead.join()
    findings = judge(by_id("coll.localise"), Options(), outcome=outcome)
    assert {finding.verdict for finding in findings} == {Verdict.UNKNOWN}


@pytest.mark.slow
def test_a_lead_that_dies_is_unknown_and_calls_nobody_bad() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        member = Member(server.getsockname(), rank=1, group="g", join_s=10.0)
        peer, _ = server.accept()
        peer.close()
        outcome = member.take_part({}, limit_s=60.0, stopped=lambda: False)
        member.close()
    assert isinstance(outcome, Cannot)
    assert outcome.kind == "child_failed"


def test_lines_are_bounded_and_must_be_objects() -> None:
    lines = Lines()
    assert lines.feed(b'{"a": 1}\n{"b"') == [{"a": 1}]
    assert lines.feed(b": 2}\n") == [{"b": 2}]
    for bad in (b"[1]\n", b"nonsense\n", b"x" * (LINE_BYTES_MAX + 1)):
        with pytest.raises(ValueError):
            Lines().feed(bad)


def test_a_place_in_a_group_is_checked() -> None:
    with pytest.raises(UsageError):
        GroupPlace(nnodes=1, rank=0, endpoint="a:1")


@pytest.mark.slow
def test_two_nodes_on_this_machine_are_clear_together() -> None:
    """The whole way once, over loopback."""
    pytest.importorskip("torch", reason="torch is not installed")
    command = [sys.executable, "-m", "sanitycheck", "run", "--only", "sw.fingerprint", "--nnodes", "2"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--json", "-", "--pair-share", "0.01"]
    children = [
        subprocess.Popen([*command, "--node-rank", str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in (1, 0)
    ]
    for child in children:
        out, _ = child.communicate(timeout=160)
        report = json.loads(out)
        reasons = {result["check"]: result["reason"] for result in report["results"]}
        assert reasons["coll.localise"] == "fleet_clear", out
        assert reasons["coll.all"] == "all_together"
        assert reasons["sw.fleet"] == "fleet_equal"
        assert child.returncode == 0


class Joined:
    """A node of a group that is no more than its connection: it says what the test lets it say."""

    def __init__(self, endpoint: tuple[str, int], rank: int) -> None:
        self._sock = socket.create_connection(endpoint, timeout=LONG_S)
        self._lines = Lines()
        self._heard: list[dict[str, Any]] = []
        self.say({"hello": {"rank": rank, "group": "g", "host": f"h{rank}", "address": "127.0.0.1"}})

    def say(self, message: Mapping[str, Any]) -> None:
        send_line(self._sock, message)

    def hears(self) -> dict[str, Any]:
        """The next message."""
        while not self._heard:
            data = self._sock.recv(1 << 16)
            assert data, "the lead has closed the connection"
            self._heard += self._lines.feed(data)
        return self._heard.pop(0)

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def joined(count: int, *, nnodes: int, schedule: Schedule) -> Iterator[list[Joined]]:
    """A group whose members have joined and reported."""
    endpoint = ("127.0.0.1", free_port())
    lead = Lead(endpoint, nnodes=nnodes, group="g", schedule=schedule)
    members = [Joined(endpoint, rank) for rank in range(count)]  # they wait at the port until it starts
    for member in members:
        member.say({"report": {"alone": 1.0, "blocking": False, "versions": {}}})
    lead.start()
    try:
        yield members
    finally:
        lead.stop()
        lead.join()
        for member in members:
            member.close()


def test_nobody_waits_for_the_other_side_of_a_test_that_went_wrong() -> None:
    """One says at once what is wrong, the other says nothing; all deadlines are longer than this test."""
    schedule = Schedule(join_s=LONG_S, report_s=LONG_S, round_s=LONG_S, whole_s=LONG_S)
    with joined(2, nnodes=2, schedule=schedule) as (first, second):
        order = first.hears()
        assert (order["do"], order["rank"], order["world"]) == ("test", 0, 2)
        first.say({"id": order["id"], "at": "127.0.0.1:1"})
        assert second.hears()["id"] == order["id"]
        second.say({"id": order["id"], "result": {"problem": "no route to host"}})
        end = first.hears()
        assert end["do"] == "end"
        (meeting,) = end["facts"]["meetings"]
        assert (meeting["mb_s"], meeting["problem"]) == (None, "no route to host")


def test_a_pair_of_which_nobody_says_anything_costs_its_deadline_and_no_more() -> None:
    schedule = Schedule(join_s=LONG_S, report_s=LONG_S, round_s=0.2, whole_s=LONG_S)
    with joined(2, nnodes=2, schedule=schedule) as (first, second):
        assert first.hears()["do"] == "test"
        end = second.hears()
        assert [one["problem"] for one in end["facts"]["meetings"]] == ["no answer"]


@pytest.mark.slow
def test_a_node_that_never_came_is_named_and_called_nothing() -> None:
    place = GroupPlace(
        nnodes=2, rank=0, endpoint=f"127.0.0.1:{free_port()}", schedule=Schedule(join_s=3.0, whole_s=LONG_S)
    )
    report = run_group(place, level=Level.INSTANT, options=Options(only=("host.limits",)))
    assert report.missing == ("node rank 1",)
    assert coverage_line(report).count("never came: node rank 1") == 1
    (localised,) = [one for one in report.results if one.check == "coll.localise"]
    assert (localised.verdict, report.blocking) == (Verdict.UNKNOWN, False)


@pytest.mark.slow
def test_an_order_ends_the_test_that_still_waits_for_the_other_side() -> None:
    """The worker of a node, whose first test waits for a partner that never comes."""
    pytest.importorskip("torch", reason="torch is not installed")
    test = {"do": "test", "rank": 0, "world": 2, "at": "", "address": "127.0.0.1", "deadline_s": LONG_S}
    with subprocess.Popen(
        [sys.executable, "-I", "-c", BOOTSTRAP],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=probe_environment(os.environ, threads=1),
    ) as worker:
        assert worker.stdin is not None

        def order(message: Mapping[str, Any]) -> None:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps(message).encode() + b"\n")
            worker.stdin.flush()

        def answer() -> dict[str, Any]:
            assert worker.stdout is not None
            return dict(json.loads(worker.stdout.readline()))

        order({"path": search_path(), "parent": os.getpid()})
        assert answer() == {"ready": True}
        order({**test, "id": 1})
        assert answer()["id"] == 1  # its store is open, and it waits
        order({**test, "id": 2, "world": 1})
        assert answer()["id"] == 2
        done = answer()
        assert done["id"] == 2
        assert done["result"]["wrong"] == 0
        worker.stdin.close()
        assert worker.wait(LONG_S) == 0
