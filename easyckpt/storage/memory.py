"""Checkpoints in the memory of this process: the fastest store, for tests and for trying things out.

It keeps every rule of `easyckpt.storage.base` but survival: nothing outlives the process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from easyckpt.errors import StorageConflict, StorageMissing
from easyckpt.storage.base import (
    BytesSource,
    Entry,
    Parts,
    StorageProperties,
    as_bytes_view,
    check_parts,
    check_path,
)

__all__ = ["MemoryStorage"]


class MemoryStorage:
    """A dictionary of paths and bytes. Any thread may call.

    Args:
        wall_clock: seconds since 1970, for the times in listings.
    """

    def __init__(self, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()
        self._wall_clock = wall_clock

    @property
    def properties(self) -> StorageProperties:
        """Atomic, and gone with the process."""
        return StorageProperties(
            name="memory",
            conditional_create=True,
            atomic_replace=True,
            survives_process=False,
            survives_power_loss=False,
        )

    def where(self, path: str = "") -> str:
        """The path with the scheme of this store."""
        return f"memory:{path}"

    def write_durable(
        self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
    ) -> None:
        """See `Storage.write_durable`."""
        check_path(path)
        value = bytes(as_bytes_view(data))
        check_parts(memoryview(value), parts)
        with self._lock:
            if if_absent and path in self._objects:
                raise StorageConflict("it is there already, and is not replaced", where=self.where(path))
            self._objects[path] = (value, self._wall_clock())

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        return self._value(path)[begin:end]

    def read_into(self, path: str, buffer: memoryview, begin: int = 0) -> int:
        """See `Storage.read_into`."""
        part = self._value(path)[begin : begin + buffer.nbytes]
        if part:
            buffer.cast("B")[: len(part)] = part
        return len(part)

    def _value(self, path: str) -> bytes:
        check_path(path)
        with self._lock:
            found = self._objects.get(path)
        if found is None:
            raise StorageMissing(
                "it is not there", where=self.where(path), hint="`easyckpt ls` shows what is"
            )
        return found[0]

    def stat(self, path: str) -> Entry | None:
        """See `Storage.stat`."""
        check_path(path)
        with self._lock:
            found = self._objects.get(path)
        return None if found is None else Entry(path=path, bytes=len(found[0]), mtime_s=found[1])

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return self.stat(path) is not None

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage.list`."""
        check_path(prefix, folder=True)
        with self._lock:
            found = sorted(item for item in self._objects.items() if item[0].startswith(prefix))
        return tuple(Entry(path=path, bytes=len(value), mtime_s=mtime_s) for path, (value, mtime_s) in found)

    def unfinished(self, prefix: str = "") -> tuple[Entry, ...]:
        """Nothing: a write here cannot be cut off."""
        check_path(prefix, folder=True)
        return ()

    def delete(self, path: str) -> None:
        """See `Storage.delete`."""
        check_path(path, hidden=True)
        with self._lock:
            self._objects.pop(path, None)

    def free_bytes(self) -> int | None:
        """Unknown."""
        return None
