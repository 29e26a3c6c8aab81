"""One worker: its process and streams, and what its end says: error file, traceback, last lines."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field

from aimaster.agent import failure
from aimaster.agent.assignment import Assignment
from aimaster.agent.reports import LAST_LINES_CHARS_MAX, WorkerExit
from aimaster.agent.stdio import RankIO
from aimaster.config import Std
from aimaster.worker.progress import Record


@dataclass(slots=True)
class Worker:
    """A training process of this node."""

    local_rank: int
    rank: int
    pid: int
    pid_start: int
    io: RankIO
    started: float
    """When it began its generation, on the monotonic clock."""
    stays: bool = False
    """It has left its generation alive and waits for the next one."""
    exit: WorkerExit | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def exit_of(
    worker: Worker, status: int, *, assignment: Assignment, record: Record | None, sentence: str
) -> WorkerExit:
    """What is reported of a worker's end.

    Args:
        worker: Which one.
        status: Its wait status.
        assignment: Of its generation.
        record: What it wrote on the progress page.
        sentence: The agent's own word on a bad end, put in front of what the worker said.
    """
    code = os.waitstatus_to_exitcode(status)
    said = failure.led_by(sentence, failure_of(worker.io, code))
    return WorkerExit(
        generation=assignment.generation,
        attempt=assignment.attempt,
        local_rank=worker.local_rank,
        rank=worker.rank,
        pid=worker.pid,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        steps=record.steps if record else None,
        saved_step=record.saved_step if record else None,
        error=said.text,
        error_digest=said.digest,
        last_lines=last_lines(worker.io),
        held_s=record.held_s if record else 0.0,
    )


def failure_of(io: RankIO, code: int) -> failure.Failure:
    """What an ended worker said about its end."""
    if code <= 0:
        # A signal says nothing itself; a traceback above its last lines is of something that was survived.
        return failure.Failure() if code == 0 else failure.from_silence(io.text(Std.OUT), io.text(Std.ERR))
    try:
        with open(io.error_file, "rb") as file:
            found = failure.from_error_file(file.read(failure.ERROR_FILE_BYTES_MAX))
    except OSError:
        found = None
    if found is None:
        found = failure.from_output(io.text(Std.ERR)) or failure.from_output(io.text(Std.OUT))
    return found or failure.from_silence(io.text(Std.OUT), io.text(Std.ERR))


def last_lines(io: RankIO) -> str:
    """Its last lines, error output first."""
    text = io.text(Std.ERR).strip("\n") or io.text(Std.OUT).strip("\n")
    return text[-LAST_LINES_CHARS_MAX:]
