"""Writes to the caller's own streams from a thread, so that a stalled reader never stalls the agent.

What the reader has not taken yet is kept in order: first in memory, then in a nameless file, up to a named
limit. Only behind that do workers wait, as they would if they wrote to the stream themselves. A reader that
has gone (``| head``) costs its stream, never the training: the rest is dropped, and `broken` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

MEMORY_BYTES_MAX = 4 * 1024 * 1024
SPILL_BYTES_MAX = 1024 * 1024 * 1024
WRITE_BYTES_MAX = 64 * 1024


class Sink:
    """One thread that writes to one or two descriptors. All but `_run` is for the loop's thread."""

    def __init__(self, name: str, *, spill_dir: Path) -> None:
        self._spill_dir = spill_dir
        self._lock = threading.Condition()
        self._memory: deque[tuple[int, bytes]] = deque()
        self._memory_bytes = 0
        self._spill: IO[bytes] | None = None
        self._spilled: deque[tuple[int, int]] = deque()
        self._read_at = self._write_at = 0
        self._busy = False
        self._closing = False
        self._waiting: list[Callable[[], None]] = []
        self._loop = asyncio.get_running_loop()
        self.broken: str | None = None
        self.written = 0
        self._thread = threading.Thread(target=self._run, name=f"aimaster-{name}", daemon=True)
        self._thread.start()

    def write(self, fd: int, data: bytes) -> None:
        """Queue output. Never blocks and never refuses; ask `full` before reading more from a worker."""
        with self._lock:
            if self.broken is not None or not data:
                return
            over = bool(self._spilled) or self._memory_bytes + len(data) > MEMORY_BYTES_MAX
            if over and self._spill_out(fd, data):
                return
            self._memory.append((fd, data))
            self._memory_bytes += len(data)
            self._lock.notify()

    @property
    def full(self) -> bool:
        """Whether nothing more should be read from workers for now."""
        with self._lock:
            spill_bytes = self._write_at - self._read_at
            no_file = self._spill is None and self._memory_bytes > MEMORY_BYTES_MAX
            return self.broken is None and (no_file or spill_bytes > SPILL_BYTES_MAX)

    def when_room(self, callback: Callable[[], None]) -> None:
        """Call back once, in the loop, as soon as everything queued so far is written."""
        with self._lock:
            self._waiting.append(callback)
            self._lock.notify()

    async def close(self, idle_s_max: float) -> bool:
        """Write what is left for as long as the reader takes some every `idle_s_max` seconds.

        Returns:
            Whether everything was written.
        """
        begin, seen = time.monotonic(), -1
        while True:
            with self._lock:
                done = self.broken is not None or not (self._memory or self._spilled or self._busy)
                if self.written != seen:
                    begin, seen = time.monotonic(), self.written
                if done or time.monotonic() - begin > idle_s_max:
                    self._closing = True
                    self._lock.notify()
                    return done and self.broken is None
            await asyncio.sleep(0.005)

    def _spill_out(self, fd: int, data: bytes) -> bool:
        try:
            if self._spill is None:
                self._spill = tempfile.TemporaryFile(dir=self._spill_dir, buffering=0)  # noqa: SIM115
            os.pwrite(self._spill.fileno(), data, self._write_at)
        except OSError:
            return False  # no space: memory takes it, and `full` holds the workers back
        self._write_at += len(data)
        self._spilled.append((fd, len(data)))
        self._lock.notify()
        return True

    def _take(self) -> tuple[int, bytes] | None:
        """Next piece, memory first: it is older than what was spilled. None when closing."""
        with self._lock:
            self._busy = False
            while True:
                if self._memory:
                    fd, data = self._memory.popleft()
                    self._memory_bytes -= len(data)
                    break
                if self._spilled and self._spill is not None:
                    fd, size = self._spilled.popleft()
                    data = os.pread(self._spill.fileno(), size, self._read_at)
                    self._read_at += size
                    if not self._spilled:
                        self._spill.truncate(0)
                        self._read_at = self._write_at = 0
                    break
                self._tell_waiting()
                if self._closing:
                    return None
                self._lock.wait()
            self._busy = True
            return fd, data

    def _tell_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for callback in waiting:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(callback)

    def _run(self) -> None:
        while (piece := self._take()) is not None:
            fd, data = piece
            try:
                self._write_all(fd, memoryview(data))
            except OSError as error:
                with self._lock:
                    self.broken = error.strerror or str(error)
                    self._memory.clear()
                    self._spilled.clear()
                    self._memory_bytes = self._read_at = self._write_at = 0
        if self._spill is not None:
            self._spill.close()

    def _write_all(self, fd: int, data: memoryview) -> None:
        while data:
            try:
                count = os.write(fd, data[:WRITE_BYTES_MAX])
            except BlockingIOError:  # somebody made the caller's stream non-blocking
                select.select([], [fd], [])
                continue
            data = data[count:]
            self.written += count
