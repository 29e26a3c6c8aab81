"""Which jobs there are on this machine, and how to reach their masters.

Every agent writes ``endpoint.json`` into its run directory ``<base>/<job_id>/<node_id>``. Any of the three
levels may be given. A run directory may be left over from an agent that was killed, so what is found is a
place to ask, not a job that runs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from aimaster.agent.rundir import ENDPOINT_FILE, PROCESSES_FILE
from aimaster.errors import SetupError, UsageError
from aimaster.ids import JobId, NodeId, is_valid_id
from aimaster.rpc.messages import ProcessInfo, Role

__all__ = ["Place", "choose_job", "find_places", "read_processes"]

FILE_BYTES_MAX = 1024 * 1024
PLACES_MAX = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One node's run directory."""

    path: Path
    job: JobId
    node: NodeId
    endpoint: str
    secret_file: Path | None


def find_places(folder: Path) -> tuple[Place, ...]:
    """All run directories at or below `folder`.

    Raises:
        SetupError: there is none.
    """
    found: list[Place] = []
    for pattern in (ENDPOINT_FILE, f"*/{ENDPOINT_FILE}", f"*/*/{ENDPOINT_FILE}"):
        for path in sorted(folder.glob(pattern))[:PLACES_MAX]:
            place = _read_place(path)
            if place is not None:
                found.append(place)
        if found:
            return tuple(found)
    raise SetupError(
        "no job of this user is found here",
        where=str(folder),
        next_step="give --run-dir of the job, or --endpoint HOST:PORT of its master",
    )


def choose_job(places: tuple[Place, ...], job: str | None) -> tuple[Place, ...]:
    """The places of one job.

    Raises:
        UsageError: there are several jobs and none was named, or not the named one.
    """
    jobs = sorted({place.job for place in places})
    if job is None and len(jobs) > 1:
        raise UsageError("several jobs are found", where=", ".join(jobs), next_step="give --job-id ID")
    wanted = tuple(place for place in places if job is None or place.job == job)
    if not wanted:
        raise UsageError(f"job {job} is not found", where=", ".join(jobs))
    return wanted


def read_processes(place: Place) -> tuple[ProcessInfo, ...]:
    """What the node's agent wrote down about its processes; those that have ended are left out."""
    content = _read_json(place.path / PROCESSES_FILE)
    rows = content.get("processes")
    found: list[ProcessInfo] = []
    for row in rows if isinstance(rows, list) else ():
        try:
            process = ProcessInfo(role=Role(row["role"]), pid=int(row["pid"]), rank=row.get("rank"))
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # half a file, or another version's: show the rest
        if _is_alive(process.pid, row.get("started")):
            found.append(process)
    return tuple(found)


def _read_place(path: Path) -> Place | None:
    content = _read_json(path)
    job, node, endpoint = content.get("job_id"), content.get("node_id"), content.get("endpoint")
    if not (isinstance(job, str) and isinstance(node, str) and isinstance(endpoint, str)):
        return None
    if not (is_valid_id(job) and is_valid_id(node)):
        return None
    secret = content.get("secret_file")
    return Place(
        path=path.parent,
        job=JobId(job),
        node=NodeId(node),
        endpoint=endpoint,
        secret_file=Path(secret) if isinstance(secret, str) else None,
    )


def _read_json(path: Path) -> dict[str, object]:
    """The file's object; empty if it cannot be read, since its agent may be gone by now."""
    try:
        with path.open("rb") as file:
            content = json.loads(file.read(FILE_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _is_alive(pid: int, started: object) -> bool:
    """Whether the process lives; with its start time (clock ticks since boot) given, that very one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and (started is None or fields[19] == str(started))
