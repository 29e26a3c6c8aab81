"""What the kernel counts for a process and all that came from it: processor time, bytes, states, threads.

Reads of /proc only (proc(5)); nothing is sampled, sent or stopped. What cannot be read (another user's
process, a hardened kernel) is left out, and `Counters` says how many processes it stands for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from aimaster.agent import proc
from aimaster.core.sights import Effort

TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
THREADS_MAX = 512
"""Threads of one process whose waits are looked at."""
_FUTEX_CALLS = {"x86_64": {202}, "aarch64": {98}}
_SLEEP_CALLS = {"x86_64": {34, 35, 230}, "aarch64": {101, 115}}
_MACHINE = os.uname().machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """A process tree at one moment."""

    processes: int
    cpu_s: float
    """Processor time of the live processes."""
    bytes_moved: int
    """Read and written through system calls and to disks; not what send and recv moved."""
    runnable: bool
    """Whether any thread of a main process runs or wants to, or waits for a disk."""
    stopped: bool
    """Whether the first process, the rank itself, is stopped."""
    traced: bool
    """Whether any of them is traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """Where one thread waits."""

    tid: int
    call: int | None
    """Number of the system call that it is in; None where it runs or nothing can be read."""
    switches: int
    """How often it gave its processor up or lost it."""

    @property
    def in_lock(self) -> bool:
        """Whether it waits on a futex: a lock, a condition, a semaphore."""
        return self.call in _FUTEX_CALLS.get(_MACHINE, ())

    @property
    def in_sleep(self) -> bool:
        """Whether it sleeps or waits for a signal."""
        return self.call in _SLEEP_CALLS.get(_MACHINE, ())


def read_tree(root: int, below: Iterable[int]) -> Counters | None:
    """The root and what descends from it; None if the root is gone."""
    cpu_s, moved, count = 0.0, 0, 0
    runnable = traced = False
    first = _stat(root)
    if first is None:
        return None
    for pid in (root, *(pid for pid in below if pid != root)):
        fields = first if pid == root else _stat(pid)
        if fields is None or fields[0] in "ZX":
            continue
        count += 1
        cpu_s += (int(fields[11]) + int(fields[12])) * TICK_S
        moved += _bytes(pid)
        runnable = runnable or fields[0] in "RD"
        traced = traced or fields[0] == "t" or _tracer(pid) != 0
    return Counters(
        processes=count,
        cpu_s=cpu_s,
        bytes_moved=moved,
        runnable=runnable,
        stopped=first[0] == "T",
        traced=traced,
    )


def effort(pid: int) -> Effort | None:
    """What the main thread of a process has done so far; None where the kernel does not count it."""
    try:
        with open(f"/proc/{pid}/task/{pid}/schedstat", "rb") as file:
            running_ns, waiting_ns, _ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    return Effort(at_s=time.monotonic(), awake_s=(running_ns + waiting_ns) / 1e9, running_s=running_ns / 1e9)


def threads(pid: int) -> list[Thread]:
    """All threads of a process, and what each waits for; empty where the kernel does not say."""
    found: list[Thread] = []
    try:
        names = os.listdir(f"/proc/{pid}/task")
        for name in names[:THREADS_MAX]:
            found.append(
                Thread(tid=int(name), call=_call(pid, name), switches=_switches(f"/proc/{pid}/task/{name}"))
            )
    except (OSError, ValueError):
        return []
    return found


def below(root: int, processes: dict[int, proc.ProcessStat]) -> list[int]:
    """Descendants of a process, itself left out."""
    return sorted(proc.descendants((root,), processes) - {root})


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/PID/stat`` behind the name: state first."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].decode().split()
    except OSError:
        return None


def _bytes(pid: int) -> int:
    total = 0
    for line in _lines(f"/proc/{pid}/io"):
        name, _, value = line.partition(":")
        if name in ("rchar", "wchar", "read_bytes", "write_bytes"):
            total += int(value)
    return total


def _tracer(pid: int) -> int:
    for line in _lines(f"/proc/{pid}/status"):
        if line.startswith("TracerPid:"):
            return int(line.split()[1])
    return 0


def _switches(folder: str) -> int:
    return sum(int(line.split()[1]) for line in _lines(f"{folder}/status") if "ctxt_switches" in line)


def _call(pid: int, tid: str) -> int | None:
    words = " ".join(_lines(f"/proc/{pid}/task/{tid}/syscall")).split()
    return int(words[0]) if words and words[0].isdigit() else None


def _lines(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
