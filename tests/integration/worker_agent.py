"""A small agent for tests of `aimaster.agent.workers`: carries out actions, writes down what it saw.

Usage: ``python worker_agent.py SPEC.json``. The workers' output goes to this process's own streams, as
under `aimaster run`, so what was seen goes to the file named by ``result`` in the specification.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aimaster.agent import workers
from aimaster.agent.assignment import Assignment, NodeIdentity
from aimaster.agent.ports import HeldPort
from aimaster.agent.reaper import Reaper
from aimaster.agent.reports import WorkerExit
from aimaster.agent.workers import Workers
from aimaster.config import ProgramConfig, ProgramKind, Std, StdioConfig, StdMap
from aimaster.ids import Generation, JobId, NodeId

POLL_S = 0.02
DEADLINE_S = 120.0


class Scenario:
    """One agent and what happens to it."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.seen: list[dict[str, Any]] = []
        self.exits: asyncio.Queue[WorkerExit] = asyncio.Queue()
        self.generation = 0
        run_dir = Path(spec["run_dir"])
        run_dir.mkdir(parents=True, exist_ok=True)
        self.reaper = Reaper(run_dir)
        self.sockets = Path(tempfile.mkdtemp(prefix="loop-"))  # the path of a socket must be short
        stdio = spec.get("stdio", {})
        self.workers = Workers(
            ProgramConfig(
                kind=ProgramKind(spec.get("kind", "script")),
                target=spec["target"],
                args=tuple(spec.get("args", ())),
            ),
            NodeIdentity(
                job=JobId("job"),
                node=NodeId("node"),
                run_id="run",
                run_dir=run_dir,
                loop_socket=self.sockets / "loop" if spec.get("loop") else None,
            ),
            nproc=spec.get("nproc", 1),
            stdio=StdioConfig(
                log_dir=Path(stdio["log_dir"]) if "log_dir" in stdio else None,
                redirects=StdMap(all=Std(stdio.get("redirects", 0))),
                tee=StdMap(all=Std(stdio.get("tee", 0))),
                local_ranks_filter=frozenset(stdio["filter"]) if "filter" in stdio else None,
                prefix=stdio.get("prefix", False),
            ),
            warm=spec.get("warm", True),
            reaper=self.reaper,
            on_exit=self.exits.put_nowait,
        )

    async def run(self) -> None:
        """Carry out every action, then clear up."""
        try:
            for action in self.spec["actions"]:
                (name, value), *_ = action.items()
                self.seen.append({name: await getattr(self, name)(value)})
        finally:
            await self.workers.stop(5.0)
            await self.workers.close()
            self.sockets.rmdir()
            self.write()

    def write(self) -> None:
        """Leave what was seen so far."""
        path = Path(self.spec["result"])
        path.with_suffix(".tmp").write_text(json.dumps(self.seen))
        path.with_suffix(".tmp").replace(path)

    async def start(self, env: dict[str, str]) -> dict[str, Any]:
        """Start a generation."""
        self.generation += 1
        nproc = self.spec.get("nproc", 1)
        with HeldPort() as port:
            await self.workers.start(
                Assignment(
                    generation=Generation(self.generation),
                    attempt=self.generation - 1,
                    node_rank=0,
                    nodes=1,
                    first_rank=0,
                    world_size=nproc,
                    master_addr="127.0.0.1",
                    master_port=port.port,
                    env=env,
                )
            )
        return {
            "warmth": self.workers.warmth(),
            "pids": [entry.pid for entry in self.workers.processes() if entry.role.value == "worker"],
            "template": [entry.pid for entry in self.workers.processes() if entry.role.value == "template"],
        }

    async def exits_of(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many ends."""
        found = [await asyncio.wait_for(self.exits.get(), DEADLINE_S) for _ in range(count)]
        return [asdict(entry) for entry in sorted(found, key=lambda entry: entry.local_rank)]

    async def file(self, path: str) -> bool:
        """Wait until a file is there and not empty."""
        return await self._until(lambda: os.path.exists(path) and os.path.getsize(path) > 0)

    async def steps(self, count: int) -> list[dict[str, Any]]:
        """Wait until every rank has done so many steps."""
        await self._until(lambda: min(p.steps for p in self.workers.progress() or [_NONE]) >= count)
        return [{**asdict(entry), "phase": entry.phase.value} for entry in self.workers.progress()]

    async def ranks(self, count: int) -> bool:
        """Wait until so many ranks are seen."""
        return await self._until(lambda: len(self.workers.progress()) >= count)

    async def loaded(self, names: list[str]) -> list[bool]:
        """Whether the template was told to import these."""
        template = await self.workers._warmth.template()
        return [name in template.plan.modules for name in names]

    async def better_template(self, _: object) -> bool:
        """Wait until another template has taken over."""

        def newer() -> bool:
            self.workers.tick()
            return any(e.role.value == "template" and e.pid != old for e in self.workers.processes())

        first = [e.pid for e in self.workers.processes() if e.role.value == "template"]
        old = first[0] if first else 0
        return await self._until(newer)

    async def kill(self, index: int) -> float:
        """Kill one worker; returns seconds until its end is reported."""
        pid = [e.pid for e in self.workers.processes() if e.role.value == "worker"][index]
        begin = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        entry = await asyncio.wait_for(self.exits.get(), DEADLINE_S)
        assert entry.pid == pid
        return time.monotonic() - begin

    async def start_and_kill_template(self, after_s: float) -> dict[str, Any]:
        """Start a generation, and kill the template so long after the start has begun."""
        template = await self.workers._warmth.template()
        asyncio.get_running_loop().call_later(after_s, os.kill, template.pid, signal.SIGKILL)
        started = await self.start({})
        await asyncio.sleep(0.2)  # the kill may come after the start
        sessions = {entry.session for entry in self.reaper.leftovers()}
        return {**started, "sessions": sorted(sessions)}

    async def kill_template(self, _: object) -> None:
        """Kill the template."""
        (pid,) = [e.pid for e in self.workers.processes() if e.role.value == "template"]
        os.kill(pid, signal.SIGKILL)

    async def stop(self, grace_s: float) -> dict[str, Any]:
        """Stop the workers."""
        return asdict(await self.workers.stop(grace_s))

    async def stop_but(self, meet_s: float) -> dict[str, Any]:
        """Stop the workers but for those that can outlive their generation."""
        return asdict(await self.workers.stop(0.5, meet_s=meet_s))

    async def kill_s_max(self, seconds: float) -> None:
        """From now on call a process unkillable after so long."""
        workers.KILL_S_MAX = seconds

    async def trace(self, argv: list[str]) -> bool:
        """Let another process trace the first worker; whether it says by a line that it may."""
        pid = next(e.pid for e in self.workers.processes() if e.role.value == "worker")
        self._helper = await asyncio.create_subprocess_exec(*argv, str(pid), stdout=asyncio.subprocess.PIPE)
        assert self._helper.stdout is not None
        return await asyncio.wait_for(self._helper.stdout.readline(), DEADLINE_S) == b"traced\n"

    async def last_lines(self, local_rank: int) -> str:
        """Last lines of a worker."""
        return self.workers.last_lines(local_rank)

    async def helper(self, argv: list[str]) -> int:
        """Start a process of the agent's own, as a library in it would."""
        process = await asyncio.create_subprocess_exec(*argv, start_new_session=True)
        self._helper = process
        return process.pid

    async def end_helper(self, _: object) -> bool:
        """Whether the helper still runs; ends it."""
        lives = self._helper.returncode is None
        if lives:
            self._helper.kill()
        await self._helper.wait()
        return lives

    async def tell(self, path: str) -> None:
        """Write down what was seen and say so by a file; then go on."""
        self.write()
        Path(path).write_text("told\n")

    async def for_ever(self, _: object) -> None:
        """Wait for the end of this process."""
        await asyncio.Event().wait()

    async def _until(self, ready: Any) -> bool:
        deadline = time.monotonic() + DEADLINE_S
        while not ready():
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True


class _None:
    steps = -1


_NONE = _None()


async def _main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        await Scenario(json.load(file)).run()


if __name__ == "__main__":
    asyncio.run(_main())
