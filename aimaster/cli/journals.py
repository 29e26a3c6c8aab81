"""Finds the journal of a job on this machine, whether the job still runs or ended long ago."""

from __future__ import annotations

import os
from pathlib import Path

from aimaster.agent.rundir import default_state_dir
from aimaster.errors import SetupError, UsageError
from aimaster.ids import JobId, is_valid_id
from aimaster.journal.base import Entry
from aimaster.journal.sqlite import SqliteJournal
from aimaster.master.recovery import JOURNAL_NAME

__all__ = ["ENTRIES_READ_MAX", "journal_path", "read_entries"]

ENTRIES_READ_MAX = 200_000
"""Newest entries of a journal that a command looks at."""


def journal_path(state_dir: Path | None, job_id: str | None) -> Path:
    """The journal that is meant: of a state directory, of a job, or of the job that wrote last.

    Raises:
        UsageError: what was given is no job id.
        SetupError: there is no journal.
    """
    if job_id is not None and not is_valid_id(job_id):
        raise UsageError("this is not a job id", where=f"--job-id {job_id!r}")
    if state_dir is not None:
        return state_dir / JOURNAL_NAME
    if job_id is not None:
        return default_state_dir(os.environ, JobId(job_id)) / JOURNAL_NAME
    base = default_state_dir(os.environ, JobId("any")).parent
    found = sorted(base.glob(f"*/{JOURNAL_NAME}"), key=_written)
    if not found:
        raise SetupError(
            "no journal of this user is found here",
            where=str(base),
            next_step="give --state-dir, as the job was given it, on the node that led the job",
        )
    return found[-1]


def read_entries(path: Path) -> tuple[Entry, ...]:
    """The newest entries of a journal, oldest first; also while a master writes it.

    Raises:
        SetupError: there is none, or it cannot be read.
    """
    with SqliteJournal.read(path) as journal:
        last = journal.last()
        after = max(0, (last.seq if last else 0) - ENTRIES_READ_MAX)
        return tuple(journal.entries(after))


def _written(path: Path) -> float:
    """When it was written last; the log beside it is newer than the file while a master runs."""
    times = [0.0]
    for name in (path, path.with_name(f"{path.name}-wal")):
        try:
            times.append(name.stat().st_mtime)
        except OSError:
            continue
    return max(times)
