"""How this node stands, in the words of the wire: what a hello and a heartbeat say.

The list of processes is also written into the run directory whenever it changes, so that ``aimaster status``
can show it while the master is away.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from aimaster.agent.duties import Duties
from aimaster.agent.ground import Ground
from aimaster.agent.outlook import Outlook
from aimaster.agent.recheck import Rechecks
from aimaster.agent.rundir import PROCESSES_FILE
from aimaster.agent.witness import Witness
from aimaster.agent.workers import Workers
from aimaster.config import CommandOn, RunConfig
from aimaster.core.events import RestartScope
from aimaster.ids import NO_GENERATION
from aimaster.integrations.easyckpt import NodeSaver
from aimaster.rpc.limits import NOTE_CHARS_MAX, clip
from aimaster.rpc.messages import Heartbeat, Hello, ProcessInfo, Role
from aimaster.rpc.version import software
from aimaster.worker.progress import start_time


class Standing:
    """Answers `MasterLink`'s questions. Used on the agent's event loop alone."""

    def __init__(
        self,
        config: RunConfig,
        ground: Ground,
        *,
        duties: Duties,
        workers: Workers,
        saver: NodeSaver,
        sights: tuple[Outlook, Witness, Rechecks],
        master_pid: Callable[[], int | None],
    ) -> None:
        self._config = config
        self._ground = ground
        self._duties = duties
        self._workers = workers
        self._saver = saver
        self._outlook, self._witness, self._rechecks = sights
        self._master_pid = master_pid
        self._written: tuple[ProcessInfo, ...] | None = None

    def hello(self) -> Hello:
        """What is said at the start of a session."""
        nodes = self._config.nodes
        return Hello(
            software=software(),
            address=self._ground.address,
            workers=nodes.nproc,
            saver_address=self._saver.address,
            wanted_node_rank=nodes.node_rank,
            phase=self._duties.phase,
            generation=self._duties.generation,
            min_nodes=nodes.min,
            max_nodes=nodes.max,
            max_restarts=self._config.restart.max_restarts,
            scope=RestartScope.NODE if self._config.restart.by_node else RestartScope.JOB,
            processes=self.processes(),
            notes=self.notes(),
        )

    def heartbeat(self) -> Heartbeat:
        """What is said once per interval."""
        running = self._duties.running
        generation = running.generation if running is not None else NO_GENERATION
        sights, stacks = self._witness.sights()
        progress = tuple(replace(one, sight=sights.get(one.local_rank)) for one in self._workers.progress())
        return Heartbeat(
            phase=self._duties.phase,
            progress=progress,
            processes=self.processes(),
            notes=self.notes(),
            stacks=stacks,
            generation=generation,
            clock_s=self._witness.clock.now_s,
            world_size=self._workers.told_world_size(),
            base_step=self._saver.step_of(generation, 0) or 0,
        )

    def processes(self) -> tuple[ProcessInfo, ...]:
        """Every process of ours on this node."""
        found = [ProcessInfo(role=Role.AGENT, pid=os.getpid())]
        for role, pid in ((Role.MASTER, self._master_pid()), (Role.SAVER, self._saver.pid)):
            if pid is not None:
                found.append(ProcessInfo(role=role, pid=pid))
        processes = (*found, *self._workers.processes())
        if processes != self._written:
            self._written = processes
            self._write(processes)
        return processes

    def notes(self) -> tuple[str, ...]:
        """What is not as it should be on this node, or only almost."""
        notes = [f"workers start {self._workers.warmth()}", str(self._outlook)]
        if self._witness.trouble:
            notes.append(self._witness.trouble)
        if self._rechecks.note:
            notes.append(self._rechecks.note)
        if self._saver.trouble:
            notes.append(self._saver.trouble)
        if self._config.program.command_on is CommandOn.FIRST and self._config.nodes.max > 1:
            notes.append("ranks that the command starts on other nodes are not watched")
        return tuple(clip(note, NOTE_CHARS_MAX) for note in notes)

    def _write(self, processes: tuple[ProcessInfo, ...]) -> None:
        rows = [
            {"role": one.role.value, "pid": one.pid, "rank": one.rank, "started": start_time(one.pid)}
            for one in processes
        ]
        self._ground.run_dir.write_json(PROCESSES_FILE, {"processes": rows})
