"""The progress page: how far each worker of a node has come, without a system call on the training path.

The agent makes one anonymous memory file per start of workers, with a record of 64 bytes per local rank, and
names it to the workers by path (``AIMASTER_PROGRESS_PAGE``, ``/proc/<agent>/fd/<n>``). It lies in memory and
not in a file system, since a page of a file may block the writer for as long as its disk is busy. A worker
maps it and writes its record after each step; the agent reads it when it sends a heartbeat.

A record has one writer. It is claimed by process (pid and start time), under a file lock, when

- nobody has it, or whoever had it is dead, or
- whoever has it has never finished a step, and the claimant just did: a launcher or a wrapper that imported
  torch with ``LOCAL_RANK`` in its environment gives way to the process that trains.

The sequence number is odd while the record is written (a seqlock): a reader that sees an odd or a changed
number reads again. Standard library only: this module is imported by every ``import torch`` under an agent.

Layout, little-endian: u32 sequence, u32 pid, u64 start time of the process in clock ticks since boot
(field 22 of ``/proc/PID/stat``), u64 steps, i64 the training's own step or -1, u64 monotonic nanoseconds of
the last write, u32 phase, i32 global rank or -1, u32 milliseconds of loading, u32 milliseconds from there to
the first step (0 where nothing was loaded), u64 nanoseconds for which saving has held the training. The last
three are of this attempt, and are written with whatever comes next.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from dataclasses import dataclass
from enum import IntEnum

RECORD = struct.Struct("<IIQQqQIiIIQ")
RECORD_BYTES = 64
RECORDS_MIN = 64
"""A page never holds fewer: under another launcher the agent does not know how many workers there will be."""
READ_TRIES_MAX = 100
ROUND_KEYS_MAX = 65_536
"""Most optimizer calls that are folded to one step before a new one is counted all the same."""
_SEQ = struct.Struct("<I")
_BODY = struct.Struct("<IQQqQIiIIQ")
_NS_PER_MS = 1_000_000
_MS_MAX = 2**32 - 1


class Phase(IntEnum):
    """What a worker does; the numbers are those of ``WorkerPhase`` in the contract."""

    STARTING = 1
    IMPORTING = 2
    TRAINING = 3
    SAVING = 4
    LOADING = 5
    EXITING = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One worker's record as it was at one moment."""

    pid: int
    pid_start: int
    steps: int
    saved_step: int | None
    beat_ns: int
    phase: Phase
    rank: int | None
    load_s: float
    warm_up_s: float
    held_s: float
    """For how long saving has held the training."""


def decode(raw: bytes) -> Record | None:
    """The record in 64 bytes; None where nobody has claimed it.

    Raises:
        ValueError: The bytes are not a record that this version knows.
    """
    _, pid, pid_start, steps, saved, beat_ns, phase, rank, load_ms, warm_ms, held_ns = RECORD.unpack(raw)
    if pid == 0:
        return None
    return Record(
        pid=pid,
        pid_start=pid_start,
        steps=steps,
        saved_step=None if saved < 0 else saved,
        beat_ns=beat_ns,
        phase=Phase(phase),
        rank=None if rank < 0 else rank,
        load_s=load_ms / 1e3,
        warm_up_s=warm_ms / 1e3,
        held_s=held_ns / 1e9,
    )


