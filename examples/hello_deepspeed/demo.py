"""The demo: training survives a killed worker, a frozen one and a lost node, and its result does not show it.

    python demo.py                 everything, into build/demo

Two nodes of one worker each and a spare node run on this machine, each with its own agent, run directory and
ports. On the way the first node's worker is killed; then the second node's worker is frozen, which nobody
tells the job; later everything of the second node is killed and its folders are wiped, so that the spare
takes its place. Then the same training runs undisturbed. The driver only starts, watches and hurts;
`check.py`, started at the end, judges from what the runs left behind.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import build_ops
import psutil
from leftovers import TOKEN_VARIABLE, Ledger, with_token
from view import StepReader, View

HERE = Path(__file__).resolve().parent
POLL_S = 0.05
OBSERVE_EVERY_S = 1.0
START_LIMIT_S = 120.0
STOP_LIMIT_S = 30.0


FAULTS = ("worker_killed", "worker_hung", "node_lost")
WORKER_FAULTS = {"worker_killed": signal.SIGKILL, "worker_hung": signal.SIGSTOP}


class DemoFailed(Exception):
    """The job did something else than the demo expects; the message says what and where its log is."""


@dataclass(slots=True, eq=False)
class Node:
    """One node of the job: an agent and the folders that are the node's own."""

    name: str
    folder: Path
    agent: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        return self.folder.with_suffix(".log")

    def tail(self) -> str:
        """The last lines that the node printed."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-15:])


class Job:
    """A training under `aimaster run`, as several nodes on this machine."""

    def __init__(self, folder: Path, options: argparse.Namespace, *, nodes: int) -> None:
        self.folder, self.options = folder, options
        self.nodes: dict[str, Node] = {}
        self.id = f"hello-{folder.name}-{secrets.token_hex(3)}"
        self._port = free_port()
        self._nodes_wanted = nodes
        self.ledger = Ledger(token=secrets.token_hex(16))
        self.reader = StepReader(folder / "steps")
        self.lines: list[dict[str, Any]] = []
        self._observed = 0.0
        folder.mkdir(parents=True)
        self._secret = folder / "secret"
        self._secret.touch(mode=0o600)
        self._secret.write_text(secrets.token_hex(32))

    def start_node(self, name: str) -> Node:
        """Start a node's agent in a session of its own."""
        folder = self.folder / "nodes" / name
        folder.mkdir(parents=True)
        command = [
            *aimaster(), "run", "--nnodes", str(self._nodes_wanted), "--nproc-per-node", "1",
            "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", self.id, "--node-id", name,
            "--run-dir", str(folder / "run"), "--state-dir", str(folder / "state"),
            "--secret-file", str(self._secret), "--ckpt-dir", str(self.folder / "checkpoints"),
            str(HERE / "train.py"), "--checkpoint_dir", str(self.folder / "checkpoints"),
            "--cache_dir", str(self.folder.parent / "cache"), "--step_log", str(self.folder / "steps"),
            "--export", str(self.folder / "final.safetensors"), "--steps", str(self.options.steps),
            "--seed", str(self.options.seed), "--hidden_size", str(self.options.hidden_size),
            "--layers", str(self.options.layers),
        ]  # fmt: skip
        if self.options.tensorboard:
            command += ["--tensorboard", str(self.folder / "tensorboard")]
        environment = {**os.environ, TOKEN_VARIABLE: self.ledger.token, "DS_ACCELERATOR": "cpu"}
        environment.update(build_ops.environment())
        environment.setdefault("OMP_NUM_THREADS", "1")
        with open(folder.with_suffix(".log"), "wb") as log:
            agent = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self.nodes[name] = Node(name=name, folder=folder, agent=agent)
        return self.nodes[name]

    def status(self) -> dict[str, Any] | None:
        """What `aimaster status --json` says now; None if it says nothing."""
        run_dir = self.nodes["node-a"].folder / "run"
        done = subprocess.run(
            [*aimaster(), "status", "--json", "--run-dir", str(run_dir)],
            capture_output=True, text=True, timeout=STOP_LIMIT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0 or not done.stdout.strip():
            return None
        said: dict[str, Any] = json.loads(done.stdout)
        return said

    def watch(self, view: View) -> None:
        """Take in what the ranks have logged, and what the processes hold."""
        new = self.reader.read()
        self.lines += new
        view.update(new)
        if time.monotonic() - self._observed > OBSERVE_EVERY_S:
            self.ledger.observe()
            self._observed = time.monotonic()

    def wait(self, what: str, view: View, reached: Callable[[], bool], *, limit_s: float) -> None:
        """Watch until ``reached`` says so.

        Raises:
            DemoFailed: too late, or an agent that should run has ended.
        """
        end = time.monotonic() + limit_s
        while not reached():
            self.watch(view)
            codes = {node: node.agent.poll() for node in self.nodes.values()}
            for node, code in codes.items():
                if code not in (None, 0):
                    raise DemoFailed(f"{node.name} ended with code {code} ({node.log}):\n{node.tail()}")
            if all(code == 0 for code in codes.values()) and not reached():
                raise DemoFailed(f"the training was over before {what}; give it more --steps")
            if time.monotonic() > end:
                tails = "\n".join(f"--- {node.log}\n{node.tail()}" for node in self.nodes.values())
                raise DemoFailed(f"waited {limit_s:.0f} s in vain for: {what}\n{tails}")
            time.sleep(POLL_S)
        self.watch(view)

    def step(self) -> int:
        """The newest step that any rank has finished."""
        return max((line["step"] for line in self.lines), default=0)

    def generation(self) -> int:
        """The newest generation that has finished a step."""
        return max((line["generation"] for line in self.lines), default=0)

    def finish(self, view: View) -> None:
        """Wait for the end of all agents."""
        self.wait(
            "the end of the training", view,
            lambda: all(node.agent.poll() == 0 for node in self.nodes.values()), limit_s=self.options.limit_s,
        )  # fmt: skip
        self.ledger.write(self.folder / "held.json")

    def stop(self) -> None:
        """End what still runs, politely first. Only after the check, which must find what was left."""
        running = [node.agent for node in self.nodes.values() if node.agent.poll() is None]
        for agent in running:
            agent.terminate()
        for agent in running:
            try:
                agent.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                agent.kill()
        for process in with_token(self.ledger.token):
            process.kill()
        self._secret.unlink(missing_ok=True)


def aimaster() -> list[str]:
    """The command of this Python's own installation."""
    return [str(Path(sysconfig.get_path("scripts")) / "aimaster")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def processes_of(job: Job, node: str, view: View) -> list[dict[str, Any]]:
    """A node's processes by the job's own status, each proved to descend from the agent that we started."""
    found: list[dict[str, Any]] = []

    def asked() -> bool:
        status = job.status()
        found[:] = [one for one in (status or {}).get("processes", ()) if one["node"] == node]
        return any(one["role"] == "worker" for one in found)

    job.wait(f"the processes of {node} in the status", view, asked, limit_s=STOP_LIMIT_S)
    agent = psutil.Process(job.nodes[node].agent.pid)
    ours = {agent.pid, *(child.pid for child in agent.children(recursive=True))}
    strangers = [one for one in found if one["pid"] not in ours]
    if strangers:
        raise DemoFailed(f"the status of {node} lists processes that its agent did not start: {strangers}")
    return found


def record_fault(
    job: Job, kind: str, processes: list[dict[str, Any]], *, wall_s: float, node: str = ""
) -> None:
    workers = [one["pid"] for one in processes if one["role"] == "worker"]
    fault = {"kind": kind, "wall_s": wall_s, "worker_pids": workers, "processes": processes, "node": node}
    with open(job.folder.parent / "faults.jsonl", "a") as file:
        file.write(json.dumps(fault) + "\n")


def hurt_worker(job: Job, node: str, view: View, kind: str) -> None:
    """SIGKILL one worker, or freeze it."""
    workers = [one for one in processes_of(job, node, view) if one["role"] == "worker"]
    number = WORKER_FAULTS[kind]
    wall_s = time.time()
    os.kill(workers[0]["pid"], number)
    record_fault(job, kind, workers[:1], wall_s=wall_s)
    view.event(f"sent {number.name} to the worker of {node} (pid {workers[0]['pid']}) at step {job.step()}")


def unix_sockets(pids: Iterable[int]) -> set[Path]:
    """Socket files that these processes listen on."""
    return {
        Path(str(connection.laddr))
        for pid in pids
        for connection in psutil.Process(pid).net_connections(kind="unix")
        if str(connection.laddr).startswith("/")
    }


def lose_node(job: Job, name: str, view: View) -> None:
    """SIGKILL everything of a node and wipe its folders."""
    processes = processes_of(job, name, view)
    processes.sort(key=lambda one: one["role"] != "agent")  # the agent first: it must not tell anybody
    sockets = unix_sockets(one["pid"] for one in processes)
    wall_s = time.time()
    for one in processes:
        try:
            os.kill(one["pid"], signal.SIGKILL)
        except ProcessLookupError:
            continue  # workers end with their agent
    node = job.nodes.pop(name)
    node.agent.wait()
    end = time.monotonic() + STOP_LIMIT_S
    while any(psutil.pid_exists(one["pid"]) for one in processes) and time.monotonic() < end:
        time.sleep(POLL_S)
    shutil.rmtree(node.folder)
    for path in sockets:  # long folder names make the agent put its sockets elsewhere; they go with the node
        path.unlink(missing_ok=True)
    record_fault(job, "node_lost", processes, wall_s=wall_s, node=name)
    roles = ", ".join(sorted(one["role"] for one in processes))
    view.event(f"killed everything of {name} ({roles}) and wiped its folders at step {job.step()}")


def recover(job: Job, kind: str, view: View, *, generation: int, at_step: int) -> None:
    """Wait for the first new step and for the incident that the master made of the fault."""
    begin = time.monotonic()
    job.wait(
        "the first new step", view,
        lambda: job.generation() > generation and job.step() > at_step, limit_s=job.options.limit_s,
    )  # fmt: skip
    view.event(f"training goes on: new step after about {time.monotonic() - begin:.1f} s")

    def reported() -> bool:
        incidents = (job.status() or {}).get("incidents", ())
        return any(one["kind"] == kind and one["recovered_s"] is not None for one in incidents)

    job.wait(f"the incident {kind} in the status", view, reported, limit_s=STOP_LIMIT_S)


def run_faulted(job: Job, view: View) -> None:
    """The training that is hurt three times."""
    job.start_node("node-a")
    view.event("started node-a, which hosts the master")
    job.wait("the master", view, lambda: job.status() is not None, limit_s=START_LIMIT_S)
    job.start_node("node-b")
    job.start_node("node-c")
    view.event("started node-b and node-c; whoever comes last is the spare")
    for number, kind in enumerate(FAULTS, 1):
        at_step = job.options.steps * number // (len(FAULTS) + 2)  # the last part is left to recover in
        job.wait("more steps", view, partial(has_reached, job, at_step), limit_s=job.options.limit_s)
        generation = job.generation()
        second = next(line["node"] for line in job.lines[::-1] if line["node"] != "node-a")
        if kind == "node_lost":
            lose_node(job, second, view)
        else:
            hurt_worker(job, "node-a" if kind == "worker_killed" else second, view, kind)
        recover(job, kind, view, generation=generation, at_step=job.step())
    job.finish(view)
    view.event("finished")


def has_reached(job: Job, step: int) -> bool:
    return job.step() >= step


def run_undisturbed(job: Job, view: View) -> None:
    """The same training, left alone."""
    job.start_node("node-a")
    job.wait("the master", view, lambda: job.status() is not None, limit_s=START_LIMIT_S)
    job.start_node("node-b")
    job.finish(view)
    view.event("finished")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("build/demo"), help="is emptied first")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard events")
    parser.add_argument("--time_factor", type=float, default=1.0, help="multiplies the promised times")
    options = parser.parse_args()
    options.limit_s = 180.0 * max(1.0, options.time_factor)
    if options.steps < 20:
        parser.error("--steps must be at least 20, so that there is a middle")
    return options


def main() -> int:
    options = parse_arguments()
    folder: Path = options.folder.resolve()
    if not Path(aimaster()[0]).exists():
        print(
            f"demo: {aimaster()[0]} is missing; install the project first (make demo does)", file=sys.stderr
        )
        return 3
    if folder.exists() and any(folder.iterdir()) and not (folder / "plan.json").exists():
        print(f"demo: {folder} is not empty and not a demo's; name another --folder", file=sys.stderr)
        return 2
    if not (build_ops.extensions_dir() / build_ops.COMMUNICATION).exists():
        built = subprocess.run([sys.executable, str(HERE / "build_ops.py")], check=False)
        if built.returncode != 0:
            return built.returncode
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plan = {
        "steps": options.steps,
        "world_size": 2,
        "seed": options.seed,
        "faults": list(FAULTS),
    }
    (folder / "plan.json").write_text(json.dumps(plan) + "\n")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # through the finally below
    jobs: list[Job] = []
    try:
        for name, run in (("faulted", run_faulted), ("undisturbed", run_undisturbed)):
            jobs.append(Job(folder / name, options, nodes=2))
            with View(
                title=f"{name} run: {options.steps} steps on 2 nodes", steps=options.steps, ranks=2
            ) as view:
                run(jobs[-1], view)
        command = [sys.executable, str(HERE / "check.py"), str(folder)]
        return subprocess.run([*command, "--time_factor", str(options.time_factor)], check=False).returncode
    except DemoFailed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        for job in jobs:
            job.stop()


if __name__ == "__main__":
    sys.exit(main())
