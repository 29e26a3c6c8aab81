"""What a checkpoint store must do, as one small interface.

A store holds *objects*: a path and its bytes. Nothing else is asked of it, so that a folder, the memory of a
process and an object store can each be one. The rules that every implementation keeps, and that the
conformance suite in `easyckpt.testing` checks:

* an object appears whole or not at all: a reader sees the old bytes or the new ones, never a part;
* when `Storage.write_durable` has returned, the object survives what `StorageProperties` says it survives;
* ``if_absent`` creates or raises `StorageConflict`; of several writers exactly one creates (a store that
  cannot promise that says so in its properties and refuses);
* `Storage.delete` of what is not there is fine; `Storage.list` of a folder that is not there is empty;
* every refusal is an error of the tree in `easyckpt.errors` that names the path in full.

Paths are relative, written with ``/``, and plain: see `check_path`. Names that begin with a dot belong to the
implementation (unfinished writes) and are never listed as objects.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from easyckpt.errors import (
    Misuse,
    StorageConflict,
    StorageDenied,
    StorageError,
    StorageFull,
    StorageMissing,
    StorageUnavailable,
)

__all__ = [
    "PART_BYTES",
    "BytesSource",
    "Entry",
    "Parts",
    "Storage",
    "StorageProperties",
    "as_bytes_view",
    "check_parts",
    "check_path",
    "storage_error",
]

BytesSource = bytes | bytearray | memoryview
"""What can be written: contiguous bytes that do not change until the write has returned."""

PART_BYTES = 64 << 20
"""A long object is written and read in parts of this length, several at once."""

PATH_BYTES_MAX = 1024
SEGMENT_BYTES_MAX = 200

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageProperties:
    """What a store promises. Code that needs a property asks for it here and never guesses by name."""

    name: str
    """Kind of store, for messages: ``local``, ``memory``, ``fsspec+memory``."""
    conditional_create: bool
    """Of several writers with ``if_absent`` exactly one creates, also from different machines."""
    atomic_replace: bool
    """Replacing an object never shows a part of either version."""
    survives_process: bool
    """A written object is there for another process, and after ours was killed."""
    survives_power_loss: bool
    """A written object is there after the machine lost power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One object as a listing shows it."""

    path: str
    bytes: int
    mtime_s: float
    """Wall time of the last write, in seconds since 1970, by the store's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """How the writer of an object proves it on the way.

    The store hands each part to `check` just before that part's bytes leave, so that what is published is
    what was proved. Parts lie one after the other, the last one may be shorter, each is checked exactly once.
    """

    bytes: int
    """Length of a part: a multiple of 4096."""
    check: Callable[[int, memoryview], None]
    """Told the first byte of a part, and the part; called from several threads at once. What it raises, the
    write raises, and nothing is published."""


class Storage(Protocol):
    """A checkpoint store. Any thread may call; several processes may use the same place at once."""

    @property
    def properties(self) -> StorageProperties:
        """What this store promises."""
        ...

    def where(self, path: str = "") -> str:
        """The path as a person would write it, for messages."""
        ...

    def write_durable(
        self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
    ) -> None:
        """Make the object whole and lasting, or raise and leave what was there.

        Args:
            path: name of the object.
            data: its bytes; they must not change meanwhile.
            if_absent: create only; never replace.
            parts: how the bytes are proved while they are written.

        Raises:
            StorageConflict: ``if_absent``, and the object is there already.
            StorageFull: no space or quota.
            StorageDenied: no permission, or read-only.
            StorageUnavailable: anything else that the store answers.
        """
        ...

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes ``begin`` to ``end`` of the object; fewer where it ends earlier.

        Raises:
            StorageMissing: no such object.
        """
        ...

    def read_into(self, path: str, buffer: memoryview, begin: int = 0) -> int:
        """Fill the buffer from byte ``begin`` on. Returns how many bytes there were, at most its length.

        Raises:
            StorageMissing: no such object.
        """
        ...

    def stat(self, path: str) -> Entry | None:
        """Length and time of the object, or None if there is none."""
        ...

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """All objects below a folder (``"data/"``; ``""`` is everything), at any depth, sorted by path."""
        ...

    def unfinished(self, prefix: str = "") -> tuple[Entry, ...]:
        """Remains of writes that were cut off. Their paths may be given to `delete`."""
        ...

    def delete(self, path: str) -> None:
        """Remove the object, lastingly. Nothing happens if it is not there."""
        ...

    def exists(self, path: str) -> bool:
        """Whether the object is there."""
        ...

    def free_bytes(self) -> int | None:
        """Space left for us, or None where the store knows no such number."""
        ...


