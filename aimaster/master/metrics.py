"""The job for Prometheus: ``GET /metrics`` on a port of its own, off unless it was asked for.

Names follow Prometheus' conventions: ``aimaster_``, base units, ``_total`` for what only grows in one life of
the master. A scrape costs time by the number of nodes. Nothing but this one page is served; a request is
bounded in size and time, and beyond loopback it needs the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from aimaster.errors import PortInUse, SetupError
from aimaster.rpc.status import JobStatus
from aimaster.rpc.transport import Endpoint
from aimaster.rpc.waiting import within

__all__ = ["CONTENT_TYPE", "MetricsServer", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_BYTES_MAX = 8192
REQUEST_TIMEOUT_S = 5.0
REQUESTS_MAX = 16
"""At a time; more are turned away."""

Labels = Mapping[str, str]
Samples = Iterator[tuple[Labels, float]]


def render(status: JobStatus) -> str:
    """The page, in the text format of Prometheus."""
    lines: list[str] = []
    for name, kind, about, samples in _families(status):
        found = list(samples)
        if found:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{_braced(labels)} {value:.10g}" for labels, value in found]
    return "\n".join(lines) + "\n"


def _families(status: JobStatus) -> Iterator[tuple[str, str, str, Samples]]:
    states = Counter(node.state for node in status.nodes)
    phases = Counter(one.phase.value for node in status.nodes for one in node.progress)
    steps = {"memory": status.memory_step, "durable": status.durable_step}
    fresh = {"memory": status.memory_age_s, "durable": status.durable_age_s}
    ages = [node.heartbeat_age_s for node in status.nodes if node.heartbeat_age_s is not None]
    newest = status.incidents[-1] if status.incidents else None
    job = {"job": status.job, "phase": status.phase, "software": status.software}
    yield "aimaster_job_info", "gauge", "The job, as labels.", _one(1, job)
    yield "aimaster_generation", "gauge", "Number of the generation.", _one(status.generation)
    yield "aimaster_world_size", "gauge", "Ranks of the generation.", _one(status.world_size)
    yield "aimaster_restarts_total", "counter", "How often workers were started again.", _one(status.attempt)
    yield "aimaster_master_lives_total", "counter", "Lives of the master.", _one(status.epoch)
    yield "aimaster_nodes", "gauge", "Nodes by state.", _each("state", states)
    yield "aimaster_ranks", "gauge", "Ranks by what they do.", _each("phase", phases)
    yield "aimaster_checkpoint_step", "gauge", "Newest checkpoint step.", _each("tier", steps)
    yield (
        "aimaster_checkpoint_age_seconds",
        "gauge",
        "Since the newest checkpoint step became safe there.",
        _each("tier", fresh),
    )
    yield (
        "aimaster_rank_steps_min",
        "gauge",
        "Steps of the slowest rank since workers were last started: begins anew with each attempt.",
        _steps(status),
    )
    yield (
        "aimaster_phase_seconds",
        "gauge",
        "Wall time of the job by what it went to; an estimate until a phase is over.",
        _each("phase", dict(status.goodput.phases)),
    )
    yield (
        "aimaster_goodput_ratio",
        "gauge",
        "Share of the job's wall time that went into new steps.",
        _one(status.goodput.share),
    )
    yield (
        "aimaster_heartbeat_age_seconds_max",
        "gauge",
        "Longest silence of a node.",
        _one(max(ages) if ages else None),
    )
    yield (
        "aimaster_step_time_seconds_p99",
        "gauge",
        "0.99 quantile of the time between steps.",
        _one(status.hang.step_time_s or None),
    )
    yield (
        "aimaster_slow_ranks",
        "gauge",
        "Ranks that the others wait for.",
        _one(len(status.slow.ranks) if status.slow else 0),
    )
    yield "aimaster_incidents_total", "counter", "Incidents so far.", _one(newest.number if newest else 0)
    yield (
        "aimaster_incident_open",
        "gauge",
        "Whether the newest incident is not overcome yet.",
        _one(newest is not None and newest.recovered_s is None),
    )
    used = {one.cause: one.used for one in status.budgets}
    limits = {one.cause: one.limit for one in status.budgets}
    yield "aimaster_budget_used", "gauge", "Charges in the window.", _each("cause", used)
    yield "aimaster_budget_limit", "gauge", "Charges that are tolerated.", _each("cause", limits)


def _one(value: float | None, labels: Labels | None = None) -> Samples:
    if value is not None:
        yield labels or {}, float(value)


def _each(label: str, values: Mapping[str, float | None]) -> Samples:
    for name, value in sorted(values.items()):
        if value is not None:
            yield {label: name}, float(value)


def _steps(status: JobStatus) -> Samples:
    steps = [one.steps for node in status.nodes for one in node.progress]
    return _one(min(steps) if steps else None)


def _braced(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class MetricsServer:
    """Serves the page. Used on the master's event loop.

    Args:
        listen: where; port 0 takes a free one.
        token: what ``Authorization: Bearer`` must say; empty where nobody is asked.
        status: the job as it is now.
    """

    def __init__(self, listen: Endpoint, *, token: str, status: Callable[[], JobStatus]) -> None:
        self._listen = listen
        self._token = token
        self._status = status
        self._serving = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> Endpoint:
        """Begin to answer.

        Returns:
            Where, with the real port.

        Raises:
            PortInUse: somebody listens there.
            SetupError: it cannot be taken for another reason.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve, self._listen.host, self._listen.port, limit=REQUEST_BYTES_MAX
            )
        except OSError as error:
            kind = PortInUse if error.errno == errno.EADDRINUSE else SetupError
            raise kind(
                f"the metrics cannot be served ({error.strerror or error})",
                where=str(self._listen),
                next_step="choose another --metrics HOST:PORT",
            ) from error
        port = self._server.sockets[0].getsockname()[1]
        return Endpoint(host=self._listen.host, port=port)

    async def stop(self) -> None:
        """Close the port."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._serving += 1
        try:
            with contextlib.suppress(asyncio.TimeoutError, OSError, asyncio.IncompleteReadError):
                writer.write(await within(REQUEST_TIMEOUT_S, self._answer(reader)))
                await within(REQUEST_TIMEOUT_S, writer.drain())
        finally:
            self._serving -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            return _response("431 Request Header Fields Too Large")
        request, *fields = head.split("\r\n")
        method, _, rest = request.partition(" ")
        if self._serving > REQUESTS_MAX:
            return _response("503 Service Unavailable")
        if rest.split(" ")[0].partition("?")[0] != "/metrics":
            return _response("404 Not Found")
        if method != "GET":
            return _response("405 Method Not Allowed")
        if self._token and not any(self._is_token(field) for field in fields):
            return _response("401 Unauthorized")
        return _response("200 OK", render(self._status()))

    def _is_token(self, field: str) -> bool:
        name, _, value = field.partition(":")
        said = value.strip().encode("latin-1")
        wanted = f"Bearer {self._token}".encode()
        return name.strip().lower() == "authorization" and hmac.compare_digest(said, wanted)


def _response(status: str, body: str = "") -> bytes:
    data = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + data
