"""The workers of one node: started warm or cold, watched, and proved gone before the next start.

One object per agent, used in the event loop of the main thread, which is the parent of every worker (their
parent-death signal fires when that thread ends). Ends are reported at once through `on_exit`, except those
that `stop` brings about, which it returns.

A worker is stopped by SIGTERM to it alone: its data-loading children must live until it has ended by its own
will. Behind the grace time everything that came from workers is killed, wherever it moved to (see
`aimaster.agent.reaper`), until a look at the process table finds nothing more.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from aimaster.agent import asking, proc
from aimaster.agent import assignment as words
from aimaster.agent.assignment import Assignment, NodeIdentity
from aimaster.agent.kill import send_exactly
from aimaster.agent.loops import Loops
from aimaster.agent.oom import OomKills
from aimaster.agent.ranks import RankState, ToldWorld, of_command, progress_of
from aimaster.agent.reaper import OWNER_VARIABLE, Reaper
from aimaster.agent.reports import StopOutcome, WorkerExit
from aimaster.agent.spawn import spawn_all
from aimaster.agent.spoken import say
from aimaster.agent.stdio import RankIO, Stdio
from aimaster.agent.warm import ForkOrder, Unfit
from aimaster.agent.warmth import Folders, Warmth
from aimaster.agent.worker import Worker, exit_of, last_lines
from aimaster.config import ProgramConfig, ProgramKind, StdioConfig
from aimaster.errors import SetupError
from aimaster.rpc.messages import ProcessInfo, RankProgress, Role
from aimaster.worker.progress import ProgressPage, Record, start_time

KILL_S_MAX = 15.0
"""So long after SIGKILL a process that is still there is called unkillable (it hangs in the kernel)."""
LOOK_S = 0.02
"""Between two looks at processes that are not our children, whose end nobody tells us."""
FLUSH_IDLE_S_MAX = 60.0


class Workers:
    """Starts, watches and stops the training processes of this node."""

    def __init__(
        self,
        program: ProgramConfig,
        identity: NodeIdentity,
        *,
        nproc: int,
        stdio: StdioConfig,
        warm: bool,
        reaper: Reaper,
        on_exit: Callable[[WorkerExit], None],
    ) -> None:
        """Prepare; nothing is started.

        Args:
            program: What to run.
            identity: Names and places that do not change while the agent lives.
            nproc: Workers on this node; a command counts as one.
            stdio: Where output goes.
            warm: Whether workers may be forked from a template.
            reaper: The agent's reaper; it makes this process a child subreaper.
            on_exit: Called in the event loop for each worker that ends by itself.
        """
        self._program = program
        self._identity = identity
        self._command = program.kind is ProgramKind.COMMAND
        self._nproc = 1 if self._command else nproc
        self._reaper = reaper
        self._on_exit = on_exit
        self._stdio = Stdio(
            stdio, run_id=identity.run_id, run_dir=identity.run_dir, nproc=self._nproc, role=identity.role
        )
        self._common = words.common_env(os.environ, identity, nproc=self._nproc, command=self._command)
        self._python = words.interpreter(program, sys.executable)
        self._warmth = Warmth(
            program,
            self._python,
            common=self._common,
            folders=Folders(run_dir=identity.run_dir, memory=identity.imports_dir),
            reaper=reaper,
            wanted=warm,
        )
        self._workers: list[Worker] = []
        self._loops = Loops(identity.loop_socket, known=self._is_worker)
        self._assignment: Assignment | None = None
        self._page: ProgressPage | None = None
        self._world = ToldWorld()
        self._ooms = OomKills()
        self._stopping = False
        self._changing = asyncio.Lock()
        self._how = ""

    @property
    def log_dir(self) -> Path | None:
        """Folder of this run's log files, once there is one."""
        return self._stdio.log_dirs.root

    def prepare_template(self) -> None:
        """Begin to make a template in the background, if workers may be warm."""
        self._warmth.begin(gentle=False)

    def tick(self) -> None:
        """Housekeeping, to be called every second or so: orphans, and a better template if there is one."""
        self._reaper.sweep()
        self._warmth.renew()

    def warmth(self) -> str:
        """``warm``, or ``cold: `` and why; before the first start what is to be expected."""
        return self._how or self._warmth.expected()

    def processes(self) -> tuple[ProcessInfo, ...]:
        """Template and live workers."""
        found = [
            ProcessInfo(role=Role.WORKER, pid=worker.pid, rank=None if self._command else worker.rank)
            for worker in self._workers
            if worker.exit is None
        ]
        pid = self._warmth.pid
        return (*([ProcessInfo(role=Role.TEMPLATE, pid=pid)] if pid else []), *found)

    def ranks(self) -> tuple[RankState, ...]:
        """What is known of each rank; of a command those ranks whose processes were seen."""
        if self._page is None:
            return ()
        if self._command:
            return of_command([self._page.read(index) for index in range(self._page.records)])
        now = time.monotonic()
        return tuple(
            RankState(
                local_rank=worker.local_rank,
                rank=worker.rank,
                pid=worker.pid,
                ended=worker.exit is not None,
                age_s=max(0.0, now - worker.started),
                record=self._record(worker),
            )
            for worker in self._workers
        )

    def told_world_size(self) -> int:
        """The world size that another launcher told its ranks; 0 where the agent told them."""
        return self._world.told(self.ranks()) if self._command else 0

    def progress(self) -> tuple[RankProgress, ...]:
        """How far each rank is, for the heartbeat."""
        return tuple(progress_of(state) for state in self.ranks())

    def last_lines(self, local_rank: int) -> str:
        """Last lines that a worker has written, error output first."""
        for worker in self._workers:
            if worker.local_rank == local_rank:
                return last_lines(worker.io)
        return ""

    async def start(self, assignment: Assignment) -> None:
        """Start all workers of this node; those that outlived the last generation begin the next one.

        Raises:
            SetupError: They could not be started here; nothing new of them is left.
        """
        async with self._changing:
            if any(worker.exit is None and not worker.stays for worker in self._workers):
                raise RuntimeError("the workers of an earlier generation were not stopped")
            page = self._renew_page()
            self._stopping = False
            self._ooms.mark()
            self._assignment = assignment
            staying = list(self._workers)
            kept = {worker.local_rank for worker in staying}
            ranks = [(i, assignment.first_rank + i) for i in range(self._nproc) if i not in kept]
            try:
                await self._open_loops()
                streams = self._stdio.open(assignment.attempt, ranks)
                try:
                    envs = [
                        self._env(assignment, index, page, io)
                        for (index, _), io in zip(ranks, streams, strict=True)
                    ]
                    pids = await self._launch(assignment, [i for i, _ in ranks], envs=envs, streams=streams)
                except BaseException:
                    for io in streams:
                        io.close()
                    raise
            except (OSError, ValueError) as error:
                raise SetupError(
                    f"the workers cannot be started ({error})",
                    where=f"node {self._identity.node}",
                    next_step="look at the limits on processes, open files and memory of this node",
                ) from error
            for (local_rank, rank), pid, io in zip(ranks, pids, streams, strict=True):
                io.close_worker_ends()
                self._take(local_rank, rank, pid, io)
            for worker in staying:
                self._go_on(worker, assignment, page)

    async def stop(self, grace_s: float, *, meet_s: float = 0.0) -> StopOutcome:
        """End all workers and whatever came from them; returns when nothing is left, or not to be ended.

        Also ends what an earlier agent of this node has left. Waits at most `meet_s`, twice `grace_s` and
        `KILL_S_MAX`.

        Args:
            grace_s: From SIGTERM to SIGKILL.
            meet_s: How long workers that can outlive their generation may take to leave it; these stay.
        """
        async with self._changing:
            self._stopping = True
            live = [worker for worker in self._workers if worker.exit is None]
            able = [worker for worker in live if meet_s > 0 and self._loops.has(worker.pid)]
            for worker in live:
                worker.stays = False
            await self._end([worker for worker in live if worker not in able], grace_s if not able else 0.0)
            if able:
                assert self._assignment is not None
                pids = [worker.pid for worker in able]
                await self._loops.leave(pids, self._assignment.generation, within_s=meet_s)
                for worker in able:
                    worker.stays = worker.exit is None and self._loops.waits(worker.pid)
                await self._end([worker for worker in live if not worker.stays], grace_s)
            killed, unkillable = await self._kill_all()
            for worker in self._workers:
                if not worker.stays:
                    worker.io.close()
            return StopOutcome(
                exits=tuple(worker.exit for worker in live if worker.exit is not None),
                killed=killed,
                unkillable=unkillable,
                stayed=sum(worker.stays for worker in live),
            )

    async def _end(self, live: list[Worker], grace_s: float) -> None:
        """Ask workers to end, and give them some time for it."""
        for worker in live:
            send_exactly(worker.pid, worker.pid_start, signal.SIGTERM)
            # A stopped process takes a signal only when it goes on.
            send_exactly(worker.pid, worker.pid_start, signal.SIGCONT)
        for entry in self._leftovers() if live else ():
            if entry.state == "T":  # what another launcher started: it hears of the end from that one
                send_exactly(entry.pid, entry.start, signal.SIGCONT)
        if live and grace_s > 0:
            waits = [asyncio.ensure_future(worker.ended.wait()) for worker in live]
            _, pending = await asyncio.wait(waits, timeout=grace_s)
            for wait in pending:
                wait.cancel()

    async def close(self) -> bool:
        """End the template and write out what is queued for the caller. Call after `stop`.

        Returns:
            Whether all output was written.
        """
        await self._warmth.close()
        await self._loops.close()
        self._release()
        return await self._stdio.close(FLUSH_IDLE_S_MAX)

    def _env(self, assignment: Assignment, index: int, page: ProgressPage, io: RankIO) -> dict[str, str]:
        if self._command:
            env = words.command_env(self._common, self._identity, assignment=assignment)
        else:
            env = words.worker_env(
                self._common, self._identity, assignment=assignment, local_rank=index, nproc=self._nproc
            )
            env["TORCHELASTIC_ERROR_FILE"] = str(io.error_file)
        env["AIMASTER_PROGRESS_PAGE"] = page.path
        env[OWNER_VARIABLE] = self._reaper.worker_token
        if self._loops.path is not None and not self._command:
            env["AIMASTER_LOOP"] = str(self._loops.path)
        return env

    async def _open_loops(self) -> None:
        if self._command:
            return  # its processes are another launcher's
        try:
            await self._loops.open()
        except OSError as error:
            say(f"no worker can outlive its peers: {self._loops.path} ({error.strerror})")

    async def _is_worker(self, pid: int) -> bool:
        async with self._changing:  # one that was forked a moment ago is entered first
            return any(worker.pid == pid and worker.exit is None for worker in self._workers)

    def _go_on(self, worker: Worker, assignment: Assignment, page: ProgressPage) -> None:
        """Let a worker that has outlived its generation begin the next one."""
        env = self._env(assignment, worker.local_rank, page, worker.io)
        worker.stays, worker.rank = False, assignment.first_rank + worker.local_rank
        worker.started = time.monotonic()
        if not self._loops.start(worker.pid, {k: v for k, v in env.items() if k in words.PER_WORKER}):
            # It has died since; its end is reported when it is reaped.
            send_exactly(worker.pid, worker.pid_start, signal.SIGKILL)

    async def _launch(
        self,
        assignment: Assignment,
        local_ranks: list[int],
        *,
        envs: list[dict[str, str]],
        streams: list[RankIO],
    ) -> list[int]:
        lines = [
            words.argv(self._program, self._python, local_rank=index, assignment=assignment)
            for index in local_ranks
        ]
        if not lines:
            return []
        try:
            template = await self._warmth.template()
            lead = words.words_before_argv(self._program)
            orders = [
                ForkOrder(env=env, args=tuple(line[lead:]), fds=(io.fds[0], io.fds[1], io.fds[2]))
                for env, line, io in zip(envs, lines, streams, strict=True)
            ]
            pids = await template.fork(orders, script_dir=words.script_dir(self._program))
            self._how = "warm"
            return list(pids)
        except Unfit as reason:
            self._how = f"cold: {reason}"
            # A template that was lost on the way may have forked; those must not run beside the cold ones.
            _, unkillable = await self._kill_all()
            if unkillable:
                raise OSError(f"{'; '.join(unkillable)} cannot be ended") from reason
        return spawn_all(lines, envs, [(io.fds[0], io.fds[1], io.fds[2]) for io in streams])

    def _take(self, local_rank: int, rank: int, pid: int, io: RankIO) -> None:
        worker = Worker(local_rank, rank, pid, start_time(pid), io, time.monotonic())
        self._workers.append(worker)
        self._reaper.watch(pid, lambda status: self._ended(worker, status))

    def _ended(self, worker: Worker, status: int) -> None:
        worker.io.drain()
        assert self._assignment is not None  # set before any worker exists
        sentence = self._ooms.sentence() if status != 0 else ""
        record = self._record(worker)
        worker.exit = exit_of(worker, status, assignment=self._assignment, record=record, sentence=sentence)
        worker.ended.set()
        if not self._stopping:
            self._on_exit(worker.exit)

    def _record(self, worker: Worker) -> Record | None:
        return self._page.read(worker.local_rank) if self._page is not None else None

    async def _kill_all(self) -> tuple[int, tuple[str, ...]]:
        killed: set[tuple[int, int]] = set()
        deadline = time.monotonic() + KILL_S_MAX
        while True:
            left = self._leftovers()
            unreaped = [worker for worker in self._workers if worker.exit is None and not worker.stays]
            if not left and not unreaped:
                return len(killed), ()
            for entry in left:
                killed.add((entry.pid, entry.start))
                send_exactly(entry.pid, entry.start, signal.SIGKILL)
            if time.monotonic() > deadline:
                kept = (f"pid {worker.pid} (ended; a debugger keeps it)" for worker in unreaped)
                return len(killed), tuple(proc.describe(entry) for entry in left) or tuple(kept)
            await asyncio.sleep(LOOK_S)

    def _leftovers(self) -> list[proc.ProcessStat]:
        return self._reaper.leftovers(keep=[worker.pid for worker in self._workers if worker.stays])

    def _renew_page(self) -> ProgressPage:
        """A new page, or the old one where a worker that stays has it mapped; forgets who is gone."""
        staying = [worker for worker in self._workers if worker.stays and worker.exit is None]
        if not staying or self._page is None:
            self._release()
            self._page = ProgressPage(self._nproc)
            return self._page
        for worker in self._workers:
            if worker not in staying:
                worker.io.close()
                self._forget(worker.local_rank)
                self._page.clear(worker.local_rank)
        self._workers = staying
        return self._page

    def _release(self) -> None:
        for worker in self._workers:
            worker.io.close()
        self._workers = []
        if self._page is not None:
            for index in range(self._page.records):
                self._forget(index)
            self._page.close()
            self._page = None

    def _forget(self, local_rank: int) -> None:
        """Remove what a rank that has ended left for our questions."""
        record = self._page.read(local_rank) if self._page is not None else None
        if record is not None:
            asking.forget(self._identity.run_dir, record.pid)
