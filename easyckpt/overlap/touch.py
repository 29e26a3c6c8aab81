"""Making the pages of a slot present before they are written.

The first write to each page of a new mapping costs a fault: half a second for each GB, five times the copy
itself. ``MADV_POPULATE_WRITE`` (Linux 5.14) has the kernel do it in one call for many pages, at a fifth of
that. It runs outside of Python's lock. On kernels without it nothing is done here, and the copy pays.
"""

from __future__ import annotations

import ctypes
import mmap
import threading

__all__ = ["BLOCK_BYTES", "PageTable"]

BLOCK_BYTES = 16 << 20
"""Populated at a time: some milliseconds, so that page faults of training wait no longer."""

_MADV_POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PageTable:
    """Which blocks of a mapping are present. Any thread. Keeps the mapping alive."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._length = len(mapping)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._missing = set(range(-(-self._length // BLOCK_BYTES)))
        self._lock = threading.Lock()

    @property
    def missing(self) -> int:
        """Blocks that were not populated yet."""
        return len(self._missing)

    def touch(self, begin: int, end: int) -> None:
        """Make the blocks that hold these bytes present."""
        if not self._missing:
            return
        for block in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            with self._lock:
                if block not in self._missing:
                    continue
                self._missing.discard(block)
            start = block * BLOCK_BYTES
            length = min(BLOCK_BYTES, self._length - start)
            if _madvise(self._address + start, length, _MADV_POPULATE_WRITE) != 0:
                with self._lock:
                    self._missing.clear()  # an older kernel, or no memory: the writes will tell

    def touch_one(self) -> bool:
        """Make one more block present; whether any is left."""
        block = next(iter(self._missing), None)
        if block is None:
            return False
        self.touch(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._length))
        return bool(self._missing)