class ProgressPage:
    """The agent's side: makes the page and reads it. Use from one thread."""

    def __init__(self, records: int) -> None:
        self.records = max(records, RECORDS_MIN)
        self._fd = os.memfd_create("aimaster-progress", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, self.records * RECORD_BYTES)
        self._map = mmap.mmap(self._fd, self.records * RECORD_BYTES, prot=mmap.PROT_READ)

    @property
    def path(self) -> str:
        """Where another process of this user opens the page while this one lives."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def read(self, local_rank: int) -> Record | None:
        """The record of one local rank; None while nobody has claimed it or it cannot be read whole."""
        begin = local_rank * RECORD_BYTES
        for _ in range(READ_TRIES_MAX):
            before = _SEQ.unpack_from(self._map, begin)[0]
            raw = self._map[begin : begin + RECORD_BYTES]
            if not before & 1 and _SEQ.unpack_from(self._map, begin)[0] == before:
                try:
                    return decode(raw)
                except ValueError:
                    return None
        return None

    def clear(self, local_rank: int) -> None:
        """Forget what an ended process has written, where its page is used on."""
        os.pwrite(self._fd, bytes(RECORD_BYTES), local_rank * RECORD_BYTES)

    def close(self) -> None:
        """Unmap and close. May be called twice."""
        if self._fd >= 0:
            self._map.close()
            os.close(self._fd)
            self._fd = -1


class ProgressWriter:
    """The worker's side: claims one record and writes it. Use from one thread at a time."""

    def __init__(self, path: str, *, local_rank: int, rank: int | None) -> None:
        """Map the page.

        Raises:
            OSError: The page is not there or not ours.
            ValueError: The page has no record of that local rank.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(self._fd).st_size
            if not 0 <= local_rank < size // RECORD_BYTES:
                raise ValueError(f"no record for local rank {local_rank} in a page of {size} bytes")
            self._map = mmap.mmap(self._fd, size)
        except BaseException:
            os.close(self._fd)
            raise
        self._begin = local_rank * RECORD_BYTES
        self._seq = 0
        self._pid = os.getpid()
        self._pid_start = start_time(self._pid)
        self._saved_step = -1
        self._rank = -1 if rank is None else rank
        self._phase = Phase.STARTING
        self._load_ns = self._loaded_at_ns = self._warm_up_ns = self._held_ns = 0
        self._round: set[object] = set()
        self.steps = 0

    def claim(self, *, training: bool) -> bool:
        """Take the record, if it is free. `training` says that this process just finished a step."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        try:
            sequence, pid, pid_start, steps = struct.unpack_from("<IIQQ", self._map, self._begin)
            own = (pid, pid_start) == (self._pid, self._pid_start)
            free = pid == 0 or own or not _lives(pid, pid_start)
            if not free and not (training and steps == 0):
                return False
            self._seq = sequence + (sequence & 1)  # a writer that died half-way left it odd
            self.enter(self._phase)
            return True
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def enter(self, phase: Phase) -> Phase:
        """Say what this worker does now; returns what it did before."""
        before, self._phase = self._phase, phase
        self._write(time.monotonic_ns())
        return before

    def beat(self, key: object) -> int:
        """An optimizer has stepped; returns the steps so far.

        Calls are folded to steps by rounds: a step is over when an optimizer (or one of its parameter groups,
        by `key`) comes round again. So a DeepSpeed engine that calls its optimizer once per parameter group
        and a model with one optimizer per layer count as one step each time.
        """
        now = time.monotonic_ns()
        if not self._round or key in self._round or len(self._round) >= ROUND_KEYS_MAX:
            self._round.clear()
            self.steps += 1
            if self.steps == 1:
                self._phase = Phase.TRAINING
                self._warm_up_ns = now - self._loaded_at_ns if self._loaded_at_ns else 0
        self._round.add(key)
        self._write(now)
        return self.steps

    def renew(self) -> None:
        """Begin a new attempt in the same process: nothing was stepped or saved yet."""
        self.steps, self._saved_step = 0, -1
        self._load_ns = self._loaded_at_ns = self._warm_up_ns = self._held_ns = 0
        self._round.clear()
        self.enter(Phase.STARTING)

    def saved(self, step: int) -> None:
        """Say the training's own step, as a checkpoint named it."""
        self._saved_step = step
        self._write(time.monotonic_ns())

    def loaded(self, seconds: float) -> None:
        """A checkpoint was loaded, which took so long; counts before the first step."""
        if self.steps == 0:
            self._load_ns += int(seconds * 1e9)
            self._loaded_at_ns = time.monotonic_ns()

    def held(self, seconds: float) -> None:
        """Saving has held the training for so long."""
        self._held_ns += int(seconds * 1e9)

    def close(self) -> None:
        """Unmap and close; the record stays as it is."""
        self._map.close()
        os.close(self._fd)

    def _write(self, now_ns: int) -> None:
        begin, sequence = self._begin, (self._seq + 1) & 0xFFFFFFFF
        _SEQ.pack_into(self._map, begin, sequence)
        _BODY.pack_into(
            self._map,
            begin + 4,
            self._pid,
            self._pid_start,
            self.steps,
            self._saved_step,
            now_ns,
            self._phase,
            self._rank,
            min(self._load_ns // _NS_PER_MS, _MS_MAX),
            min(self._warm_up_ns // _NS_PER_MS, _MS_MAX),
            self._held_ns,
        )
        self._seq = (sequence + 1) & 0xFFFFFFFF
        _SEQ.pack_into(self._map, begin, self._seq)


def start_time(pid: int) -> int:
    """Clock ticks since boot at which a process began, 0 where it cannot be read. A pid alone is reused."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _lives(pid: int, pid_start: int) -> bool:
    return pid_start != 0 and start_time(pid) == pid_start
