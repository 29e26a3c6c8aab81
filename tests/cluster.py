"""N hosts on one machine, as network namespaces on a switch of their own, each with an address and folders.

A host is a pair of namespaces (network, host name) that a holder process keeps open; a switch is one more
namespace with a bridge. Nothing of it has a name outside. The holders end when their input closes, and the
kernel takes namespaces and links away with the last process in them.

Which processes belong to a host is not guessed: they are those whose network namespace is the host's, however
often they changed their parent or session. The namespace was made here, so whatever is inside was started by
the test. Hosts share the machine's processors, memory, clock and file system; `wipe` takes the place of a
lost disk. Names are not resolved inside: use addresses.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.leftovers import processes

NETWORK = "10.77.0"
"""First three bytes of the addresses; only the namespaces see them."""
HOSTS_MAX = 64
READY_S = 30.0
"""How long making or changing a namespace may take on a busy machine."""
TOOLS = ("ip", "nsenter", "unshare")


class ClusterBroken(RuntimeError):
    """The machine did not do what the cluster asked for."""


def why_not() -> str:
    """Why no cluster can be made here; empty if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)} (iproute2, util-linux)"
    try:
        tried = subprocess.run(
            ["unshare", "--net", "--uts", "ip", "link", "add", "probe", "type", "bridge"],
            capture_output=True,
            text=True,
            check=False,
            timeout=READY_S,
        )
    except subprocess.TimeoutExpired:
        return "making a network namespace took too long"
    return f"network namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else ""


