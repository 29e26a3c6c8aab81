"""What an agent knows of each rank at one moment: its process, and what it wrote on the progress page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from aimaster.agent import counters, proc
from aimaster.core.sights import WorkerPhase
from aimaster.rpc.messages import RankProgress
from aimaster.worker.progress import Record, start_time


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """One rank of this node."""

    local_rank: int
    rank: int | None
    """None where another launcher gave it none that we know."""
    pid: int
    """The process that trains, as far as is known: under another launcher the one that writes the page."""
    ended: bool
    age_s: float
    """Since its process was started, where the agent started it."""
    record: Record | None
    """None while it has not written."""


def of_command(records: Sequence[Record | None]) -> tuple[RankState, ...]:
    """The ranks behind another launcher, by what they wrote: one record per local rank."""
    return tuple(
        RankState(
            local_rank=index,
            rank=record.rank,
            pid=record.pid,
            ended=start_time(record.pid) != record.pid_start,
            age_s=0.0,
            record=record,
        )
        for index, record in enumerate(records)
        if record is not None
    )


class ToldWorld:
    """How many ranks there are, by the environment that another launcher executed them with."""

    def __init__(self) -> None:
        self._pid = 0
        self._size = 0

    def told(self, states: Sequence[RankState]) -> int:
        """``WORLD_SIZE`` of the first rank; 0 where it has none or cannot be read. Read once per process."""
        if not states:
            return 0
        if states[0].pid != self._pid:
            text = proc.variable(states[0].pid, "WORLD_SIZE") or ""
            self._pid, self._size = states[0].pid, int(text) if text.isdigit() else 0
        return self._size


def progress_of(state: RankState) -> RankProgress:
    """The same in the words of the wire."""
    record = state.record
    if record is None:
        return RankProgress(
            local_rank=state.local_rank,
            rank=state.rank,
            phase=WorkerPhase.STARTING,
            steps=0,
            saved_step=None,
            age_s=state.age_s,
        )
    return RankProgress(
        local_rank=state.local_rank,
        rank=record.rank if state.rank is None else state.rank,
        phase=WorkerPhase[record.phase.name],
        steps=record.steps,
        saved_step=record.saved_step,
        age_s=max(0.0, (time.monotonic_ns() - record.beat_ns) / 1e9),
        effort=None if state.ended else counters.effort(state.pid),
    )
