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
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aimaster.agent import assignment as words
from aimaster.agent import failure, proc
from aimaster.agent.assignment import Assignment, NodeIdentity
from aimaster.agent.oom import OomKills
from aimaster.agent.ranks import RankState, ToldWorld, of_command, progress_of
from aimaster.agent.reaper import OWNER_VARIABLE, Reaper
from aimaster.agent.reports import LAST_LINES_CHARS_MAX, StopOutcome, WorkerExit
from aimaster.agent.spawn import spawn
from aimaster.agent.stdio import RankIO, Stdio
from aimaster.agent.warm import ForkOrder, Unfit
from aimaster.agent.warmth import Folders, Warmth
from aimaster.config import ProgramConfig, ProgramKind, Std, StdioConfig
from aimaster.errors import SetupError
from aimaster.rpc.messages import ProcessInfo, RankProgress, Role
from aimaster.worker.progress import ProgressPage, Record, start_time

KILL_S_MAX = 15.0
"""So long after SIGKILL a process that is still there is called unkillable (it hangs in the kernel)."""
LOOK_S = 0.02
"""Between two looks at processes that are not our children, whose end nobody tells us."""
FLUSH_IDLE_S_MAX = 60.0


@dataclass(slots=True)
class _Worker:
    local_rank: int
    rank: int
    pid: int
    pid_start: int
    io: RankIO
    started: float
    exit: WorkerExit | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)


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
        self._workers: list[_Worker] = []
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
                return _last_lines(worker.io)
        return ""

    async def start(self, assignment: Assignment) -> None:
        """Start all workers of this node.

        Raises:
            SetupError: They could not be started here; nothing of them is left.
        """
        async with self._changing:
            if any(worker.exit is None for worker in self._workers):
                raise RuntimeError("the workers of an earlier generation were not stopped")
            self._release()
            self._stopping = False
            self._ooms.mark()
            self._assignment = assignment
            page = self._page = ProgressPage(self._nproc)
            ranks = [(index, assignment.first_rank + index) for index in range(self._nproc)]
            try:
                streams = self._stdio.open(assignment.attempt, ranks)
                try:
                    envs = [self._env(assignment, index, page, io) for index, io in enumerate(streams)]
                    pids = await self._launch(assignment, envs, streams)
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

    async def stop(self, grace_s: float) -> StopOutcome:
        """End all workers and whatever came from them; returns when nothing is left, or not to be ended.

        Also ends what an earlier agent of this node has left. Waits at most `grace_s` and `KILL_S_MAX`.
        """
        async with self._changing:
            self._stopping = True
            live = [worker for worker in self._workers if worker.exit is None]
            for worker in live:
                self._signal(worker.pid, worker.pid_start, signal.SIGTERM)
                # A stopped process takes a signal only when it goes on.
                self._signal(worker.pid, worker.pid_start, signal.SIGCONT)
            for entry in self._reaper.leftovers() if live else ():
                if entry.state == "T":  # what another launcher started: it hears of the end from that one
                    self._signal(entry.pid, entry.start, signal.SIGCONT)
            if live:
                waits = [asyncio.ensure_future(worker.ended.wait()) for worker in live]
                _, pending = await asyncio.wait(waits, timeout=grace_s)
                for wait in pending:
                    wait.cancel()
            killed, unkillable = await self._kill_all()
            for worker in self._workers:
                worker.io.close()
            return StopOutcome(
                exits=tuple(worker.exit for worker in live if worker.exit is not None),
                killed=killed,
                unkillable=unkillable,
            )

    async def close(self) -> bool:
        """End the template and write out what is queued for the caller. Call after `stop`.

        Returns:
            Whether all output was written.
        """
        await self._warmth.close()
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
        return env

    async def _launch(
        self, assignment: Assignment, envs: list[dict[str, str]], streams: list[RankIO]
    ) -> list[int]:
        lines = [
            words.argv(self._program, self._python, local_rank=index, assignment=assignment)
            for index in range(self._nproc)
        ]
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
        return _spawn_all(lines, envs, streams)

    def _take(self, local_rank: int, rank: int, pid: int, io: RankIO) -> None:
        worker = _Worker(local_rank, rank, pid, start_time(pid), io, time.monotonic())
        self._workers.append(worker)
        self._reaper.watch(pid, lambda status: self._ended(worker, status))

    def _ended(self, worker: _Worker, status: int) -> None:
        worker.io.drain()
        worker.exit = self._report(worker, status)
        worker.ended.set()
        if not self._stopping:
            self._on_exit(worker.exit)

    def _report(self, worker: _Worker, status: int) -> WorkerExit:
        code = os.waitstatus_to_exitcode(status)
        said = _failure(worker.io, code)
        if code != 0:
            said = failure.led_by(self._ooms.sentence(), said)
        record = self._record(worker)
        assert self._assignment is not None  # set before any worker exists
        return WorkerExit(
            generation=self._assignment.generation,
            attempt=self._assignment.attempt,
            local_rank=worker.local_rank,
            rank=worker.rank,
            pid=worker.pid,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            steps=record.steps if record else None,
            saved_step=record.saved_step if record else None,
            error=said.text,
            error_digest=said.digest,
            last_lines=_last_lines(worker.io),
        )

    def _record(self, worker: _Worker) -> Record | None:
        return self._page.read(worker.local_rank) if self._page is not None else None

    def _signal(self, pid: int, pid_start: int, number: int) -> None:
        """Send a signal to exactly this process, never to a later one with its number."""
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        except OSError:
            fd = -1
        try:
            if start_time(pid) == pid_start:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    if fd >= 0:
                        signal.pidfd_send_signal(fd, number)
                    else:
                        os.kill(pid, number)
        finally:
            if fd >= 0:
                os.close(fd)

    async def _kill_all(self) -> tuple[int, tuple[str, ...]]:
        killed: set[tuple[int, int]] = set()
        deadline = time.monotonic() + KILL_S_MAX
        while True:
            left = self._reaper.leftovers()
            unreaped = [worker for worker in self._workers if worker.exit is None]
            if not left and not unreaped:
                return len(killed), ()
            for entry in left:
                killed.add((entry.pid, entry.start))
                self._signal(entry.pid, entry.start, signal.SIGKILL)
            if time.monotonic() > deadline:
                return len(killed), tuple(proc.describe(entry) for entry in left)
            await asyncio.sleep(LOOK_S)

    def _release(self) -> None:
        for worker in self._workers:
            worker.io.close()
        self._workers = []
        if self._page is not None:
            self._page.close()
            self._page = None


