"""The agent's side of a worker template: starts it, hears whether it is fit, has workers forked from it.

See `aimaster.agent.template` for the other side. A template that finds modules that must not be imported
ahead ends and names them; `prepare` then starts one without them, at most `TRIES_MAX` times, the last time
with torch alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aimaster.agent import template as protocol
from aimaster.agent.reaper import Reaper

BOOTSTRAP = Path(__file__).parent / "bootstrap"
TRIES_MAX = 4
READY_S_MAX = 300.0
"""A template that has not imported torch by then is given up; a cold worker would not be faster."""
PROBE_S_MAX = 30.0
FORK_S_MAX = 30.0
END_S_MAX = 5.0
BRAKE_RUN_S = 0.04
BRAKE_STOP_S = 0.02
BRAKE_LOOK_S = 0.25
BRAKE_IDLE_SHARE = 0.3
"""A processor that is idle for so much of the time has room for the template."""


LOST = "the template ended or hung when it was asked to fork"


class Unfit(Exception):
    """Workers cannot be forked from this template. The text says why and goes into `status`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplatePlan:
    """What a template is started with. A worker that needs other values of these cannot be forked from it."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    """What all workers have in common, and what libraries may read while they are loaded."""
    per_worker: frozenset[str]
    """Variables that differ between workers: no module that reads one is imported ahead."""
    modules: tuple[str, ...] = ()
    token: tuple[str, str] = ("", "")
    """Name and value of the ownership variable."""
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkOrder:
    """One worker to be forked: its environment in full, its arguments, its standard streams."""

    env: Mapping[str, str]
    args: tuple[str, ...]
    fds: tuple[int, int, int]


class Template:
    """One template process. All methods run in the event loop of the main thread, which is its parent."""

    def __init__(self, plan: TemplatePlan, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.plan = plan
        self.loaded = 0
        self._process = process
        self._control = control

    @classmethod
    async def prepare(cls, plan: TemplatePlan, reaper: Reaper, *, gentle: bool = False) -> Template:
        """Start a template and wait until it has proved itself.

        Args:
            plan: What to start it with.
            reaper: Told of the process, so that nobody takes it for a worker.
            gentle: Take no more than two thirds of a processor meanwhile.

        Raises:
            Unfit: No template of this plan can be forked from; the text says why.
        """
        await _probe(plan, reaper)
        modules = list(plan.modules)
        for attempt in range(TRIES_MAX):
            if attempt == TRIES_MAX - 1:
                modules = []
            template, answer = await cls._start(plan, modules, reaper, gentle=gentle)
            if "unfit" not in answer and "tainted" not in answer:
                template.loaded = int(answer["loaded"])
                return template
            await template.close(reaper)
            if "unfit" in answer:
                if not modules:
                    raise Unfit(str(answer["unfit"]))
                modules = []
            else:
                modules = [name for name in modules if name not in answer["tainted"]]
        raise Unfit("imports that torch itself makes read variables of single workers")

    @classmethod
    async def _start(
        cls, plan: TemplatePlan, modules: Sequence[str], reaper: Reaper, *, gentle: bool
    ) -> tuple[Template, dict[str, Any]]:
        process, control = _launch(plan)
        reaper.own(process.pid)
        template = cls(plan, process, control)
        config = _config(plan, modules=modules)
        brake = asyncio.ensure_future(_brake(process)) if gentle else None
        try:
            protocol.send(control, config)
            answer, _ = await _receive(control, READY_S_MAX)
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError):
            answer = {"unfit": f"the template did not come up, see {plan.log}"}
        except asyncio.CancelledError:
            await template.close(reaper)
            raise
        finally:
            if brake is not None:
                brake.cancel()
                if process.poll() is None:
                    process.send_signal(signal.SIGCONT)
        return template, answer

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._control.fileno() >= 0 and self._process.poll() is None

    async def fork(self, orders: Sequence[ForkOrder], *, script_dir: str | None) -> tuple[int, ...]:
        """Fork one worker per order; all or none. They are children of this process when it returns.

        Raises:
            Unfit: None was started; the text says why.
        """
        batch = protocol.FDS_PER_MESSAGE_MAX // protocol.FDS_PER_WORKER
        pids: list[int] = []
        try:
            for begin in range(0, len(orders), batch):
                pids += await self._fork(orders[begin : begin + batch], script_dir)
        except Unfit:
            for pid in pids:  # forked a moment ago and not reaped: the numbers are still theirs
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        return tuple(pids)

    async def _fork(self, orders: Sequence[ForkOrder], script_dir: str | None) -> list[int]:
        message = {
            "agent_pid": os.getpid(),
            "script_dir": script_dir,
            "workers": [{"env": dict(order.env), "args": list(order.args)} for order in orders],
        }
        try:
            protocol.send(self._control, message, tuple(fd for order in orders for fd in order.fds))
            answer, _ = await _receive(self._control, FORK_S_MAX)
        except BaseException as error:
            # Nobody knows how far it came: it may not go on, and what it forked may not stay.
            self._control.close()
            if self._process.poll() is None:
                self._process.kill()
            if isinstance(error, (OSError, EOFError, TimeoutError, asyncio.TimeoutError)):
                raise Unfit(LOST) from error
            raise
        if "refused" in answer:
            raise Unfit(str(answer["refused"]))
        pids = [int(pid) for pid in answer["pids"]]
        if "failed" in answer:
            for pid in pids:
                os.waitpid(pid, 0)  # without their byte they have ended
            raise Unfit("no more processes may be forked on this machine")
        return pids

    async def close(self, reaper: Reaper) -> None:
        """End it. Its workers live on. May be called twice."""
        self._control.close()
        if self._process.poll() is None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S_MAX)
        reaper.disown(self._process.pid)


def _launch(plan: TemplatePlan) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    env = dict(plan.env)
    old = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{BOOTSTRAP}{os.pathsep}{old}" if old else str(BOOTSTRAP)
    env["AIMASTER_TEMPLATE"] = str(theirs.fileno())
    env[plan.token[0]] = plan.token[1]
    log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            plan.argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    except OSError:
        ours.close()
        raise
    finally:
        os.close(log)
        theirs.close()
    ours.setblocking(False)
    return process, ours


def _config(plan: TemplatePlan, *, modules: Sequence[str] = (), probe: bool = False) -> dict[str, Any]:
    return {
        "agent_pid": os.getpid(),
        "probe": probe,
        "pythonpath": plan.env.get("PYTHONPATH"),
        "per_worker": sorted(plan.per_worker),
        "modules": list(modules),
    }


async def _probe(plan: TemplatePlan, reaper: Reaper) -> None:
    """See whether this interpreter comes by our folder before it runs a script; costs one start of Python.

    Where it does not (a wrapper that passes ``-I``), a template would run the script.
    """
    harmless = TemplatePlan(
        argv=(plan.argv[0], "-u", "-c", "import os; os._exit(0)"),
        env=plan.env,
        per_worker=plan.per_worker,
        token=plan.token,
        log=plan.log,
    )
    try:
        process, control = _launch(harmless)
    except OSError as error:
        raise Unfit(f"{sys.executable} cannot be started ({error.strerror})") from error
    reaper.own(process.pid)
    try:
        protocol.send(control, _config(harmless, probe=True))
        answer, _ = await _receive(control, PROBE_S_MAX)
    except (OSError, EOFError, TimeoutError, asyncio.TimeoutError):
        answer = {}
    finally:
        control.close()
        process.kill()
        process.wait()
        reaper.disown(process.pid)
    if not answer.get("probe"):
        raise Unfit(f"{plan.argv[0]} does not import sitecustomize from PYTHONPATH")


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


async def _brake(process: subprocess.Popen[bytes]) -> None:
    """Let a process run for two thirds of the time while no processor is idle.

    A lower priority could not be taken back, and the workers would inherit it.
    """
    idle, looked = _idle_s(), time.monotonic()
    busy = True
    while process.poll() is None:
        if busy:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(BRAKE_STOP_S)
            process.send_signal(signal.SIGCONT)
        await asyncio.sleep(BRAKE_RUN_S)
        passed = time.monotonic() - looked
        if passed > BRAKE_LOOK_S:
            now = _idle_s()
            busy = now - idle < BRAKE_IDLE_SHARE * passed
            idle, looked = now, time.monotonic()


def _idle_s() -> float:
    """Time that the processors of this machine have been idle since boot, summed."""
    try:
        with open("/proc/stat", "rb") as file:
            return int(file.readline().split()[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


async def _receive(control: socket.socket, timeout_s: float) -> tuple[dict[str, Any], list[int]]:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(control, _set, readable)
    try:
        await asyncio.wait_for(readable, timeout_s)
        return protocol.receive(control)
    finally:
        with contextlib.suppress(ValueError, OSError):
            loop.remove_reader(control)
