"""The test cluster itself: hosts reach each other, can be cut, frozen, killed, and leave nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import READY_S, Cluster, Host

pytestmark = pytest.mark.netns

MakeCluster = Callable[[int], Cluster]

SERVE = """
import socket
server = socket.create_server(("0.0.0.0", 7000))
print("serving", flush=True)
while True:
    peer, _ = server.accept()
    peer.sendall(socket.gethostname().encode())
    peer.close()
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as peer:
    print(peer.recv(100).decode())
"""
ORPHAN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.execv("/bin/sleep", ["sleep", "600"])
    os._exit(0)
os.wait()
print("orphan made", flush=True)
time.sleep(600)
"""


def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + READY_S
    while not check():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.02)


def serve(host: Host) -> subprocess.Popen[bytes]:
    child = host.popen([sys.executable, "-c", SERVE])
    until(lambda: "serving" in host.log(child), "the server listens")
    return child


def ask(host: Host, other: Host, *, timeout_s: float = READY_S) -> str:
    done = host.run([sys.executable, "-c", ASK, other.address, str(timeout_s)], timeout_s=4 * READY_S)
    return done.stdout.strip() if done.returncode == 0 else f"failed: {done.stderr.strip().splitlines()[-1]}"


def test_hosts_have_names_addresses_and_a_network(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    serve(cluster[0])
    assert [ask(host, cluster[0]) for host in cluster.hosts] == ["h0"] * 3
    assert len({host.address for host in cluster.hosts}) == 3
    assert cluster[1].run(["hostname"]).stdout.strip() == "h1"


def test_the_network_is_shut_off_from_the_machine(make_cluster: MakeCluster) -> None:
    host = make_cluster(1)[0]
    links = host.run(["ip", "-brief", "link"]).stdout.split()
    assert [word for word in links if word.partition("@")[0] in ("lo", "eth0")]
    assert os.uname().nodename != "h0"


def test_cut_and_heal(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(3)
    serve(cluster[0])
    serve(cluster[1])
    cluster[0].cut()
    assert ask(cluster[1], cluster[0], timeout_s=0.5).startswith("failed")
    assert ask(cluster[0], cluster[1], timeout_s=0.5).startswith("failed")
    assert ask(cluster[2], cluster[1]) == "h1"
    cluster[0].heal()
    until(lambda: ask(cluster[1], cluster[0]) == "h0", "the network is back")


def test_stop_and_continue(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    serve(cluster[0])
    cluster[0].stop()
    assert ask(cluster[1], cluster[0], timeout_s=0.5).startswith("failed")
    cluster[0].cont()
    assert ask(cluster[1], cluster[0]) == "h0"


def test_kill_reaches_orphans_without_environment(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    child = cluster[0].popen([sys.executable, "-c", ORPHAN])
    bystander = cluster[1].popen(["sleep", "600"])
    until(lambda: "orphan made" in cluster[0].log(child), "the orphan lives")
    assert len(cluster[0].pids()) == 2
    cluster[0].kill()
    assert cluster[0].pids() == ()
    assert child.returncode == -9
    assert bystander.poll() is None


def test_wipe_loses_the_disk_and_nothing_else(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    for host in cluster.hosts:
        Path(host.env["AIMASTER_STATE_DIR"], "journal").write_text("x")
    cluster[0].kill()
    cluster[0].wipe()
    assert not Path(cluster[0].env["AIMASTER_STATE_DIR"], "journal").exists()
    assert Path(cluster[1].env["AIMASTER_STATE_DIR"], "journal").exists()
    assert cluster[0].run(["true"]).returncode == 0


def test_nothing_is_left(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(2)
    serve(cluster[0])
    spaces = [os.readlink(f"/proc/{pid}/ns/net") for pid in cluster[0].pids()]
    cluster.close()
    inside = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                inside.append(os.readlink(entry / "ns" / "net"))
            except OSError:
                continue
    assert not set(spaces) & set(inside)
