"""Checks across nodes, each in a network namespace of its own: the right one is called bad, or nobody."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from sanitycheck.result import Report, Result
from tests import quota
from tests.cluster import Cluster, Host

pytestmark = [pytest.mark.slow, pytest.mark.netns, pytest.mark.timeout(300)]

pytest.importorskip("torch", reason="torch is not installed")

PORT = 29450
TOLERANT = ("--pair-share", "0.2", "--alone-share", "0.2")
"""Four nodes share two busy processors here: only what is far off is bad."""
SLOW_SHARE = 0.05
WAIT_S = 240.0

Group = Callable[..., dict[str, Report]]


def start(cluster: Cluster, *, nnodes: int, hosts: int, extra: tuple[str, ...]) -> list[Any]:
    endpoint = f"{cluster[0].address}:{PORT}"
    return [
        cluster[rank].popen(
            [
                sys.executable,
                "-m",
                "sanitycheck",
                "run",
                "--only",
                "sw.fingerprint,cpu.gemm",
                "--nnodes",
                str(nnodes),
                "--node-rank",
                str(rank),
                "--rdzv-endpoint",
                endpoint,
                "--json",
                "-",
                *TOLERANT,
                *extra,
            ]
        )
        for rank in range(hosts)
    ]


def finished(host: Host, child: subprocess.Popen[bytes]) -> tuple[int, Report]:
    code = child.wait(WAIT_S)
    text = host.log(child)
    return code, Report.from_json(text[text.index("{") :])


def of(report: Report, check: str) -> Result:
    return next(result for result in report.results if result.check == check)


def subjects(report: Report, check: str, reason: str) -> set[str]:
    return {one.subject for one in of(report, check).findings if one.reason.value == reason}


def test_a_cut_pair_is_a_link(make_cluster: Callable[[int], Cluster]) -> None:
    cluster = make_cluster(4)
    for one, other in ((1, 2), (2, 1)):
        cut = ["ip", "route", "add", "blackhole", f"{cluster[other].address}/32"]
        assert cluster[one].run(cut).returncode == 0
    children = start(cluster, nnodes=4, hosts=4, extra=("--round-timeout", "60"))
    for rank, child in enumerate(children):
        code, report = finished(cluster[rank], child)
        (link,) = subjects(report, "coll.localise", "link_bad")
        assert set(link.split("-")) == {"h1", "h2"}
        assert subjects(report, "coll.localise", "node_bad") == set()
        assert not report.blocking
        assert report.missing == ()
        assert code == 3


@pytest.mark.alone
@pytest.mark.skipif(bool(quota.why_not()), reason=quota.why_not())
def test_a_slow_processor_is_a_bad_node_and_blocks_there_alone(
    make_cluster: Callable[[int], Cluster],
) -> None:
    cluster = make_cluster(4)
    children = start(cluster, nnodes=4, hosts=4, extra=("--round-timeout", "25"))
    ends = time.monotonic() + 60
    while len(cluster[2].pids()) < 2:  # it has begun its checks
        assert time.monotonic() < ends
        time.sleep(0.05)
    with quota.slowed(cluster[2].pids(), share=SLOW_SHARE):
        reports = [finished(cluster[rank], child)[1] for rank, child in enumerate(children)]
    for rank, report in enumerate(reports):
        assert subjects(report, "coll.localise", "node_bad") == {"h2"}, json.dumps(report.to_dict())
        assert report.blocking == (rank == 2)


def test_when_no_pair_can_talk_it_is_a_common_cause(make_cluster: Callable[[int], Cluster]) -> None:
    cluster = make_cluster(3)
    for one in range(3):
        for other in range(3):
            if one != other and 0 not in (one, other):
                address = f"{cluster[other].address}/32"
                assert cluster[one].run(["ip", "route", "add", "blackhole", address]).returncode == 0
    for one in (1, 2):  # towards the lead only its own port passes
        for command in (
            [
                "ip",
                "rule",
                "add",
                "to",
                f"{cluster[0].address}/32",
                "dport",
                str(PORT),
                "lookup",
                "main",
                "pref",
                "10",
            ],
            [
                "ip",
                "rule",
                "add",
                "to",
                f"{cluster[0].address}/32",
                "ipproto",
                "tcp",
                "blackhole",
                "pref",
                "20",
            ],
        ):
            done = cluster[one].run(command)
            if done.returncode:
                pytest.skip(f"no policy routing here: {done.stderr.strip()}")
    children = start(cluster, nnodes=3, hosts=3, extra=("--round-timeout", "60"))
    for rank, child in enumerate(children):
        code, report = finished(cluster[rank], child)
        assert of(report, "coll.localise").reason.value == "common_cause", json.dumps(report.to_dict())
        assert (code, report.blocking) == (3, False)


@pytest.mark.alone
def test_a_slow_way_between_two_nodes_is_a_link(make_cluster: Callable[[int], Cluster]) -> None:
    """A token bucket for one destination alone, where the kernel has what it takes."""
    cluster = make_cluster(4)
    slow = cluster[2].address
    for command in (
        "tc qdisc add dev eth0 root handle 1: htb default 10",
        "tc class add dev eth0 parent 1: classid 1:10 htb rate 10gbit",
        "tc class add dev eth0 parent 1: classid 1:20 htb rate 20mbit burst 32k",
        f"tc filter add dev eth0 parent 1: protocol ip u32 match ip dst {slow}/32 flowid 1:20",
    ):
        done = cluster[1].run(command.split())
        if done.returncode:
            pytest.skip(f"the kernel cannot slow one way down: {done.stderr.strip()}")
    children = start(cluster, nnodes=4, hosts=4, extra=())
    for rank, child in enumerate(children):
        _, report = finished(cluster[rank], child)
        assert of(report, "coll.all").reason.value == "all_together"
        (link,) = subjects(report, "coll.localise", "link_bad")
        assert set(link.split("-")) == {"h1", "h2"}
        assert subjects(report, "coll.localise", "node_bad") == set()