class _Namespace:
    """A holder process and the namespaces that it keeps open."""

    def __init__(self, name: str) -> None:
        self.name = name
        # `cat` ends when its input closes: at `close`, or when the test run dies.
        self._holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && echo ready && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._holder.stdout is not None
        if self._holder.stdout.readline().strip() != "ready":
            self.close()
            raise ClusterBroken(f"no namespace for {name}")
        self.pid = self._holder.pid
        self._inode = os.stat(f"/proc/{self.pid}/ns/net").st_ino

    def enter(self, args: Sequence[str]) -> list[str]:
        """`args` to be run inside; nsenter replaces itself, so the pid is that of the command."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--", *args]

    def ip(self, command: str) -> None:
        """Run `ip` inside."""
        _run(self.enter(["ip", *command.split()]))

    def members(self) -> dict[int, str]:
        """Pid and state of every process inside but the holder."""
        found = {}
        for process in processes():
            if process.pid != self.pid and process.state not in "ZX":
                with contextlib.suppress(OSError):
                    if os.stat(f"/proc/{process.pid}/ns/net").st_ino == self._inode:
                        found[process.pid] = process.state
        return found

    def signal_all(self, number: signal.Signals, *, until: Callable[[Mapping[int, str]], bool]) -> None:
        """Send a signal to everything inside, again and again, as new processes may be forked meanwhile."""
        deadline = time.monotonic() + READY_S
        while not until(members := self.members()):
            for pid in members:
                with contextlib.suppress(OSError):
                    fd = os.pidfd_open(pid)
                    try:
                        if os.stat(f"/proc/{pid}/ns/net").st_ino == self._inode:
                            signal.pidfd_send_signal(fd, number)
                    finally:
                        os.close(fd)
            if time.monotonic() > deadline:
                raise ClusterBroken(f"{number.name} on {self.name}: still {members} after {READY_S:g} s")
            time.sleep(0.01)

    def close(self) -> None:
        """Let go of the namespaces; the kernel removes them and their links."""
        for stream in (self._holder.stdin, self._holder.stdout):
            if stream is not None:
                stream.close()
        try:
            self._holder.wait(READY_S)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()


class Host:
    """One machine of the cluster."""

    def __init__(self, number: int, folder: Path, switch: _Namespace) -> None:
        self.name = f"h{number}"
        self.address = f"{NETWORK}.{number + 1}"
        self.folder = folder
        self._switch = switch
        self._children: list[subprocess.Popen[bytes]] = []
        self._space = _Namespace(self.name)
        try:
            self._connect()
            self._make_folders()
        except BaseException:
            self._space.close()
            raise

    def _connect(self) -> None:
        ends = f"link add {self.name} type veth peer name eth0 netns {self._space.pid}"
        self._switch.ip(ends)
        self._switch.ip(f"link set {self.name} master switch up")
        self._space.ip(f"address add {self.address}/24 dev eth0")
        self._space.ip("link set eth0 up")
        self._space.ip("link set lo up")

    def _make_folders(self) -> None:
        for name in ("run", "state", "tmp", "logs"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
            (self.folder / name).chmod(0o700)

    @property
    def env(self) -> dict[str, str]:
        """Environment of what is started here: this process's, with the host's own folders."""
        return {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",  # else gloo asks for the address of the host's name
            "AIMASTER_RUN_DIR": str(self.folder / "run"),
            "AIMASTER_STATE_DIR": str(self.folder / "state"),
            "TMPDIR": str(self.folder / "tmp"),
            "XDG_RUNTIME_DIR": str(self.folder / "tmp"),
            "XDG_STATE_HOME": str(self.folder / "state"),
        }

    def popen(self, args: Sequence[str], *, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a command here; its output goes to `log(process)`."""
        with (self.folder / "logs" / f"{len(self._children)}.log").open("wb") as log:
            child = subprocess.Popen(
                self._space.enter(args),
                env={**self.env, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._children.append(child)
        return child

    def log(self, child: subprocess.Popen[bytes]) -> str:
        """What a process started by `popen` has written so far."""
        path = self.folder / "logs" / f"{self._children.index(child)}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def run(self, args: Sequence[str], *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a short command here to its end."""
        return subprocess.run(
            self._space.enter(args),
            env=self.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )

    def pids(self) -> tuple[int, ...]:
        """Every process that lives here now."""
        return tuple(sorted(self._space.members()))

    def cut(self) -> None:
        """Pull the cable: nothing passes in either direction, and nobody is told."""
        self._switch.ip(f"link set {self.name} down")

    def heal(self) -> None:
        """Plug the cable in again."""
        self._switch.ip(f"link set {self.name} up")

    def stop(self) -> None:
        """Freeze every process here (SIGSTOP)."""
        self._space.signal_all(signal.SIGSTOP, until=lambda all_: all(s in "Tt" for s in all_.values()))

    def cont(self) -> None:
        """Let frozen processes run again."""
        self._space.signal_all(signal.SIGCONT, until=lambda all_: all(s not in "Tt" for s in all_.values()))

    def kill(self) -> None:
        """Take the power away: SIGKILL to every process here."""
        self._space.signal_all(signal.SIGKILL, until=lambda all_: not all_)
        for child in self._children:
            child.wait(READY_S)

    def wipe(self) -> None:
        """Lose the disk: the host's folders are empty afterwards. Kill first."""
        for name in ("run", "state", "tmp"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        self._make_folders()

    def close(self) -> None:
        """End everything and give the namespaces back."""
        try:
            self.kill()
        finally:
            self._space.close()


class Cluster:
    """Hosts on one switch. Close it, or use it in a `with`."""

    def __init__(self, hosts: int, folder: Path) -> None:
        if not 1 <= hosts <= HOSTS_MAX:
            raise ValueError(f"a cluster has 1 to {HOSTS_MAX} hosts, got {hosts}")
        self.hosts: list[Host] = []
        self._switch = _Namespace("switch")
        try:
            self._switch.ip("link add switch type bridge")
            self._switch.ip("link set switch up")
            for number in range(hosts):
                self.hosts.append(Host(number, folder / f"h{number}", self._switch))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def close(self) -> None:
        """End everything, whatever fails on the way."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._switch.close)
            for host in self.hosts:
                stack.callback(host.close)


def _run(args: Sequence[str]) -> None:
    done = subprocess.run(args, capture_output=True, text=True, check=False, timeout=READY_S)
    if done.returncode:
        raise ClusterBroken(f"{' '.join(args)}: {done.stderr.strip()}")


@pytest.fixture(scope="session")
def cluster_reason() -> str:
    """Asked once per run: why clusters are skipped, or empty."""
    return why_not()


@pytest.fixture
def make_cluster(cluster_reason: str) -> Iterator[Callable[[int], Cluster]]:
    """Makes clusters of so many hosts; all of them are closed at the end. Skips where that is not allowed.

    Their folders are not below `tmp_path`: a Unix socket's path holds 107 bytes.
    """
    if cluster_reason:
        pytest.skip(cluster_reason)
    with contextlib.ExitStack() as stack:
        yield lambda hosts: stack.enter_context(
            Cluster(hosts, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="c-"))))
        )
