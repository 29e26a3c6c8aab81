"""Checkpoints in a folder: any file system that a POSIX machine mounts, shared or not.

The durable write, in this one place::

    1  create a hidden name beside the final one (O_EXCL; for large bodies O_DIRECT, and room reserved)
    2  write, a large body in parts, several at once
    3  check the length
    4  sync the file
    5  give it its final name: rename, or for `if_absent` link (and remove the hidden name)
    6  sync the folder, and each folder above it up to the root

A crash before 5 leaves only a hidden name, which no reader looks at and `unfinished` lists. A crash after 5
leaves a whole object. Step 6 walks up because a folder that another process has just made is not lasting yet
either, and this object would go with it; on a clean folder it costs microseconds.

``if_absent`` needs `link` or `renameat2`. Where a file system has neither, it is refused: a way with gaps
would let two committers win.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from functools import partial

from easyckpt.errors import EasyckptError, StorageConflict, StorageDenied, StorageUnavailable
from easyckpt.lanes import run_lanes
from easyckpt.storage.base import (
    PART_BYTES,
    BytesSource,
    Entry,
    Parts,
    StorageProperties,
    as_bytes_view,
    check_path,
    storage_error,
)
from easyckpt.storage.posix import BLOCK_BYTES, Posix

__all__ = ["LocalStorage"]

WRITE_BYTES = 16 << 20
"""One system call; a multiple of every block size, and long enough to keep several disk queues filled."""

DIRECT_BYTES_MIN = 1 << 20
"""Shorter objects go through the page cache: the file system's bookkeeping outweighs the copy."""

OPEN_ATTEMPTS = 5
"""How often a folder may vanish (removed by retention, because it was empty) between making and using it."""

_UNFINISHED_PREFIX = ".new-"
_NO_LINKS = frozenset(
    {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}
)