def _spawn_all(lines: list[list[str]], envs: list[dict[str, str]], streams: list[RankIO]) -> list[int]:
    pids: list[int] = []
    try:
        for line, env, io in zip(lines, envs, streams, strict=True):
            process = spawn(line, env, fds=(io.fds[0], io.fds[1], io.fds[2]))
            pids.append(process.pid)
            process.returncode = 0  # the reaper waits for it, not this object
    except OSError:
        for pid in pids:  # not reaped yet: the numbers are still theirs
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        raise
    return pids


def _failure(io: RankIO, code: int) -> failure.Failure:
    if code <= 0:
        # A signal says nothing itself; a traceback above its last lines is of something that was survived.
        return failure.Failure() if code == 0 else failure.from_silence(io.text(Std.OUT), io.text(Std.ERR))
    try:
        with open(io.error_file, "rb") as file:
            found = failure.from_error_file(file.read(failure.ERROR_FILE_BYTES_MAX))
    except OSError:
        found = None
    if found is None:
        found = failure.from_output(io.text(Std.ERR)) or failure.from_output(io.text(Std.OUT))
    return found or failure.from_silence(io.text(Std.OUT), io.text(Std.ERR))


def _last_lines(io: RankIO) -> str:
    text = io.text(Std.ERR).strip("\n") or io.text(Std.OUT).strip("\n")
    return text[-LAST_LINES_CHARS_MAX:]
