"""A disk in memory that forgets what was never synced.

Between two syncs a file system may write things in any order, and after a power loss what it wrote is there.
Here every change to a folder (a name made, removed, renamed) waits in that folder until the folder is synced,
and a file's bytes wait until the file is synced. `SimulatedDisk.power_loss` then lets a chosen part of the
waiting changes happen: none, all, or a random choice, and an unsynced file keeps its old bytes, a part of the
new ones, or zeros in their place. One rename is one change, as on every journaling file system.

The idea of enumerating what may be left is that of ALICE (Pillai et al., "All File Systems Are Not Created
Equal", OSDI 2014).
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from easyckpt.storage.posix import FileFacts, Posix

__all__ = ["PowerLoss", "SimulatedDisk"]


class PowerLoss(Enum):
    """Which of the waiting changes happened."""

    NONE = "none"
    ALL = "all"
    RANDOM = "random"


_Names: TypeAlias = "dict[str, _File | _Folder]"


@dataclass(slots=True, eq=False)
class _File:
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    mtime_s: float = 0.0
    links: int = 1


@dataclass(slots=True, eq=False)
class _Folder:
    names: _Names = field(default_factory=dict)
    durable: _Names = field(default_factory=dict)
    waiting: list[Callable[[_Names], object]] = field(default_factory=list)

    def change(self, apply: Callable[[_Names], object]) -> None:
        apply(self.names)
        self.waiting.append(apply)

    def sync(self) -> None:
        self.durable = dict(self.names)
        self.waiting.clear()


class SimulatedDisk(Posix):
    """The operations of `Posix` on a disk in memory. One thread.

    Args:
        wall_clock: seconds since 1970, for the times of files.
    """

    def __init__(self, *, wall_clock: Callable[[], float] = lambda: 1e9) -> None:
        self._root = _Folder()
        self._open: dict[int, _File] = {}
        self._wall_clock = wall_clock

    # ----- the loss -----

    def power_loss(self, what: PowerLoss, rng: random.Random) -> None:
        """Forget what was not synced, as far as it is not chosen to have happened."""
        self._open.clear()
        self._lose(self._root, what, rng)

    def _lose(self, folder: _Folder, what: PowerLoss, rng: random.Random) -> None:
        names = dict(folder.durable)
        for apply in folder.waiting:
            if what is PowerLoss.ALL or (what is PowerLoss.RANDOM and rng.random() < 0.5):
                apply(names)
        folder.names, folder.durable = names, dict(names)
        folder.waiting.clear()
        for child in names.values():
            if isinstance(child, _Folder):
                self._lose(child, what, rng)
            elif bytes(child.data) != child.durable:
                child.data = bytearray(_lost_bytes(child, what, rng))
                child.durable = bytes(child.data)

    # ----- finding -----

    def _find(self, path: str) -> _File | _Folder:
        here: _File | _Folder = self._root
        for part in [part for part in path.split("/") if part]:
            if not isinstance(here, _Folder):
                raise _error(errno.ENOTDIR, path)
            if part not in here.names:
                raise _error(errno.ENOENT, path)
            here = here.names[part]
        return here

    def _folder(self, path: str) -> _Folder:
        found = self._find(path)
        if not isinstance(found, _Folder):
            raise _error(errno.ENOTDIR, path)
        return found

    def _place(self, path: str) -> tuple[_Folder, str]:
        return self._folder(os.path.dirname(path)), os.path.basename(path)

    # ----- changes -----

    def make_folder(self, path: str) -> None:
        """See `Posix`."""
        folder, name = self._place(path)
        if name in folder.names:
            raise _error(errno.EEXIST, path)
        made = _Folder()
        folder.change(lambda names: names.__setitem__(name, made))

    def create(self, path: str, *, direct: bool) -> int:
        """See `Posix`."""
        folder, name = self._place(path)
        if name in folder.names:
            raise _error(errno.EEXIST, path)
        made = _File(mtime_s=self._wall_clock())
        folder.change(lambda names: names.__setitem__(name, made))
        fd = max(self._open, default=99) + 1
        self._open[fd] = made
        return fd

    def reserve(self, fd: int, length: int) -> None:
        """See `Posix`: the length is there, and nothing but zeros in it."""
        file = self._open[fd]
        file.data.extend(bytes(max(0, length - len(file.data))))

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """See `Posix`."""
        file = self._open[fd]
        file.data.extend(bytes(max(0, offset + len(data) - len(file.data))))
        file.data[offset : offset + len(data)] = data
        return len(data)

    def sync(self, fd: int) -> None:
        """See `Posix`."""
        self._open[fd].durable = bytes(self._open[fd].data)

    def close(self, fd: int) -> None:
        """See `Posix`."""
        self._open.pop(fd, None)

    def link(self, source: str, target: str) -> None:
        """See `Posix`."""
        file = self._find(source)
        folder, name = self._place(target)
        if name in folder.names:
            raise _error(errno.EEXIST, target)
        assert isinstance(file, _File)
        file.links += 1
        folder.change(lambda names: names.__setitem__(name, file))

    def rename_if_absent(self, source: str, target: str) -> None:
        """See `Posix`."""
        folder, name = self._place(target)
        if name in folder.names:
            raise _error(errno.EEXIST, target)
        self.replace(source, target)

    def replace(self, source: str, target: str) -> None:
        """See `Posix`. Within one folder, as the durable write needs it."""
        file = self._find(source)
        folder, name = self._place(target)
        assert folder is self._folder(os.path.dirname(source))
        old = os.path.basename(source)

        def apply(names: _Names) -> None:
            names.pop(old, None)
            names[name] = file

        folder.change(apply)

    def unlink(self, path: str) -> None:
        """See `Posix`."""
        file = self._find(path)
        folder, name = self._place(path)
        if isinstance(file, _Folder):
            raise _error(errno.EISDIR, path)
        file.links -= 1
        folder.change(lambda names: names.pop(name, None))

    def remove_folder(self, path: str) -> None:
        """See `Posix`."""
        if self._folder(path).names:
            raise _error(errno.ENOTEMPTY, path)
        folder, name = self._place(path)
        folder.change(lambda names: names.pop(name, None))

    def sync_folder(self, path: str) -> None:
        """See `Posix`."""
        self._folder(path).sync()

    # ----- looks -----

    def leave_direct(self, fd: int) -> None:
        """Nothing to leave."""

    def is_direct(self, fd: int) -> bool:
        """There is no cache."""
        return True

    def leave_cache(self, fd: int, begin: int, length: int) -> None:
        """There is no cache."""

    def length(self, fd: int) -> int:
        """See `Posix`."""
        return len(self._open[fd].data)

    def links(self, path: str) -> int:
        """See `Posix`."""
        found = self._find(path)
        return found.links if isinstance(found, _File) else 1

    def facts(self, path: str) -> FileFacts:
        """See `Posix`."""
        return _facts(os.path.basename(path), self._find(path))

    def read(self, path: str, buffer: memoryview, offset: int) -> int:
        """See `Posix`."""
        found = self._find(path)
        if isinstance(found, _Folder):
            raise _error(errno.EISDIR, path)
        part = bytes(found.data[offset : offset + len(buffer)])
        buffer[: len(part)] = part
        return len(part)

    def scan(self, path: str) -> Iterator[FileFacts]:
        """See `Posix`."""
        for name, child in tuple(self._folder(path).names.items()):
            yield _facts(name, child)

    def free_bytes(self, path: str) -> int:
        """Plenty."""
        return 1 << 40


def _lost_bytes(file: _File, what: PowerLoss, rng: random.Random) -> bytes:
    if what is PowerLoss.ALL:
        return bytes(file.data)
    choices = [file.durable, bytes(file.data[: rng.randint(0, len(file.data))]), bytes(len(file.data))]
    return choices[0] if what is PowerLoss.NONE else rng.choice(choices)


def _facts(name: str, found: _File | _Folder) -> FileFacts:
    if isinstance(found, _Folder):
        return FileFacts(name=name, is_folder=True, bytes=0, mtime_s=0.0)
    return FileFacts(
        name=name, is_folder=False, bytes=len(found.data), mtime_s=found.mtime_s, links=found.links
    )


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
