"""Finds what a test left behind: processes that it started, listening sockets and memory files it kept open.

A process belongs to the test if it began after it and either descends from this process or carries its
ownership token in the environment (a saver in its own session, an orphan that went to another parent).
Nothing is found by name, so parallel runs and other people's processes are never touched.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import signal
import time
from dataclasses import dataclass
from pathlib import Path

TOKEN_VARIABLE = "TEST_OWNER_TOKEN"
GRACE_S = 10.0
"""How long something that is already ending may take; the wait is over as soon as nothing is left."""
_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

HELPERS = (
    b"multiprocessing.resource_tracker",  # one per interpreter, ends with it
    b"multiprocessing.forkserver",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One line of /proc, enough to tell whose it is and that it is still the same one."""

    pid: int
    ppid: int
    started: int
    """Clock ticks since boot."""
    state: str

    def command(self) -> bytes:
        return _read(self.pid, "cmdline").replace(b"\0", b" ").strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Watcher:
    """Remembers what was there when a test began."""

    token: str
    began: int
    there: frozenset[int]
    """Pids at that moment: a fixture of a wider scope may have started one in the same clock tick."""
    kept: frozenset[str]

    @classmethod
    def start(cls) -> Watcher:
        """Begin to watch; children started from now on inherit the token."""
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(8)
        os.environ[TOKEN_VARIABLE] = token
        began = int(time.clock_gettime(time.CLOCK_BOOTTIME) * _TICKS_PER_S)
        there = frozenset(int(name) for name in os.listdir(_PROC) if name.isdigit())
        return cls(token=token, began=began, there=there, kept=frozenset(own_objects()))

    def leftovers(self) -> list[Process]:
        """Processes of the test that still run."""
        table = {process.pid: process for process in processes()}
        new = (p for p in table.values() if p.started >= self.began and p.pid not in self.there)
        return [process for process in new if self._is_ours(process, table)]

    def end_leftovers(self) -> list[str]:
        """Wait for what is ending, end what is not, and describe it."""
        left = self._wait_for_none()
        found = [f"process {p.pid} ({p.command().decode(errors='replace')[:200]})" for p in left]
        for process in left:
            _kill(process)
        objects = set(own_objects()) - self.kept
        if objects:
            gc.collect()
            objects = set(own_objects()) - self.kept
        return found + sorted(objects)

    def _wait_for_none(self) -> list[Process]:
        deadline = time.monotonic() + GRACE_S
        left = self.leftovers()
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            left = self.leftovers()
        return left

    def _is_ours(self, process: Process, table: dict[int, Process]) -> bool:
        if process.state in "ZX" or process.pid == os.getpid():
            return False
        if any(helper in process.command() for helper in HELPERS):
            return False
        above: Process | None = process
        while above is not None and above.ppid > 1:
            if above.ppid == os.getpid():
                return True
            above = table.get(above.ppid)
        return f"{TOKEN_VARIABLE}={self.token}".encode() in _read(process.pid, "environ").split(b"\0")


def processes() -> list[Process]:
    """All processes that can be seen now."""
    found = []
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            fields = _read(int(entry.name), "stat").rpartition(b")")[2].split()
            if fields:
                process = Process(
                    pid=int(entry.name),
                    ppid=int(fields[1]),
                    started=int(fields[19]),
                    state=fields[0].decode(),
                )
                found.append(process)
    return found


def own_objects() -> list[str]:
    """Memory files and listening sockets that this process holds open."""
    listening = _listening_inodes()
    found = []
    for fd in os.listdir(_PROC / "self" / "fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(_PROC / "self" / "fd" / fd)
            if target.startswith("/memfd:"):
                found.append(f"memory file {target.removeprefix('/memfd:')} at descriptor {fd}")
            elif target.removeprefix("socket:[").rstrip("]") in listening:
                found.append(f"listening socket at descriptor {fd}")
    return found


def _listening_inodes() -> set[str]:
    inodes = set()
    for table in ("tcp", "tcp6"):
        for line in _read("self", f"net/{table}").splitlines()[1:]:
            fields = line.split()
            if fields[3] == b"0A":  # LISTEN
                inodes.add(fields[9].decode())
    return inodes


def _read(pid: int | str, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:  # it ended meanwhile, or belongs to another user
        return b""


def _kill(process: Process) -> None:
    """SIGKILL, through a descriptor, so that the number cannot come to mean another process in between."""
    with contextlib.suppress(OSError):
        fd = os.pidfd_open(process.pid)
        try:
            again = next((p for p in processes() if p.pid == process.pid), None)
            if again is not None and again.started == process.started:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        finally:
            os.close(fd)
