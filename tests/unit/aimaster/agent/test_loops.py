"""Lines of workers that can outlive a generation: who speaks, who is waited for, who is not."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from aimaster.agent import loops as loops_module
from aimaster.agent.loops import Loops
from aimaster.ids import Generation

DEADLINE_S = 60.0
SOON_S = 0.05
"""For what never comes; nothing depends on its length."""


@asynccontextmanager
async def opened(*, known: bool = True) -> AsyncIterator[Loops]:
    async def answer(pid: int) -> bool:
        return known

    with tempfile.TemporaryDirectory() as folder:
        loops = Loops(Path(folder) / "s", known=answer)
        await loops.open()
        assert (Path(folder) / "s").stat().st_mode & 0o777 == 0o600
        try:
            yield loops
        finally:
            await loops.close()
            assert not (Path(folder) / "s").exists()


class Worker:
    """The other side, in this process: the kernel says that it is this pid."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, loops: Loops) -> Worker:
        worker = cls(*await asyncio.open_unix_connection(loops.path))
        worker.say({"hello": 1})  # what it says of itself counts for nothing
        for _ in range(int(DEADLINE_S / 0.01)):
            if loops.has(os.getpid()):
                break
            await asyncio.sleep(0.01)
        return worker

    def say(self, message: object) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")

    async def hear(self) -> dict[str, object]:
        line = await asyncio.wait_for(self.reader.readline(), DEADLINE_S)
        heard: dict[str, object] = json.loads(line)
        return heard


def test_a_worker_leaves_and_starts_again() -> None:
    async def play() -> None:
        async with opened() as loops:
            worker, pid = await Worker.connect(loops), os.getpid()
            assert loops.has(pid)
            assert not loops.waits(pid)
            leaving = asyncio.create_task(loops.leave([pid], Generation(3), within_s=DEADLINE_S))
            assert await worker.hear() == {"leave": 3}
            worker.say({"left": "a peer is gone"})
            await leaving
            assert loops.waits(pid)
            # It waits already: a second generation that breaks meanwhile asks nothing of it.
            await loops.leave([pid], Generation(3), within_s=DEADLINE_S)
            assert loops.start(pid, {"RANK": "1"})
            assert await worker.hear() == {"start": {"RANK": "1"}}
            assert not loops.waits(pid)
            worker.writer.close()

    asyncio.run(play())


def test_who_says_nothing_is_not_waited_for_beyond_its_time() -> None:
    async def play() -> None:
        async with opened() as loops:
            worker = await Worker.connect(loops)
            await loops.leave([os.getpid(), 1], Generation(3), within_s=SOON_S)
            assert not loops.waits(os.getpid())
            worker.writer.close()

    asyncio.run(play())


def test_who_dies_while_it_leaves_is_not_waited_for() -> None:
    async def play() -> None:
        async with opened() as loops:
            worker = await Worker.connect(loops)
            leaving = asyncio.create_task(loops.leave([os.getpid()], Generation(3), within_s=DEADLINE_S))
            await worker.hear()
            worker.writer.write(b'{"le')
            worker.writer.close()
            await asyncio.wait_for(leaving, DEADLINE_S)
            assert not loops.waits(os.getpid())
            assert not loops.start(os.getpid(), {})

    asyncio.run(play())


SLEEPER = """
import socket, sys, time
line = socket.socket(socket.AF_UNIX)
line.connect(sys.argv[1])
time.sleep(600)
"""


def test_who_does_nothing_at_all_is_given_up_early(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        async with opened() as loops:
            process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(loops.path)])
            try:
                while not loops.has(process.pid):
                    await asyncio.sleep(0.01)
                # Ends by itself; a wait for the whole time would be beyond the deadline of any test.
                await loops.leave([process.pid], Generation(3), within_s=3600.0)
                assert not loops.waits(process.pid)
            finally:
                process.kill()
                process.wait()

    monkeypatch.setattr(loops_module, "STILL_S_MAX", 0.5)
    asyncio.run(play())


def test_a_stranger_is_hung_up_on() -> None:
    async def play() -> None:
        async with opened(known=False) as loops:
            reader, writer = await asyncio.open_unix_connection(loops.path)
            assert await asyncio.wait_for(reader.read(), DEADLINE_S) == b""
            assert not loops.has(os.getpid())
            writer.close()

    asyncio.run(play())
