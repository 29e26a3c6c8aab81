"""Memory slots: anonymous memory files that the saver owns and workers map.

A slot is a ``memfd``: it has no name anywhere, is not limited by the size of ``/dev/shm``, and is gone when
the last process that holds it is gone, so that nothing can leak. It is reserved in full before anybody else
sees it, so that a lack of memory is an error here and not a bus error in the middle of a copy: when it is
made, or, where its first content is read from a file, part by part just ahead of the reading.

The descriptor travels to the worker over the Unix socket. Both sides map it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
from pathlib import Path

from easyckpt.errors import MemoryFull

__all__ = ["HEADROOM_BYTES", "Slot", "available_bytes", "map_private", "map_shared"]

HEADROOM_BYTES = 256 << 20
"""Memory that slots leave to everyone else: a full machine kills training, which is worse than a missed
save."""

_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW
_F_ADD_SEALS = 1033
_MADV_POPULATE_READ = 22  # Linux 5.14
_numbers = itertools.count(1)

_CGROUP_PAIRS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_bytes() -> int:
    """Memory that can be had without swapping or being killed: the machine's, or the container's if less."""
    found = [_machine_available()]
    for limit, used in _CGROUP_PAIRS:
        try:
            found.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return max(0, min(found))


def _machine_available() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE


class Slot:
    """One memory file, mapped. Used by one thread at a time; `view` may be read by others.

    Args:
        capacity: bytes; rounded up to whole pages.
        headroom: bytes that must stay available on the machine.
        in_parts: reserve nothing yet; whoever writes to it calls `reserve` before, and `finish` at the end.

    Raises:
        MemoryFull: there is not that much memory.
    """

    def __init__(self, capacity: int, *, headroom: int = HEADROOM_BYTES, in_parts: bool = False) -> None:
        capacity = max(-(-capacity // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        available = available_bytes()
        if capacity + headroom > available:
            raise MemoryFull(
                f"a checkpoint slot of {capacity} bytes does not fit: {available} bytes are available, "
                f"of which {headroom} stay free",
                hint="free some memory, or use a machine with twice the size of the rank's state to spare",
            )
        self.number = next(_numbers)
        self.capacity = capacity
        self.whole = False
        """Whether all of it is reserved."""
        self.fd = os.memfd_create(f"easyckpt-slot-{self.number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, capacity)
            if not in_parts:
                self.finish(0)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)
            self._map = map_shared(self.fd, capacity)
        except (OSError, MemoryFull):
            os.close(self.fd)
            raise
        self.view = memoryview(self._map)

    def reserve(self, begin: int, end: int) -> None:
        """Have memory for these bytes. Any thread.

        Raises:
            MemoryFull: there is none.
        """
        if self.whole:
            return
        try:
            os.posix_fallocate(self.fd, begin, end - begin)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise MemoryFull(
                f"a checkpoint slot of {self.capacity} bytes cannot be reserved: {error.strerror}"
            ) from error

    def finish(self, begin: int) -> None:
        """Reserve the rest, from a byte on; what lies before it was reserved in parts.

        Raises:
            MemoryFull: there is no memory for it.
        """
        if begin < self.capacity:  # asking again for what is there costs more than the first time
            self.reserve(begin, self.capacity)
        self.whole = True

    def close(self) -> None:
        """Give the memory back, as soon as no worker maps it any more. May be called twice."""
        if self.fd < 0:
            return
        with contextlib.suppress(BufferError):  # a reader still has a view; the mapping goes with it
            self.view.release()
            self._map.close()
        os.close(self.fd)
        self.fd = -1


def map_shared(fd: int, size: int) -> mmap.mmap:
    """Map a slot for reading and writing."""
    return mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def map_private(fd: int, size: int) -> mmap.mmap:
    """Map a slot so that nothing that is written reaches the slot. Its pages are there to be read at once."""
    private = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with contextlib.suppress(OSError):  # an older kernel brings the pages in one by one
        private.madvise(_MADV_POPULATE_READ)
    return private
