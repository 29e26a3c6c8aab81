"""The agent that hosts the master starts it as a child and starts it again when it dies.

Which agent hosts: the one on whose machine ``--rdzv-endpoint`` is. Several agents may live there; whoever
binds the port first hosts, the others find it taken and connect to it like everyone else. Losing the master
harms no training: it replays its journal and the agents come back to it.

A master that dies again and again at once is not revived for ever: after `QUICK_DEATHS_MAX` lives shorter
than `QUICK_DEATH_S` in a row the host gives up, and every agent ends by its own bound.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aimaster.agent.spoken import say
from aimaster.clock import Clock
from aimaster.config import DetectorConfig, HangLimits, RendezvousConfig, WatchConfig
from aimaster.errors import MasterLost, OwnBug, PortInUse, SetupError
from aimaster.ids import JobId, NodeId
from aimaster.rpc.waiting import within

RESTART_DELAY_S = 0.5
"""Between the death of a master and its next life: long enough for the kernel to free the port."""
READY_TIMEOUT_S = 60.0
"""From the start of the process until it must have said that it listens, or why not."""
QUICK_DEATH_S = 10.0
QUICK_DEATHS_MAX = 5
TERM_GRACE_S = 2.0
WEBHOOK_VARIABLE = "AIMASTER_NOTIFY_WEBHOOK"
END_TIMEOUT_S = 15.0
"""How long the host waits for its master to see every agent's goodbye."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterPlan:
    """What a master child is started with."""

    job: JobId
    node: NodeId
    listen: str
    """``host:port``; port 0 takes a free one."""
    state_dir: Path
    secret_file: Path | None
    rendezvous: RendezvousConfig
    detector: DetectorConfig
    hangs: HangLimits
    policy: str | None = None
    """See `aimaster.config.RestartConfig`."""
    watch: WatchConfig = field(default_factory=WatchConfig)


