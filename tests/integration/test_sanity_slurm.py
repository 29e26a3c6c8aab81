"""The hooks under a real Slurm: slurmctld and slurmd on this machine, without munge. Skipped without them.

On Debian: `apt-get install slurmd slurmctld slurm-client`. `TEST_SLURM_PLUGINS` names the plug-in folder of a
Slurm that was unpacked elsewhere.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import sanitycheck

WAIT_S = 60.0
CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={second}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
MpiDefault=none
SwitchType=switch/none
ReturnToService=1
Prolog={folder}/prolog
PrologFlags=Alloc
HealthCheckProgram={folder}/health
HealthCheckInterval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
{more}
"""
SCRIPT = """#!/bin/sh
export PATH={path} SLURM_CONF={folder}/slurm.conf PYTHONPATH={package} LD_LIBRARY_PATH={libraries}
exec {python} -m sanitycheck hook {kind} --only host.disk,host.kernel --drill {folder}/{name}.json
"""
FINE = {"host.disk": {"facts": {}}}
SICK = {"host.disk": {"facts": {"volumes": [{"bytes_free": 1}]}}}
BLOCKED = {"host.disk": {"facts": {"temp_found": False}}}
UNSEEN = {**FINE, "host.kernel": {"cannot": {"kind": "not_permitted", "message": "/dev/kmsg"}}}


def program(*names: str) -> str | None:
    return next((found for name in names if (found := shutil.which(name))), None)


class Slurm:
    """A cluster of one node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = socket.gethostname()

    def drill(self, hook: str, checks: object) -> None:
        """What the hook will see from now on."""
        temporary = self.folder / f"{hook}.tmp"
        temporary.write_text(json.dumps({"schema": 1, "checks": checks}))
        temporary.replace(self.folder / f"{hook}.json")

    def ask(self, *args: str) -> str:
        done = subprocess.run(
            args,
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")},
            capture_output=True,
            text=True,
            check=False,
            timeout=WAIT_S,
        )
        return done.stdout + done.stderr

    def node(self) -> str:
        return self.ask("scontrol", "show", "node", self.host, "--oneliner")

    def until(self, good: Callable[[str], bool]) -> str:
        ends = time.monotonic() + WAIT_S
        while not good(state := self.node()):
            assert time.monotonic() < ends, state
            time.sleep(0.2)
        return state


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    lead, worker = program("slurmctld", "slurmctld-wlm"), program("slurmd", "slurmd-wlm")
    step = program("slurmstepd", "slurmstepd-wlm")
    if lead is None or worker is None or program("scontrol") is None or os.geteuid() != 0:
        pytest.skip("needs root and slurmd, slurmctld and slurm-client")
    cluster = Slurm(tmp_path)
    plugins = os.environ.get("TEST_SLURM_PLUGINS")
    for name in ("state", "spool"):
        (tmp_path / name).mkdir()
    (tmp_path / "slurm.conf").write_text(
        CONFIG.format(
            host=cluster.host,
            port=free_port(),
            second=free_port(),
            folder=tmp_path,
            more=f"PluginDir={plugins}" if plugins else "",
        )
    )
    for name, kind in (("prolog", "slurm-prolog"), ("health", "slurm-health")):
        text = SCRIPT.format(
            path=os.environ["PATH"],
            folder=tmp_path,
            package=Path(sanitycheck.__file__).parents[1],
            libraries=os.environ.get("LD_LIBRARY_PATH", ""),
            python=sys.executable,
            kind=kind,
            name=name,
        )
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        cluster.drill(name, FINE)
    config = ["-D", "-f", str(tmp_path / "slurm.conf")]
    commands = [[lead, *config], [worker, *config, *(["-d", step] if step else [])]]
    children = []
    try:
        for command in commands:
            with (tmp_path / f"{Path(command[0]).name}.out").open("wb") as out:
                children.append(subprocess.Popen(command, stdout=out, stderr=out))
            if len(children) == 1:
                ends = time.monotonic() + WAIT_S
                while "NodeName" not in cluster.node():
                    assert time.monotonic() < ends, cluster.node()
                    time.sleep(0.2)
        yield cluster
    finally:
        for child in reversed(children):
            child.terminate()
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


@pytest.mark.slow
def test_what_fails_drains_and_what_is_unknown_does_not(slurm: Slurm) -> None:
    slurm.until(lambda state: "State=IDLE " in state)
    slurm.drill("health", SICK)
    state = slurm.until(lambda state: "DRAIN" in state)
    assert "Reason=sanitycheck: host.disk" in state
    slurm.drill("health", UNSEEN)
    slurm.ask("scontrol", "update", f"nodename={slurm.host}", "state=resume")
    slurm.until(lambda state: "DRAIN" not in state)
    # A job in between: by its end, the health program has run several times more.
    assert "ran" in slurm.ask("srun", "-N1", "sh", "-c", "sleep 5; echo ran")
    assert "DRAIN" not in slurm.node()


@pytest.mark.slow
def test_a_prolog_that_blocks_drains_the_node_before_the_job(slurm: Slurm) -> None:
    slurm.until(lambda state: "State=IDLE " in state)
    slurm.drill("prolog", UNSEEN)
    assert "ran" in slurm.ask("srun", "-N1", "echo", "ran")
    slurm.drill("prolog", BLOCKED)
    assert "ran" not in slurm.ask("srun", "-N1", "echo", "ran")
    slurm.until(lambda state: "DRAIN" in state)
    assert "sanitycheck: host.disk" in (slurm.folder / "slurmd.log").read_text()
