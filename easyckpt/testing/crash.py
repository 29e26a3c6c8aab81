"""Dying at a chosen operation.

A crash is no error that code may handle: it is a `BaseException`, and once it has struck, every further
operation strikes too, so that no clean-up can run that a dead process would not have run.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from easyckpt.storage.base import BytesSource, Entry, Parts, Storage, StorageProperties
from easyckpt.storage.posix import FileFacts, Posix

__all__ = ["Crash", "CrashPlan", "CrashingPosix", "CrashingStorage", "crash_points"]

POINTS_MAX = 10_000
"""More operations than that in one enumeration means that it does not end."""


class Crash(BaseException):
    """The machine is gone. Not an `Exception`: nothing may handle it."""


@dataclass(slots=True, kw_only=True)
class CrashPlan:
    """When to die: before the operation with this number, counted from 0; None never."""

    at: int | None
    kill: bool = False
    """End the process with SIGKILL instead of raising."""
    count: int = 0
    names: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def reach(self, operation: str) -> None:
        """An operation that changes something is about to happen. Any thread may call."""
        with self.lock:
            if self.at is not None and self.count >= self.at:
                if self.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise Crash(f"before operation {self.at}: {operation}")
            self.count += 1
            self.names.append(operation)


def crash_points(run: Callable[[CrashPlan], None]) -> Iterator[CrashPlan]:
    """Run something once per operation it makes, dying before each one in turn.

    Args:
        run: does the work afresh with the plan that it is given.

    Yields:
        The plan after each run, for the caller to look at what is left. The last one did not die.
    """
    for at in range(POINTS_MAX):
        plan = CrashPlan(at=at)
        try:
            run(plan)
        except Crash:
            yield plan
            continue
        yield plan
        return
    raise AssertionError(f"more than {POINTS_MAX} operations")


class CrashingPosix(Posix):
    """Primitive operations that may be the last ones.

    A write dies half-way: the bytes before the middle are there.

    Args:
        plan: when.
        inner: who does the operations.
    """

    def __init__(self, plan: CrashPlan, inner: Posix | None = None) -> None:
        self.plan = plan
        self._inner = inner if inner is not None else Posix()

    def make_folder(self, path: str) -> None:
        """See `Posix`."""
        self.plan.reach("make_folder")
        self._inner.make_folder(path)

    def create(self, path: str, *, direct: bool) -> int:
        """See `Posix`."""
        self.plan.reach("create")
        return self._inner.create(path, direct=direct)

    def reserve(self, fd: int, length: int) -> None:
        """See `Posix`."""
        self.plan.reach("reserve")
        self._inner.reserve(fd, length)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """See `Posix`; counts twice, before the bytes and half-way through them."""
        self.plan.reach("write")
        half = len(data) // 2 // 4096 * 4096
        if half:
            done = self._inner.write(fd, data[:half], offset)
            if done < half:
                return done
        self.plan.reach("write the rest")
        return half + self._inner.write(fd, data[half:], offset + half)

    def sync(self, fd: int) -> None:
        """See `Posix`."""
        self.plan.reach("sync")
        self._inner.sync(fd)

    def close(self, fd: int) -> None:
        """See `Posix`. A dead process's descriptors are closed by the system, so this always works."""
        self._inner.close(fd)

    def link(self, source: str, target: str) -> None:
        """See `Posix`."""
        self.plan.reach("link")
        self._inner.link(source, target)

    def rename_if_absent(self, source: str, target: str) -> None:
        """See `Posix`."""
        self.plan.reach("rename_if_absent")
        self._inner.rename_if_absent(source, target)

    def replace(self, source: str, target: str) -> None:
        """See `Posix`."""
        self.plan.reach("replace")
        self._inner.replace(source, target)

    def unlink(self, path: str) -> None:
        """See `Posix`."""
        self.plan.reach("unlink")
        self._inner.unlink(path)

    def remove_folder(self, path: str) -> None:
        """See `Posix`."""
        self.plan.reach("remove_folder")
        self._inner.remove_folder(path)

    def sync_folder(self, path: str) -> None:
        """See `Posix`."""
        self.plan.reach("sync_folder")
        self._inner.sync_folder(path)

    # Looking changes nothing, and so is no point to die at.

    def leave_direct(self, fd: int) -> None:
        """See `Posix`."""
        self._inner.leave_direct(fd)

    def is_direct(self, fd: int) -> bool:
        """See `Posix`."""
        return self._inner.is_direct(fd)

    def leave_cache(self, fd: int, begin: int, length: int) -> None:
        """See `Posix`."""
        self._inner.leave_cache(fd, begin, length)

    def length(self, fd: int) -> int:
        """See `Posix`."""
        return self._inner.length(fd)

    def links(self, path: str) -> int:
        """See `Posix`."""
        return self._inner.links(path)

    def facts(self, path: str) -> FileFacts:
        """See `Posix`."""
        return self._inner.facts(path)

    def read(self, path: str, buffer: memoryview, offset: int) -> int:
        """See `Posix`."""
        return self._inner.read(path, buffer, offset)

    def scan(self, path: str) -> Iterator[FileFacts]:
        """See `Posix`."""
        return self._inner.scan(path)

    def free_bytes(self, path: str) -> int:
        """See `Posix`."""
        return self._inner.free_bytes(path)


class CrashingStorage:
    """Any store, dying before a chosen write or delete.

    Args:
        inner: the store.
        plan: when.
    """

    def __init__(self, inner: Storage, plan: CrashPlan) -> None:
        self._inner = inner
        self.plan = plan

    @property
    def properties(self) -> StorageProperties:
        """See `Storage`."""
        return self._inner.properties

    def where(self, path: str = "") -> str:
        """See `Storage`."""
        return self._inner.where(path)

    def write_durable(
        self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
    ) -> None:
        """See `Storage`."""
        self.plan.reach(f"write {path}")
        self._inner.write_durable(path, data, if_absent=if_absent, parts=parts)

    def delete(self, path: str) -> None:
        """See `Storage`."""
        self.plan.reach(f"delete {path}")
        self._inner.delete(path)

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage`."""
        return self._inner.read(path, begin, end)

    def read_into(self, path: str, buffer: memoryview, begin: int = 0) -> int:
        """See `Storage`."""
        return self._inner.read_into(path, buffer, begin)

    def stat(self, path: str) -> Entry | None:
        """See `Storage`."""
        return self._inner.stat(path)

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage`."""
        return self._inner.list(prefix)

    def unfinished(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage`."""
        return self._inner.unfinished(prefix)

    def exists(self, path: str) -> bool:
        """See `Storage`."""
        return self._inner.exists(path)

    def free_bytes(self) -> int | None:
        """See `Storage`."""
        return self._inner.free_bytes()