class MasterHost:
    """Keeps one master child alive. Used on the agent's event loop alone."""

    def __init__(
        self,
        plan: MasterPlan,
        *,
        clock: Clock,
        own: Callable[[int], None],
        on_lost: Callable[[MasterLost], None],
    ) -> None:
        """Nothing is started.

        Args:
            plan: How to start it.
            clock: To tell quick deaths.
            own: Told the pid of every life, which is a helper and no leftover of a worker.
            on_lost: Told when it is given up.
        """
        self._plan = plan
        self._own = own
        self._revived = False
        self._clock = clock
        self._on_lost = on_lost
        self._process: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._listen = plan.listen
        self._log = plan.state_dir / "master.log"

    @property
    def pid(self) -> int | None:
        """Of the living master, if there is one."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> str:
        """Start the master and keep it.

        Returns:
            The ``host:port`` at which it listens.

        Raises:
            PortInUse: Somebody listens there; it may be a master of this job.
            SetupError: It could not start for another reason, which it said.
        """
        endpoint = await self._launch()
        self._listen = endpoint  # a port that was chosen freely is kept for its next lives
        self._revived = True
        self._keeper = asyncio.create_task(self._keep(), name="master-keeper")
        return endpoint

    async def finish(self) -> None:
        """Wait until the master has ended by itself, at most `END_TIMEOUT_S`; then end it."""
        await self._stop_keeping()
        process = self._process
        if process is None or process.returncode is not None:
            return
        try:
            await within(END_TIMEOUT_S, process.wait())
        except asyncio.TimeoutError:
            await self.kill_now()

    async def kill_now(self) -> None:
        """End the master: SIGTERM, then SIGKILL."""
        await self._stop_keeping()
        await self._terminate()

    async def _terminate(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            try:
                await within(TERM_GRACE_S, process.wait())
                return
            except asyncio.TimeoutError:
                continue

    async def _stop_keeping(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
            self._keeper = None

    async def _keep(self) -> None:
        quick_deaths = 0
        born = self._clock.monotonic()
        while self._process is not None:
            code = await self._process.wait()
            if code == 0:
                return  # the job is over
            lived_s = self._clock.monotonic() - born
            quick_deaths = quick_deaths + 1 if lived_s < QUICK_DEATH_S else 1
            if quick_deaths > QUICK_DEATHS_MAX:
                self._on_lost(
                    MasterLost(
                        f"the master died {quick_deaths} times in a row at once ({_how(code)})",
                        where=str(self._log),
                        next_step="look at the end of that file; the journal beside it is unharmed",
                    )
                )
                return
            say(f"master ended ({_how(code)}) after {lived_s:.1f} s; starting it again from its journal")
            await asyncio.sleep(RESTART_DELAY_S)
            born = self._clock.monotonic()
            try:
                await self._launch(revived=True)
            except (SetupError, OwnBug) as error:
                # The port may need longer to come free; each try counts as a quick death.
                say(f"master did not start again: {error}")

    async def _launch(self, *, revived: bool = False) -> str:
        reader, writer = os.pipe()
        log_fd = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv(writer, revived=revived),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=log_fd,
                pass_fds=(writer,),
                env={**os.environ, WEBHOOK_VARIABLE: self._plan.watch.webhook or ""},
                start_new_session=True,  # Ctrl-C at the terminal is the agent's to handle
            )
        finally:
            os.close(writer)
            os.close(log_fd)
        self._own(self._process.pid)
        line = await _read_line(reader)
        if not line:
            await self._terminate()
            raise OwnBug(
                "the master ended, or hung, before it was ready",
                where=str(self._log),
                next_step="look at the end of that file",
            )
        word = json.loads(line)
        if "error" in word:
            await self._process.wait()
            raise _start_error(word, self._listen)
        return str(word["endpoint"])

    def _argv(self, ready_fd: int, *, revived: bool) -> list[str]:
        plan = self._plan
        argv = [sys.executable, "-m", "aimaster.master"]
        argv += ["--job-id", plan.job, "--node-id", plan.node, "--listen", self._listen]
        argv += ["--state-dir", str(plan.state_dir), "--ready-fd", str(ready_fd)]
        argv += ["--heartbeat-interval", f"{plan.detector.heartbeat_interval_s:g}"]
        argv += ["--suspect-after", f"{plan.detector.suspect_after_s:g}"]
        argv += ["--dead-after", f"{plan.detector.dead_after_s:g}"]
        argv += ["--orphan-timeout", f"{plan.detector.orphan_timeout_s:g}"]
        argv += ["--last-call", f"{plan.rendezvous.last_call_s:g}"]
        argv += ["--join-timeout", f"{plan.rendezvous.join_timeout_s:g}"]
        argv += _hang_words(plan.hangs)
        if plan.policy is not None:
            argv += ["--policy", plan.policy]
        argv += _watch_words(plan.watch)
        if plan.rendezvous.standalone:
            argv += ["--replacement-timeout", "0"]  # nobody else can come
        if self._revived:
            argv.append("--revive")
        if plan.secret_file is not None:
            argv += ["--secret-file", str(plan.secret_file)]
        else:
            argv.append("--insecure")
        if revived:
            # A journal whose job is over is then served to its end: agents may wait to hear that it is.
            argv.append("--revive")
        return argv


def _watch_words(watch: WatchConfig) -> list[str]:
    """All but the webhook, which every user of the machine could read in a command line."""
    words = {
        "--metrics": watch.metrics,
        "--notify-command": watch.command,
        "--tensorboard": watch.tensorboard,
    }
    return [word for name, value in words.items() if value is not None for word in (name, value)]


def _hang_words(hangs: HangLimits) -> list[str]:
    words = ["--hang-timeout", f"{hangs.floor_s:g}", "--hang-busy-timeout", f"{hangs.busy_s:g}"]
    words += ["--hang-start-timeout", f"{hangs.start_s:g}", "--hang-exit-timeout", f"{hangs.exit_s:g}"]
    return words if hangs.enabled else [*words, "--no-hang-detection"]


async def _read_line(fd: int) -> bytes:
    """One line from the ready pipe; empty if the other side closed it or said nothing in time."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    with os.fdopen(fd, "rb") as pipe:
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        try:
            return await within(READY_TIMEOUT_S, reader.readline())
        except asyncio.TimeoutError:
            return b""
        finally:
            transport.close()


def _start_error(word: dict[str, str], listen: str) -> SetupError:
    kind = PortInUse if word["error"] == "port_in_use" else SetupError
    return kind(word["message"], where=word.get("where", listen), next_step=word.get("next_step", ""))


def _how(code: int | None) -> str:
    return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
