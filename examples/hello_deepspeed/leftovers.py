"""What a job has held of the machine, and what of it is still there afterwards.

Theory of operation: every process that the demo starts carries a token in its environment and passes it on,
so that a scan of ``/proc`` finds its descendants, however they detached themselves. While the job runs,
`Ledger` notes their pids (with start times, since pids are used again), the Unix sockets they hold, and the
shared-memory files they have mapped. Afterwards `measure` looks for all of these, for any process with the
token, and for the TCP ports that such a process listens on. Only what was proved to be the job's is counted,
so other work on the machine does no harm.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOKEN_VARIABLE = "HELLO_DEEPSPEED_TOKEN"


@dataclass(slots=True)
class Ledger:
    """What was seen of a job's processes."""

    token: str
    processes: dict[str, str] = field(default_factory=dict)
    """``<pid>@<start time>`` → command line."""
    unix_sockets: set[str] = field(default_factory=set)
    shared_memory: set[str] = field(default_factory=set)

    def observe(self) -> None:
        """Look at all processes with the token now; cheap enough for a few times a second."""
        for process in with_token(self.token):
            try:
                key = f"{process.pid}@{process.create_time()}"
                self.processes.setdefault(key, " ".join(process.cmdline())[:200])
                for connection in process.net_connections(kind="unix"):
                    if connection.laddr:
                        self.unix_sockets.add(str(connection.laddr))
                self.shared_memory |= _shared_files(process.pid)
            except (psutil.Error, OSError):
                continue  # it ended while it was looked at

    def write(self, path: Path) -> None:
        """Keep the ledger for `measure`."""
        path.write_text(
            json.dumps(
                {
                    "token": self.token,
                    "processes": self.processes,
                    "unix_sockets": sorted(self.unix_sockets),
                    "shared_memory": sorted(self.shared_memory),
                },
                indent=1,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Counts that should be zero, and what they count."""

    processes: int
    sockets: int
    shm_bytes: int
    names: tuple[str, ...]


def with_token(token: str) -> list[psutil.Process]:
    """Every process of ours that carries the token, except this one and its parent."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for process in psutil.process_iter():
        if process.pid in (os.getpid(), os.getppid()):
            continue
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if needle in environment and process.is_running():
            found.append(process)
    return found


def measure(path: Path) -> Leftovers:
    """Look for everything that the ledger at ``path`` lists."""
    seen = json.loads(path.read_text())
    alive = {f"{process.pid}@{process.create_time()}": process.pid for process in with_token(seen["token"])}
    for key in seen["processes"]:
        pid, _, started = key.partition("@")
        try:
            if psutil.Process(int(pid)).create_time() == float(started):
                alive.setdefault(key, int(pid))
        except psutil.Error:
            continue
    open_unix = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]}
    sockets = [name for name in seen["unix_sockets"] if name in open_unix or _is_socket_file(name)]
    ports = sorted(port for pid in alive.values() for port in _listening_ports(pid))
    files = {name for name in seen["shared_memory"] if Path(name).exists()}
    shm_bytes = sum(Path(name).stat().st_size for name in files) + sum(map(_memory_files, alive.values()))
    names = (
        *(f"process {key}: {seen['processes'].get(key, 'started by one of ours')}" for key in sorted(alive)),
        *(f"socket {name}" for name in sockets),
        *(f"port {port}" for port in ports),
        *(f"shared memory {name}" for name in sorted(files)),
    )
    return Leftovers(
        processes=len(alive), sockets=len(sockets) + len(ports), shm_bytes=shm_bytes, names=names
    )


def _shared_files(pid: int) -> set[str]:
    """Files in /dev/shm that a process has mapped."""
    found = set()
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        _, slash, rest = line.partition("/dev/shm/")
        if slash and not rest.endswith(" (deleted)"):
            found.add(slash + rest)
    return found


def _memory_files(pid: int) -> int:
    """Bytes in anonymous memory files that a process holds open."""
    total = 0
    seen: set[int] = set()
    folder = Path(f"/proc/{pid}/fd")
    try:
        for entry in folder.iterdir():
            if os.readlink(entry).startswith("/memfd:"):
                status = entry.stat()
                if status.st_ino not in seen:
                    seen.add(status.st_ino)
                    total += status.st_blocks * 512
    except OSError:
        return total
    return total


def _listening_ports(pid: int) -> set[int]:
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return set()
    return {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}


def _is_socket_file(name: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(name).st_mode)
    except (OSError, ValueError):
        return False
