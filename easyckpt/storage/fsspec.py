"""Checkpoints through fsspec.

Only stores whose create-if-absent was tried are let in, because two committers must never both win. In this
version that is ``memory://`` (fsspec's own, one per process); object stores follow with their conditional
requests (``If-None-Match``, generation match). ``file://`` is not served here: `open_storage` turns it into
`LocalStorage`, whose durable write fsspec does not have.
"""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import fsspec

from easyckpt.errors import Misuse, StorageConflict, StorageMissing, StorageUnavailable
from easyckpt.storage.base import (
    BytesSource,
    Entry,
    Parts,
    StorageProperties,
    as_bytes_view,
    check_parts,
    check_path,
    storage_error,
)

__all__ = ["FsspecStorage"]

TRIED_PROTOCOLS = ("memory",)

_MEMORY_LOCK = threading.Lock()
"""fsspec's memory file system looks first and creates then; within the one process that it lives in, a lock
makes that one step."""


class FsspecStorage:
    """A folder of an fsspec file system as a checkpoint store. Any thread may call.

    Args:
        url: for example ``memory://run1``.

    Raises:
        Misuse: a protocol whose conditional create was not tried.
    """

    def __init__(self, url: str) -> None:
        protocol = url.split("://", 1)[0]
        if "://" not in url or protocol not in TRIED_PROTOCOLS:
            raise Misuse(
                "checkpoints cannot be kept in this kind of store yet",
                where=url,
                hint="use a folder, file:// or memory://; a store that is mounted as a folder will do",
            )
        self._fs: Any
        self._fs, path = fsspec.core.url_to_fs(url)
        self._protocol = protocol
        self._root = path.rstrip("/")

    @property
    def properties(self) -> StorageProperties:
        """What was tried with this protocol."""
        return StorageProperties(
            name=f"fsspec+{self._protocol}",
            conditional_create=True,
            atomic_replace=True,
            survives_process=False,
            survives_power_loss=False,
        )

    def where(self, path: str = "") -> str:
        """The object's URL."""
        return f"{self._protocol}://{self._full(path).lstrip('/')}"

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def write_durable(
        self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
    ) -> None:
        """See `Storage.write_durable`."""
        full = self._full(check_path(path))
        value = bytes(as_bytes_view(data))
        check_parts(memoryview(value), parts)
        try:
            with _MEMORY_LOCK:
                self._fs.pipe_file(full, value, mode="create" if if_absent else "overwrite")
            length = self._fs.info(full)["size"]
        except FileExistsError as error:
            raise StorageConflict(
                "it is there already, and is not replaced", where=self.where(path)
            ) from error
        except OSError as error:
            raise storage_error(error, doing="write", where=self.where(path)) from error
        # What was replaced may have been replaced again meanwhile; what was created is sure to be ours.
        if if_absent and length != len(value):
            raise StorageUnavailable(
                f"wrote {len(value)} bytes and the store has {length}",
                where=self.where(path),
                hint="this store loses writes: do not keep checkpoints here",
            )

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        full = self._full(check_path(path))
        if end is not None and end <= begin:
            end = begin
        try:
            return bytes(self._fs.cat_file(full, start=begin, end=end))
        except FileNotFoundError as error:
            raise StorageMissing(
                "it is not there", where=self.where(path), hint="`easyckpt ls` shows what is"
            ) from error
        except OSError as error:
            raise storage_error(error, doing="read", where=self.where(path)) from error

    def read_into(self, path: str, buffer: memoryview, begin: int = 0) -> int:
        """See `Storage.read_into`."""
        part = self.read(path, begin, begin + buffer.nbytes)
        if part:
            buffer.cast("B")[: len(part)] = part
        return len(part)

    def stat(self, path: str) -> Entry | None:
        """See `Storage.stat`."""
        full = self._full(check_path(path))
        try:
            info = self._fs.info(full)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise storage_error(error, doing="look at it", where=self.where(path)) from error
        return self._entry(info) if info["type"] == "file" else None

    def _entry(self, info: dict[str, Any]) -> Entry:
        time = info.get("mtime", info.get("created", 0.0))
        seconds = time.timestamp() if isinstance(time, datetime) else float(time)
        return Entry(path=info["name"][len(self._root) + 1 :], bytes=int(info["size"]), mtime_s=seconds)

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return self.stat(path) is not None

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage.list`."""
        check_path(prefix, folder=True)
        folder = self._full(prefix.rstrip("/"))
        try:
            self._fs.invalidate_cache(folder)
            found = self._fs.find(folder, detail=True)
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise storage_error(error, doing="list", where=self.where(prefix)) from error
        entries = (self._entry(info) for info in found.values())
        # A file with the folder's name is found too, and is not in it.
        return tuple(sorted((e for e in entries if e.path.startswith(prefix)), key=lambda entry: entry.path))

    def unfinished(self, prefix: str = "") -> tuple[Entry, ...]:
        """Nothing: an upload that was cut off never becomes an object."""
        check_path(prefix, folder=True)
        return ()

    def delete(self, path: str) -> None:
        """See `Storage.delete`."""
        full = self._full(check_path(path, hidden=True))
        try:
            self._fs.rm_file(full)
        except (FileNotFoundError, KeyError):
            return
        except OSError as error:
            raise storage_error(error, doing="delete", where=self.where(path)) from error

    def free_bytes(self) -> int | None:
        """Unknown."""
        return None
