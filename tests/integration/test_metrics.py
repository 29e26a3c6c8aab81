"""`/metrics` of a real master, read by Prometheus' own parser; and who may not read it."""

from __future__ import annotations

import asyncio
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aimaster.core.goodput import Phase
from aimaster.master.metrics import CONTENT_TYPE, MetricsServer, render
from aimaster.rpc.status import JobStatus
from aimaster.rpc.transport import Endpoint
from tests.integration.master_process import PATIENCE_S, FakeAgent, master_at, until
from tests.runs import free_port, script, start_run
from tests.runs import until as until_so
from tests.unit.aimaster.rpc.recording_master import RecordingMaster


def ask(port: int, path: str = "/metrics", *, token: str = "", method: str = "GET") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", ""


def parsed(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Name of the sample → labels → value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_a_jobs_metrics_follow_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        port = free_port()
        extra = ("--insecure", "--node-id", "n1", "--metrics", f"127.0.0.1:{port}")
        async with master_at(tmp_path / "state", extra=extra) as master:
            agent = FakeAgent(master.endpoint, "n1", workers=2)
            await until(lambda: agent.running)
            agent.first_step(3)
            await agent.link.flush(PATIENCE_S)
            code, kind, text = await asyncio.to_thread(ask, port)
            assert (code, kind) == (200, CONTENT_TYPE)
            found = parsed(text)
            assert found["aimaster_world_size"] == {(): 2.0}
            assert found["aimaster_nodes"] == {(("state", "running"),): 1.0}
            assert found["aimaster_restarts_total"] == {(): 0.0}
            assert found["aimaster_incidents_total"] == {(): 0.0}
            assert {(("phase", phase.value),) for phase in Phase} == set(found["aimaster_phase_seconds"])
            assert 0 <= found["aimaster_goodput_ratio"][()] <= 1
            (labels,) = found["aimaster_job_info"]
            assert dict(labels)["phase"] == "running"
            assert (await asyncio.to_thread(ask, port, "/"))[0] == 404
            assert (await asyncio.to_thread(ask, port, method="POST"))[0] == 405
            await agent.vanish()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_run_serves_them_and_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    port = free_port()
    path = script(tmp_path, "import time\nprint('here', flush=True)\ntime.sleep(600)\n")
    run = start_run(tmp_path, "--metrics", f"127.0.0.1:{port}", path)
    until_so(lambda: run.stdout, "the worker runs")
    assert "aimaster_generation 1\n" in ask(port)[2]
    second = start_run(tmp_path, "--metrics", f"127.0.0.1:{port}", path, name="second")
    assert second.wait() == 3, second.stderr
    assert "--metrics" in second.stderr
    run.send(15)
    assert run.wait() == 10


def served(status: JobStatus, token: str, use: Any) -> None:
    async def scenario() -> None:
        server = MetricsServer(Endpoint(host="127.0.0.1", port=0), token=token, status=lambda: status)
        port = (await server.start()).port
        try:
            await asyncio.to_thread(use, port)
        finally:
            await server.stop()

    asyncio.run(scenario())


def test_with_a_token_only_who_has_it_may_read() -> None:
    def use(port: int) -> None:
        assert ask(port)[0] == 401
        assert ask(port, token="guessed")[0] == 401
        assert ask(port, token="the right one")[0] == 200

    served(RecordingMaster().status(), "the right one", use)


def test_odd_names_come_back_as_they_were() -> None:
    odd = 'quotes " backslash \\ line\nend'
    found = parsed(render(replace(RecordingMaster().status(), software=odd)))
    (labels,) = found["aimaster_job_info"]
    assert dict(labels)["software"] == odd


def test_a_request_without_end_is_turned_away() -> None:
    def use(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
            client.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000)
            assert b" 431 " in client.recv(65536)

    served(RecordingMaster().status(), "", use)


@pytest.mark.parametrize("words", [("--metrics", "0.0.0.0:9100"), ("--metrics", "nowhere")])
def test_what_is_wrong_ends_before_anything_starts(tmp_path: Path, words: tuple[str, str]) -> None:
    run = start_run(tmp_path, *words, script(tmp_path, "raise SystemExit('must not run')\n"))
    assert run.wait() in (2, 3)
    assert "AIMASTER_METRICS_TOKEN" in run.stderr or "HOST:PORT" in run.stderr
