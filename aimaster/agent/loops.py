"""Workers that can outlive a generation: the agent's side of `aimaster.worker.again`.

A worker that calls `aimaster.worker.loop` opens a line to the agent's socket, a JSON object a line:

    worker: {"hello": pid}    agent: {"leave": generation}    worker: {"left": "why"}    agent: {"start": {…}}

Who speaks is known by the kernel's word on the socket's other end, never by what it says. A worker that said
nothing, or does not come out in time, is ended and started anew like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aimaster.agent.counters import Counters, read_tree
from aimaster.agent.spoken import say
from aimaster.ids import Generation

LINE_BYTES_MAX = 64 * 1024
WHY_CHARS_MAX = 120
"""Of what made a worker come out, as people see it."""
STILL_S_MAX = 3.0
"""A worker that uses no processor and moves no byte for so long will not come out by itself."""
LOOK_S = 0.25
_UCRED = struct.Struct("3i")


@dataclass(slots=True)
class _Line:
    """One worker's line."""

    writer: asyncio.StreamWriter
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while the worker waits for the next generation."""
    gone: bool = False


class Loops:
    """One node's lines. Used on the agent's event loop alone."""

    def __init__(self, path: Path | None, *, known: Callable[[int], Awaitable[bool]]) -> None:
        """Nothing listens yet.

        Args:
            path: Where to listen; None: nowhere.
            known: Whether a process is a worker of this agent.
        """
        self.path = path
        self._known = known
        self._server: asyncio.Server | None = None
        self._lines: dict[int, _Line] = {}

    async def open(self) -> None:
        """Listen. May be called again.

        Raises:
            OSError: the socket cannot be made.
        """
        if self._server is None and self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
            self._server = await asyncio.start_unix_server(self._serve, self.path, limit=LINE_BYTES_MAX)
            os.chmod(self.path, 0o600)

    def has(self, pid: int) -> bool:
        """Whether that worker has a line."""
        return pid in self._lines

    def waits(self, pid: int) -> bool:
        """Whether that worker is out of its generation and waits for the next one."""
        line = self._lines.get(pid)
        return line is not None and not line.gone and line.left.is_set()

    async def leave(self, pids: Collection[int], generation: Generation, *, within_s: float) -> None:
        """Tell workers that their generation is over, and wait for those that can leave it alive.

        Not all of `within_s` where those that are still awaited do nothing at all, `STILL_S_MAX` long: gloo
        sometimes misses that all of its sockets are closed (torch 2.13: one wait in some hundred).
        """
        waits: dict[asyncio.Future[bool], int] = {}
        for pid, line in self._lines.items():
            if pid in pids and not line.left.is_set():
                self._say(line, {"leave": generation})
                waits[asyncio.ensure_future(line.left.wait())] = pid
        deadline = moved_s = time.monotonic()
        deadline += within_s
        before: dict[int, Counters | None] = {}
        while waits and time.monotonic() < min(deadline, moved_s + STILL_S_MAX):
            left_s = deadline - time.monotonic()
            done, _ = await asyncio.wait(waits, timeout=min(LOOK_S, max(0.0, left_s)))
            for wait in done:
                del waits[wait]
            seen = {pid: read_tree(pid, ()) for pid in waits.values()}
            if done or any(
                one is None or one.runnable or one != before.get(pid) for pid, one in seen.items()
            ):
                moved_s = time.monotonic()
            before = seen
        for wait in waits:
            wait.cancel()

    def start(self, pid: int, env: Mapping[str, str]) -> bool:
        """Let a worker that waits begin its next generation; False if it has died since."""
        line = self._lines.get(pid)
        if line is None:
            return False
        line.left.clear()
        self._say(line, {"start": dict(env)})
        return True

    async def close(self) -> None:
        """Hang up. May be called twice."""
        for line in self._lines.values():
            line.writer.close()
        self._lines.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
            assert self.path is not None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)

    def _say(self, line: _Line, message: dict[str, object]) -> None:
        # Few small messages: the kernel's buffer holds them, and a worker that died is seen by its exit.
        line.writer.write(json.dumps(message).encode() + b"\n")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pid, uid = _peer(writer)
        if uid != os.getuid() or not await self._known(pid):
            writer.close()
            return
        line = self._lines[pid] = _Line(writer)
        try:
            while text := await reader.readline():
                told = json.loads(text)
                if "left" in told:
                    say(f"a worker (pid {pid}) came out: {str(told['left'])[:WHY_CHARS_MAX]}")
                    line.left.set()
        except (OSError, ValueError):
            pass  # it died in the middle of a line, or speaks another language
        finally:
            line.gone = True
            line.left.set()  # nobody waits for it in vain
            if self._lines.get(pid) is line:
                del self._lines[pid]
            writer.close()


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    raw = writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, _ = _UCRED.unpack(raw)
    return pid, uid
