"""`aimaster status`: one picture of a job, as text or as JSON, both made of the same object.

JSON has ``"schema": 1``. Fields may be added; none changes its meaning or goes away under that number.
``source`` says who is speaking: ``master``, or ``run_dir`` when no master answered and the picture is only
what the agents of this machine have written down.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from aimaster.agent.rundir import default_base
from aimaster.cli.finding import Place, choose_job, find_places, read_processes
from aimaster.cli.status_text import render
from aimaster.core.sights import Sight
from aimaster.errors import AimasterError, CredentialsMissing, MasterUnreachable, SecretDiffers, UsageError
from aimaster.ids import JobId, is_valid_id
from aimaster.rpc.asking import fetch_status
from aimaster.rpc.goodput import GoodputStatus
from aimaster.rpc.messages import ProcessInfo, Role
from aimaster.rpc.security import Credentials, load_secret
from aimaster.rpc.status import (
    HangStatus,
    IncidentStatus,
    JobStatus,
    NodeStatus,
    SlowStatus,
)
from aimaster.rpc.transport import Endpoint

__all__ = ["Wanted", "picture", "show"]

SCHEMA = 1
ANSWER_TIMEOUT_S = 5.0

Plain = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The command's words."""

    run_dir: Path | None = None
    endpoint: str | None = None
    job_id: str | None = None
    secret_file: Path | None = None


def show(wanted: Wanted, *, as_json: bool) -> str:
    """What the command prints.

    Raises:
        AimasterError: no job is found, or it cannot be asked.
    """
    found = picture(wanted)
    return json.dumps(found, indent=2) + "\n" if as_json else render(found)


def picture(wanted: Wanted) -> Plain:
    """The job as it is now.

    Raises:
        AimasterError: no job is found, or it cannot be asked.
    """
    if wanted.job_id is not None and not is_valid_id(wanted.job_id):
        raise UsageError("this is not a job id", where=f"--job-id {wanted.job_id!r}")
    return _ask_endpoint(wanted) if wanted.endpoint is not None else _ask_around(wanted)


def _ask_endpoint(wanted: Wanted) -> Plain:
    assert wanted.endpoint is not None
    secret = load_secret(secret_file=wanted.secret_file, environ=os.environ)
    job = JobId(wanted.job_id) if wanted.job_id is not None else None
    if secret is not None and job is None:
        raise UsageError(
            "with a secret, a master is only known together with its job", next_step="give --job-id ID"
        )
    credentials = Credentials.insecure()
    if secret is not None and job is not None:
        credentials = Credentials.from_secret(secret, job=job)
    endpoint = Endpoint.parse(wanted.endpoint)
    return from_master(fetch_status(endpoint, credentials, job=job, timeout_s=ANSWER_TIMEOUT_S))


def _ask_around(wanted: Wanted) -> Plain:
    """Ask the masters that run directories name, each once; else tell what the directories hold."""
    places = choose_job(find_places(wanted.run_dir or default_base(os.environ)), wanted.job_id)
    trouble: AimasterError | None = None
    asked: set[str] = set()
    for place in places:
        if place.endpoint in asked:
            continue
        asked.add(place.endpoint)
        try:
            secret = load_secret(secret_file=wanted.secret_file or place.secret_file, environ={})
            credentials = Credentials.insecure()
            if secret is not None:
                credentials = Credentials.from_secret(secret, job=place.job)
            endpoint = Endpoint.parse(place.endpoint)
            return from_master(fetch_status(endpoint, credentials, job=place.job, timeout_s=ANSWER_TIMEOUT_S))
        except (MasterUnreachable, SecretDiffers, CredentialsMissing, UsageError) as error:
            trouble = error
    return from_run_dirs(places, trouble)


def from_master(status: JobStatus) -> Plain:
    """The picture that a master gives."""
    return {
        "schema": SCHEMA,
        "source": "master",
        "trouble": "",
        "job_id": status.job,
        "phase": status.phase,
        "generation": status.generation,
        "attempt": status.attempt,
        "world_size": status.world_size,
        "waiting_for": status.waiting_for,
        "steps": {"memory": status.memory_step, "durable": status.durable_step},
        "step_age_s": {"memory": status.memory_age_s, "durable": status.durable_age_s},
        "master": {"pid": status.master.pid, "node": status.master_node, "epoch": status.epoch},
        "software": status.software,
        "hang": _hang(status.hang),
        "slow": _slow(status.slow),
        "goodput": _goodput(status.goodput),
        "processes": _processes(status),
        "nodes": [_node(node) for node in status.nodes],
        "budgets": [
            {"cause": one.cause, "used": one.used, "limit": one.limit, "window_s": one.window_s}
            for one in status.budgets
        ],
        "incidents": [_incident(incident) for incident in status.incidents],
    }


