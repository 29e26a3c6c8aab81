"""Orders that come while an agent still looks at its node: the newer word is obeyed, not kept waiting.

The agent's parts are real. They run in a process of their own, since the reaper makes its process adopt
orphans; the look goes on until the process lets it, so that no second of a clock decides anything.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from aimaster.agent.assignment import NodeIdentity
from aimaster.agent.duties import Duties
from aimaster.agent.reaper import Reaper
from aimaster.agent.recheck import Rechecks
from aimaster.agent.reports import WorkerExit
from aimaster.agent.workers import Workers
from aimaster.cli.run import config_from
from aimaster.core.commands import EndNode, Prepare, Reason
from aimaster.core.diagnosis import Rule
from aimaster.core.events import NodeEvent, NodePrepared
from aimaster.ids import Generation, Incarnation, JobId, NodeId
from aimaster.integrations.easyckpt import NodeSaver, SaverPlan
from aimaster.rpc.messages import Identity
from aimaster.rules.table import load_rules

LONG_S = 240.0
NODE = NodeId("n")
BROKEN = "OSError: [Errno 5] Input/output error: '/data/x'"


class Agent:
    """What of an agent carries out orders; nothing is started by it."""

    def __init__(self, folder: Path) -> None:
        script = folder / "train.py"
        script.write_text("")
        config = config_from(["--standalone", str(script)], {})
        assert config is not None
        identity = Identity(job=JobId("j"), node=NODE, incarnation=Incarnation("1"))
        reaper = Reaper(folder)
        self.told: list[NodeEvent] = []
        self.held = threading.Event()
        """A look begins only when it is set."""
        self.looks = Rechecks(config, identity, rules=self._rules, report=self.told.append)
        self.duties = Duties(
            identity,
            workers=Workers(
                config.program,
                NodeIdentity(job=identity.job, node=NODE, run_id="run", run_dir=folder),
                nproc=1,
                stdio=config.stdio,
                warm=False,
                reaper=reaper,
                on_exit=lambda ended: None,
            ),
            saver=NodeSaver(_plan(folder, identity), say=print, own=reaper.own),
            rechecks=self.looks,
            stop_grace_s=1.0,
            report=self.told.append,
            idle_on=lambda order: False,
        )

    def _rules(self) -> Sequence[Rule]:
        assert self.held.wait(LONG_S)
        return load_rules()

    async def looking(self, *, generation: int) -> asyncio.Task[EndNode]:
        """Let a worker fail and order the next generation: the agent now waits for its look."""
        self.duties.worker_ended(
            WorkerExit(
                generation=Generation(1),
                attempt=0,
                local_rank=0,
                rank=0,
                pid=1,
                exit_code=1,
                signal=None,
                steps=None,
                saved_step=None,
                error=BROKEN,
                error_digest="",
                last_lines="",
            )
        )
        self.duties.give(prepare(generation))
        running = asyncio.create_task(self.duties.run())
        while not any(task.get_name() == "called-away" for task in asyncio.all_tasks()):
            await asyncio.sleep(0.01)
        return running

    def prepared(self) -> list[int]:
        """Generations that it said it is prepared for."""
        return [event.generation for event in self.told if isinstance(event, NodePrepared)]


def _plan(folder: Path, identity: Identity) -> SaverPlan:
    return SaverPlan(
        job=identity.job,
        node=identity.node,
        socket=folder / "saver",
        log=folder / "saver.log",
        listen_host="127.0.0.1",
        advertise="127.0.0.1",
        secret_file=None,
        linger_s=1.0,
        memory_limit_bytes=None,
        workers=1,
        sweep=("true",),
    )


def prepare(generation: int) -> Prepare:
    return Prepare(node=NODE, generation=Generation(generation), reason=Reason.WORKER_FAILED)


async def play(folder: Path) -> dict[str, object]:
    """A newer generation, then the end, while the look goes on."""
    agent = Agent(folder)
    running = await agent.looking(generation=2)
    agent.duties.give(prepare(3))
    agent.held.set()
    while not agent.prepared():
        await asyncio.sleep(0.01)
    newer = agent.prepared()
    agent.held.clear()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    running = await agent.looking(generation=4)
    agent.duties.give(EndNode(node=NODE, exit_code=0, reason=Reason.JOB_FINISHED))
    order = await running
    held = not agent.held.is_set()
    agent.held.set()
    await agent.looks.close()
    agent.duties.close()
    return {"newer": newer, "prepared": agent.prepared(), "ended": order.reason.value, "held": held}


def test_a_newer_order_and_the_end_are_obeyed_while_the_node_is_looked_at(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.test_duties", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=LONG_S,
    )
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "newer": [3],
        "prepared": [3],
        "ended": "job_finished",
        "held": True,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(asyncio.wait_for(play(Path(sys.argv[1])), LONG_S))))