class LocalStorage:
    """A folder as a checkpoint store.

    Args:
        root: the folder; made at the first write, never by reading.
        posix: the primitive operations; another one only in tests.
        lanes: parts of one object that are written at once; None takes what the machine gives.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, posix: Posix | None = None, lanes: int | None = None
    ) -> None:
        self.root = os.path.abspath(os.fspath(root))
        self._posix = posix if posix is not None else Posix()
        self._lanes = lanes

    @property
    def properties(self) -> StorageProperties:
        """All of it, on a file system that keeps POSIX's promises."""
        return StorageProperties(
            name="local",
            conditional_create=True,
            atomic_replace=True,
            survives_process=True,
            survives_power_loss=True,
        )

    def where(self, path: str = "") -> str:
        """Absolute path."""
        return os.path.join(self.root, path) if path else self.root

    # ----- writing -----

    def write_durable(
        self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
    ) -> None:
        """See `Storage.write_durable`; the recipe is in the module's docstring."""
        check_path(path)
        view = as_bytes_view(data)
        target = self.where(path)
        temporary = ""
        try:
            if if_absent and self._present(target):
                raise StorageConflict("it is there already, and is not replaced", where=target)
            temporary, fd = self._create(target, direct=len(view) >= DIRECT_BYTES_MIN)
            self._fill(fd, view, parts, target)
            if if_absent:
                self._publish_once(temporary, target)
            else:
                self._posix.replace(temporary, target)
            temporary = ""
            for folder in self._folders_above(target):
                self._posix.sync_folder(folder)
        except OSError as error:
            raise storage_error(error, doing="write", where=target, free_bytes=self.free_bytes) from error
        finally:
            if temporary:
                # What failed is reported; a hidden name that stays behind is swept by retention.
                with contextlib.suppress(OSError):
                    self._posix.unlink(temporary)

    def _create(self, target: str, *, direct: bool) -> tuple[str, int]:
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f"{_UNFINISHED_PREFIX}{secrets.token_hex(8)}-{name}")
        for attempt in range(OPEN_ATTEMPTS):
            try:
                return temporary, self._posix.create(temporary, direct=direct)
            except FileNotFoundError:
                if attempt == OPEN_ATTEMPTS - 1:
                    raise
                self._make_folders(folder)
        raise AssertionError("unreachable")

    def _make_folders(self, folder: str) -> None:
        missing = []
        while not self._present(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                self._posix.make_folder(path)
            self._posix.sync_folder(os.path.dirname(path))

    def _fill(self, fd: int, view: memoryview, parts: Parts | None, target: str) -> None:
        """Write, check the length, sync, close: the descriptor is closed in any case."""
        try:
            self._write_all(fd, view, parts)
            length = self._posix.length(fd)
            if length != len(view):
                raise StorageUnavailable(
                    f"wrote {len(view)} bytes and the file has {length}",
                    where=target,
                    hint="this file system loses writes: do not keep checkpoints here",
                )
            self._posix.sync(fd)
            if len(view) >= DIRECT_BYTES_MIN and not self._posix.is_direct(fd):
                self._posix.leave_cache(fd, 0, len(view))
        except BaseException:
            with contextlib.suppress(OSError):
                self._posix.close(fd)
            raise
        self._posix.close(fd)

    def _write_all(self, fd: int, view: memoryview, parts: Parts | None) -> None:
        """Each part is checked and then written. The blocks go first, what is left of the last one alone."""
        size = parts.bytes if parts is not None else PART_BYTES
        large = len(view) >= DIRECT_BYTES_MIN
        whole = len(view) // BLOCK_BYTES * BLOCK_BYTES if large else len(view)
        if large:
            self._posix.reserve(fd, len(view))

        def write_part(begin: int) -> None:
            if parts is not None:
                parts.check(begin, view[begin : begin + size])
            self._write_range(fd, view[begin : min(begin + size, whole)], begin)

        tasks = [partial(write_part, begin) for begin in range(0, len(view), size)]
        run_lanes(tasks, lanes=self._lanes)
        if whole < len(view):
            self._posix.leave_direct(fd)
            self._write_range(fd, view[whole:], whole)

    def _write_range(self, fd: int, view: memoryview, offset: int) -> None:
        done = 0
        refused = False
        while done < len(view):
            try:
                wrote = self._posix.write(fd, view[done : done + WRITE_BYTES], offset + done)
            except OSError as error:
                # Memory or file system are not aligned as O_DIRECT wants it. Another lane may have found
                # that out already.
                if error.errno != errno.EINVAL or refused:
                    raise
                refused = True
                self._posix.leave_direct(fd)
                continue
            if wrote == 0:
                raise OSError(errno.EIO, "the file system takes no more bytes")
            done += wrote
            if wrote % BLOCK_BYTES and done < len(view):
                self._posix.leave_direct(fd)
        if len(view) >= DIRECT_BYTES_MIN and not self._posix.is_direct(fd):
            self._posix.leave_cache(fd, offset, len(view))

    def _publish_once(self, temporary: str, target: str) -> None:
        try:
            self._posix.link(temporary, target)
        except FileExistsError:
            # A network file system may have done it, lost the answer, and asked again.
            if self._posix.links(temporary) != 2:
                raise
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self._rename_once(temporary, target, link_error=error)
            return
        self._posix.unlink(temporary)

    def _rename_once(self, temporary: str, target: str, *, link_error: OSError) -> None:
        try:
            self._posix.rename_if_absent(temporary, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            raise StorageDenied(
                f"this file system has neither hard links nor an exclusive rename ({link_error.strerror})",
                where=target,
                hint="two jobs could commit the same step here: use another file system for checkpoints",
            ) from error

    def _folders_above(self, target: str) -> Iterator[str]:
        folder = os.path.dirname(target)
        while True:
            yield folder
            if folder == self.root:
                return
            folder = os.path.dirname(folder)

    # ----- reading -----

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        found = self.stat(path)
        # A caller may ask for far more than there is, to see whether it is too long: never reserve that much.
        end = min(begin if found is None else found.bytes, 1 << 62 if end is None else end)
        buffer = bytearray(max(0, end - begin))
        got = self.read_into(path, memoryview(buffer), begin)
        del buffer[got:]
        return bytes(buffer)

    def read_into(self, path: str, buffer: memoryview, begin: int = 0) -> int:
        """See `Storage.read_into`."""
        target = self.where(check_path(path))
        try:
            return self._posix.read(target, buffer.cast("B") if buffer.nbytes else buffer, begin)
        except OSError as error:
            raise storage_error(error, doing="read", where=target) from error

    def stat(self, path: str) -> Entry | None:
        """See `Storage.stat`."""
        target = self.where(check_path(path))
        try:
            facts = self._posix.facts(target)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise storage_error(error, doing="look at it", where=target) from error
        return None if facts.is_folder else Entry(path=path, bytes=facts.bytes, mtime_s=facts.mtime_s)

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return self.stat(path) is not None

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage.list`."""
        return self._walk(prefix, hidden=False)

    def unfinished(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage.unfinished`."""
        return self._walk(prefix, hidden=True)

    def _walk(self, prefix: str, *, hidden: bool) -> tuple[Entry, ...]:
        check_path(prefix, folder=True)
        found: list[Entry] = []
        folders = [prefix]
        while folders:
            folder = folders.pop()
            try:
                for facts in self._posix.scan(self.where(folder)):
                    path = folder + facts.name
                    if facts.is_folder:
                        if _is_plain(path, hidden=False):
                            folders.append(path + "/")
                    elif facts.name.startswith(_UNFINISHED_PREFIX) == hidden and _is_plain(
                        path, hidden=hidden
                    ):
                        found.append(Entry(path=path, bytes=facts.bytes, mtime_s=facts.mtime_s))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                raise storage_error(error, doing="list", where=self.where(folder)) from error
        return tuple(sorted(found, key=lambda entry: entry.path))

    # ----- removing -----

    def delete(self, path: str) -> None:
        """See `Storage.delete`. Folders that it leaves empty go too, the root excepted."""
        target = self.where(check_path(path, hidden=True))
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                self._posix.unlink(target)
                self._posix.sync_folder(os.path.dirname(target))
            self._remove_empty(os.path.dirname(target))
        except OSError as error:
            raise storage_error(error, doing="delete", where=target) from error

    def _remove_empty(self, folder: str) -> None:
        while folder != self.root:
            try:
                self._posix.remove_folder(folder)
            except OSError:
                return  # not empty, or in use: it stays
            folder = os.path.dirname(folder)

    def free_bytes(self) -> int | None:
        """Space left on the file system that the root is on, or would be."""
        folder = self.root
        while not self._present(folder):
            folder = os.path.dirname(folder)
        try:
            return self._posix.free_bytes(folder)
        except OSError:
            return None

    def _present(self, path: str) -> bool:
        try:
            self._posix.facts(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True


def _is_plain(path: str, *, hidden: bool) -> bool:
    """Names that are not ours to touch (a user's notes, an editor's file) are not objects."""
    try:
        check_path(path, hidden=hidden)
    except EasyckptError:
        return False
    return True
