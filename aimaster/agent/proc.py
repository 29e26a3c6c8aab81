"""What the kernel says about processes (proc(5)), as frozen values. Reads only."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ENVIRON_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessStat:
    """One process at one moment. `start` (clock ticks since boot) tells it from a later one with its pid."""

    pid: int
    name: str
    state: str
    ppid: int
    session: int
    start: int

    @property
    def ended(self) -> bool:
        """Whether it runs no more: a zombie holds nothing but its number."""
        return self.state in "ZX"


def stat(pid: int) -> ProcessStat | None:
    """What ``/proc/PID/stat`` says; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read()
    except OSError:
        return None
    # The name may hold anything, brackets and blanks included; the last bracket ends it.
    left, _, right = text.rpartition(b")")
    fields = right.split()
    return ProcessStat(
        pid=pid,
        name=os.fsdecode(left.partition(b"(")[2]),
        state=fields[0].decode(),
        ppid=int(fields[1]),
        session=int(fields[3]),
        start=int(fields[19]),
    )


def everything() -> dict[int, ProcessStat]:
    """Every process that this one can see."""
    found = (stat(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {entry.pid: entry for entry in found if entry is not None}


def descendants(roots: Iterable[int], processes: Mapping[int, ProcessStat]) -> set[int]:
    """The roots that are there, and all that descend from them."""
    below: dict[int, list[int]] = {}
    for entry in processes.values():
        below.setdefault(entry.ppid, []).append(entry.pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += below.get(pid, ())
    return found


def variable(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was *executed* with; None if unset or not readable."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read(ENVIRON_BYTES_MAX)
    except OSError:
        return None
    wanted = os.fsencode(name) + b"="
    for entry in text.split(b"\0"):
        if entry.startswith(wanted):
            return os.fsdecode(entry[len(wanted) :])
    return None


def describe(entry: ProcessStat) -> str:
    """For people: which process, and what it is doing in the kernel if it does not go away."""
    try:
        with open(f"/proc/{entry.pid}/wchan", encoding="ascii", errors="replace") as file:
            place = file.read(64).strip("\0 \n0")
    except OSError:
        place = ""
    return f"pid {entry.pid} ({entry.name}, state {entry.state}{f', in {place}' if place else ''})"