def check_path(path: str, *, folder: bool = False, hidden: bool = False) -> str:
    """The path if it is plain, else an error: no way out of the root, no surprise for any file system.

    Args:
        path: relative, ``/`` between segments of letters, digits, ``_``, ``-`` and dots.
        folder: a listing prefix: empty, or with a ``/`` at its end.
        hidden: the last segment may begin with a dot (an unfinished write).

    Raises:
        Misuse: it is not plain.
    """
    if folder:
        if path == "":
            return path
        if not path.endswith("/"):
            raise Misuse("a folder to list ends with a slash", where=_shown(path))
    segments = (path[:-1] if folder else path).split("/")
    if hidden and segments[-1].startswith("."):
        segments[-1] = segments[-1][1:]
    too_long = len(path) > PATH_BYTES_MAX or any(len(segment) > SEGMENT_BYTES_MAX for segment in segments)
    if too_long or not all(_SEGMENT.match(segment) for segment in segments):
        raise Misuse(
            "this is no path inside a checkpoint",
            where=_shown(path),
            hint="relative, with letters, digits, '_', '-' and '.' between slashes",
        )
    return path


def _shown(path: str) -> str:
    return ascii(path[:120] + "…" if len(path) > 120 else path)


def as_bytes_view(data: BytesSource) -> memoryview:
    """The data as a flat view of bytes, without a copy.

    Raises:
        Misuse: it is not contiguous.
    """
    view = memoryview(data)
    if not view.c_contiguous:
        raise Misuse("only contiguous bytes can be written", hint="pass a contiguous buffer")
    # cast() refuses an empty view with strides other than 1.
    return view.cast("B") if view.nbytes else memoryview(b"")


def check_parts(view: memoryview, parts: Parts | None) -> None:
    """Have all parts checked, one after the other: for a store that takes an object as a whole."""
    if parts is not None:
        for begin in range(0, len(view), parts.bytes):
            parts.check(begin, view[begin : begin + parts.bytes])


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})

_HINTS = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints: `easyckpt prune`",
    errno.EDQUOT: "the quota is used up: raise it, or keep fewer checkpoints: `easyckpt prune`",
    errno.EFBIG: "the file system or `ulimit -f` allows no file of this size",
    errno.EROFS: "the file system is read-only: remount it, or look into the kernel's log for the reason",
    errno.EACCES: "this user may not: look at owner and mode with `ls -ld`",
    errno.EPERM: "this user may not: look at owner, mode and attributes with `ls -ld` and `lsattr -d`",
}


def storage_error(
    error: OSError, *, doing: str, where: str, free_bytes: Callable[[], int | None] | None = None
) -> StorageError:
    """The error of our tree for what the system said.

    Args:
        error: the system's word.
        doing: what we were at: ``write``, ``read``, ``list``, ``delete``.
        where: the path in full.
        free_bytes: asked only when space is the trouble, to name the number.
    """
    number = error.errno if error.errno is not None else 0
    said = error.strerror or str(error)
    what = f"cannot {doing}: {said}"
    if number in _FULL:
        free = free_bytes() if free_bytes is not None and number == errno.ENOSPC else None
        left = f", {free} bytes are free" if free is not None else ""
        return StorageFull(what + left, where=where, hint=_HINTS[number])
    if number in _DENIED:
        return StorageDenied(what, where=where, hint=_HINTS[number])
    if number == errno.EEXIST:
        return StorageConflict("it is there already, and is not replaced", where=where)
    if number in _MISSING and doing != "write":
        return StorageMissing("it is not there", where=where, hint="`easyckpt ls` shows what is")
    return StorageUnavailable(what, where=where, hint="it may pass: try again, and look at the mount")