def from_run_dirs(places: tuple[Place, ...], trouble: AimasterError | None) -> Plain:
    """The picture that is left when no master answers."""
    processes = [_process(process, place.node) for place in places for process in read_processes(place)]
    return {
        "schema": SCHEMA,
        "source": "run_dir",
        "trouble": "the master does not answer" if trouble is None else str(trouble),
        "job_id": places[0].job,
        "phase": "unknown",
        "generation": None,
        "attempt": None,
        "world_size": None,
        "waiting_for": "",
        "steps": {"memory": None, "durable": None},
        "step_age_s": {"memory": None, "durable": None},
        "master": None,
        "software": None,
        "hang": None,
        "slow": None,
        "goodput": None,
        "processes": processes,
        "nodes": [{"node": place.node, "state": "unknown", "run_dir": str(place.path)} for place in places],
        "budgets": [],
        "incidents": [],
    }


def _processes(status: JobStatus) -> list[Plain]:
    """Every process once: an agent that owns the master lists it too."""
    rows = [_process(status.master, status.master_node)]
    for node in status.nodes:
        rows += [
            _process(process, node.node) for process in node.processes if process.role is not Role.MASTER
        ]
    return rows


def _process(process: ProcessInfo, node: str) -> Plain:
    return {"role": process.role.value, "pid": process.pid, "node": node, "rank": process.rank}


def _node(node: NodeStatus) -> Plain:
    return {
        "node": node.node,
        "state": node.state,
        "node_rank": node.node_rank,
        "address": node.address,
        "connected": node.connected,
        "heartbeat_age_s": node.heartbeat_age_s,
        "saver_address": node.saver_address,
        "notes": list(node.notes),
        "ranks": [
            {
                "rank": one.rank,
                "local_rank": one.local_rank,
                "phase": one.phase.value,
                "steps": one.steps,
                "saved_step": one.saved_step,
                "age_s": one.age_s,
                "sight": _sight(one.sight),
            }
            for one in node.progress
        ],
    }


def _hang(hang: HangStatus) -> Plain:
    """Hang detection: seconds without a step that are too many; null for none."""
    return {
        "enabled": hang.enabled,
        "blind": hang.blind,
        "stopped_s": hang.stopped_s,
        "stuck_s": hang.stuck_s,
        "busy_s": hang.busy_s,
        "exit_s": hang.exit_s,
        "step_time_s": hang.step_time_s,
    }


def _slow(slow: SlowStatus | None) -> Plain | None:
    """For whom the others wait, in shares of the time; null where for nobody."""
    if slow is None:
        return None
    return {
        "node": slow.node,
        "ranks": list(slow.ranks),
        "awake": slow.awake,
        "running": slow.running,
        "others_awake": slow.others_awake,
    }


def _goodput(goodput: GoodputStatus) -> Plain:
    """Where the job's wall time went, in seconds; ``goodput`` is the share that went into new steps."""
    return {"goodput": goodput.share, "wall_s": goodput.wall_s, "phases": dict(goodput.phases)}


def _sight(sight: Sight | None) -> Plain | None:
    """What is seen of a rank; null where nobody looks."""
    if sight is None:
        return None
    return {
        "still_s": sight.still_s,
        "activity": sight.activity.value,
        "idle_s": sight.idle_s,
        "wait": sight.wait.value,
        "where": sight.where,
        "collective": sight.collective,
    }


def _incident(incident: IncidentStatus) -> Plain:
    return {
        "id": incident.number,
        "kind": incident.kind,
        "node": incident.node,
        "rank": incident.rank,
        "reason": incident.reason,
        "generation": incident.generation,
        "at_wall_s": incident.at_wall_s,
        "last_step": incident.last_step,
        "resumed_step": incident.resumed_step,
        "restored_from": incident.restored_from,
        "recovered_s": incident.recovered_s,
        "error": incident.error,
    }
