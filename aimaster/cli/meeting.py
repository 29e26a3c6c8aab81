"""Where the nodes meet and what the job is called.

The master is the only meeting point: torchrun's static and c10d rendezvous both mean it, at the endpoint or
at `--master-addr` and `--master-port`. One node without an endpoint keeps its master to itself. The job id is
`--rdzv-id`, else the scheduler's, else (several nodes) made of the endpoint that all of them know, else new.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping

from aimaster.cli.values import Values
from aimaster.config import JobIdSource, NodesConfig, RendezvousConfig
from aimaster.errors import UsageError
from aimaster.ids import ID_BYTES_MAX, JobId, is_valid_id

__all__ = ["resolve_rendezvous"]

ENDPOINT_PORT = 29400
"""Port of an endpoint that names none: torchrun's for its c10d rendezvous."""
STATIC_PORT = 29500
"""Port of a static rendezvous that names none: torchrun's."""

_BACKENDS = ("static", "c10d")
_CONF_JOIN = ("join_timeout", "timeout")
_CONF_KNOWN = (*_CONF_JOIN, "last_call_timeout", "is_host", "rank")
_SCHEDULERS = (
    ("SLURM_JOB_ID", "slurm-{}", "SLURM_STEP_ID"),
    ("PBS_JOBID", "pbs-{}", ""),
    ("LSB_JOBID", "lsf-{}", ""),
)
_JOB_DIGEST_CHARS = 8


def resolve_rendezvous(values: Values, nodes: NodesConfig) -> RendezvousConfig:
    """Resolve the group; says in `values.notices` what it leaves out.

    Raises:
        UsageError: A backend that is not ours, or words that are no address, pair or number.
    """
    backend = values.text("rdzv_backend")
    if backend not in _BACKENDS:
        raise UsageError(
            f"--rdzv-backend {backend} is not taken",
            where="the endpoint would name a service that is not the job's master",
            next_step="give --rdzv-backend c10d and an --rdzv-endpoint on one of the nodes",
        )
    conf = _conf(values)
    standalone = values.switch("standalone")
    if standalone and nodes.max > 1:
        raise UsageError("--standalone is for one node", where=f"--nnodes {values.text('nnodes')}")
    host, port = (None, None) if standalone else _endpoint(values, nodes)
    if nodes.max > 1 and port == 0:
        raise UsageError(
            "several nodes need an endpoint with a port", where="port 0 is a different one on each start"
        )
    given_id = "" if standalone else values.text("rdzv_id")
    if standalone and any(dest in values.given for dest in ("rdzv_id", "rdzv_endpoint")):
        values.notices.append("--standalone: --rdzv-id and --rdzv-endpoint are ignored, as in torchrun")
    job_id, source = _job_id(given_id, host=host, port=port, env=values.env)
    named = source is JobIdSource.FLAG
    return RendezvousConfig(
        job_id=job_id,
        job_id_source=source,
        run_id=given_id if named else str(job_id),
        host=host,
        port=port,
        is_host=_is_host(conf),
        join_timeout_s=_seconds(conf, _CONF_JOIN, 600.0),
        last_call_s=_seconds(conf, ("last_call_timeout",), 30.0),
        conf=tuple(conf.items()),
    )


def _endpoint(values: Values, nodes: NodesConfig) -> tuple[str | None, int | None]:
    """Host and port of the master; (None, None) if it is this node's own business."""
    text = values.text("rdzv_endpoint")
    if text:
        return _host_port(text, ENDPOINT_PORT)
    if nodes.max == 1:
        return None, None
    if values.text("rdzv_backend") == "static":
        return values.text("master_addr"), values.whole("master_port") or STATIC_PORT
    return "127.0.0.1", ENDPOINT_PORT


def _host_port(text: str, port: int) -> tuple[str, int]:
    """`host`, `host:port`, `[v6]`, `[v6]:port` or a bare v6 address."""
    match = re.match(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\s]+))(?::(?P<port>\d+))?\Z", text)
    if match:
        return match["v6"] or match["host"], int(match["port"]) if match["port"] else port
    if re.match(r"[0-9A-Fa-f:.]+\Z", text) and text.count(":") > 1:
        return text, port
    raise UsageError("--rdzv-endpoint needs HOST or HOST:PORT", where=f"{text!r} was given")


def _conf(values: Values) -> dict[str, str]:
    conf: dict[str, str] = {}
    for pair in filter(None, values.text("rdzv_conf").strip().split(",")):
        key, equals, value = pair.partition("=")
        if not key.strip() or not equals:
            raise UsageError("--rdzv-conf needs KEY=VALUE,…", where=f"{pair!r} was given")
        conf[key.strip()] = value.strip()
    unused = sorted(set(conf) - set(_CONF_KNOWN))
    if unused and "rdzv_conf" in values.given:
        values.notices.append(f"--rdzv-conf: {', '.join(unused)} means nothing to aimaster's master")
    return conf


def _seconds(conf: Mapping[str, str], keys: tuple[str, ...], default: float) -> float:
    for key in keys:
        if key in conf:
            try:
                return float(conf[key])
            except ValueError:
                raise UsageError(
                    f"--rdzv-conf {key} needs seconds", where=f"{conf[key]!r} was given"
                ) from None
    return default


def _is_host(conf: Mapping[str, str]) -> bool | None:
    text = conf.get("is_host", "").lower()
    return {"1": True, "true": True, "t": True, "y": True, "yes": True}.get(text, False) if text else None


def _job_id(
    given: str, *, host: str | None, port: int | None, env: Mapping[str, str]
) -> tuple[JobId, JobIdSource]:
    if given and given != "none":
        return _as_job_id(given), JobIdSource.FLAG
    for variable, pattern, part in _SCHEDULERS:
        if env.get(variable):
            step = f".{env[part]}" if part and env.get(part) else ""
            return _as_job_id(pattern.format(env[variable]) + step), JobIdSource.SCHEDULER
    if host is not None:
        return _as_job_id(f"{host}-{port}"), JobIdSource.ENDPOINT
    return JobId(f"run-{secrets.token_hex(4)}"), JobIdSource.NEW


def _as_job_id(text: str) -> JobId:
    """`text` where it may be an id; else a readable one, equal on all nodes, different for other texts."""
    if is_valid_id(text):
        return JobId(text)
    digest = hashlib.blake2s(text.encode(), digest_size=_JOB_DIGEST_CHARS // 2).hexdigest()
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[: ID_BYTES_MAX - _JOB_DIGEST_CHARS - 1]
    return JobId(f"{plain}-{digest}" if plain else f"job-{digest}")
