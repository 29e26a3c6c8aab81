"""The few requests that a checkpoint store needs, for each kind of fsspec file system.

`Remote` is what `easyckpt.storage.fsspec` builds on. Each request is bounded in time and repeated by
`Patience` only, which raises `RemoteTrouble`; the client libraries' own retries are switched off where
they can be.

`BlobRemote` does with what every fsspec file system has. What S3 needs beyond stands in
`easyckpt.storage.s3`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

import fsspec

from easyckpt.storage.base import Parts, check_parts
from easyckpt.storage.patience import Patience
from easyckpt.storage.trouble import RemoteTrouble, Trouble

__all__ = ["BlobRemote", "GcsRemote", "MemoryRemote", "RawEntry", "Remote", "lanes_of", "seconds_of"]

LANES = 4
"""Event loops, each in a thread of its own: one loop would sign, hash and encrypt all bytes on one
processor."""

COMPARE_BYTES = 8 << 20

REQUEST_BYTES = 16 << 20
"""For which `RetryLimits.request_s` is meant; what is longer has as much more time."""

_CLIENT_VARIABLES = ("AWS_", "FSSPEC_", "GOOGLE_", "GCSFS_", "AZURE_", "STORAGE_EMULATOR_HOST")

_MEMORY_LOCK = threading.Lock()
"""fsspec's memory file system looks first and creates then; within the one process that it lives in, a lock
makes that one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RawEntry:
    """An object as the store lists it."""

    name: str
    """In full, as the store spells it."""
    bytes: int
    mtime_s: float


class Remote(Protocol):
    """One file system. Any thread may call. Names are full, without the protocol."""

    conditional: bool | None
    """Whether creating only what is absent is one step there; None is found out by trying."""
    survives: bool
    """Whether objects outlive this process."""

    def put(self, name: str, data: memoryview, *, create: bool, parts: Parts | None = None) -> None:
        """One object, in one request or so that it appears at once. ``create`` raises a conflict if it is
        there."""
        ...

    def get(self, name: str, begin: int, end: int) -> bytes:
        """A range; shorter where the object ends, empty beyond it."""
        ...

    def info(self, name: str) -> RawEntry | None:
        """One object, or None."""
        ...

    def find(self, prefix: str) -> list[RawEntry]:
        """Every object whose name begins so."""
        ...

    def delete(self, name: str) -> None:
        """Remove it; nothing happens if it is not there."""
        ...

    def uploads(self, prefix: str) -> list[RawEntry]:
        """Writes that were cut off and are not objects; their names may be given to `end_upload`."""
        ...

    def end_upload(self, name: str) -> None:
        """Free what a write that was cut off has left."""
        ...


class _Lanes:
    """Several copies of one file system, each with an event loop in its own thread."""

    def __init__(self, make: Callable[[Any], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[Any] = []
        self._pid = 0
        self._turn = 0

    def pick(self) -> Any:
        """One of them, in turn. After a fork the child makes its own."""
        with self._lock:
            if self._pid != os.getpid():
                self._made, self._pid = [], os.getpid()
            self._turn += 1
            if len(self._made) < LANES:
                self._made.append(self._make(_loop(len(self._made))))
                return self._made[-1]
            return self._made[self._turn % LANES]


_loops: dict[tuple[int, int], Any] = {}
_loops_lock = threading.Lock()


def _loop(lane: int) -> Any:
    """The event loop of a lane: one for all file systems of this process, ended with it."""
    import asyncio  # only file systems that talk over a network come here

    with _loops_lock:
        key = (os.getpid(), lane)
        if key not in _loops:
            loop = asyncio.new_event_loop()
            threading.Thread(target=loop.run_forever, name=f"store-{lane}", daemon=True).start()
            _loops[key] = loop
        return _loops[key]


_lanes: dict[tuple[object, ...], _Lanes] = {}
_lanes_lock = threading.Lock()


def lanes_of(protocol: str, options: Mapping[str, Any]) -> Callable[[], Any]:
    """A function that gives a file system to make one request with.

    Making one costs a good part of a second, so they are shared by all stores of a kind in this process,
    as long as what the client libraries read from the environment is the same.
    """

    def make(loop: Any) -> Any:
        return fsspec.filesystem(
            protocol, loop=loop, skip_instance_cache=True, use_listings_cache=False, **options
        )

    told = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_CLIENT_VARIABLES)))
    with _lanes_lock:
        return _lanes.setdefault((protocol, told), _Lanes(make)).pick


def seconds_of(time: Any) -> float:
    """A store's time of change, in seconds since 1970; 0 if it gives none."""
    if isinstance(time, datetime):
        return time.timestamp()
    return float(time) if isinstance(time, (int, float)) else 0.0


class BlobRemote:
    """Any asynchronous fsspec file system whose ``pipe_file`` puts an object at once and knows
    ``mode="create"`` (gcsfs: generation match; adlfs: no overwriting)."""

    conditional: bool | None = None
    survives = True

    def __init__(self, pick: Callable[[], Any], patience: Patience) -> None:
        self._pick = pick
        self._patience = patience

    def put(self, name: str, data: memoryview, *, create: bool, parts: Parts | None = None) -> None:
        """See `Remote`."""
        value = bytes(data)
        check_parts(memoryview(value), parts)
        mode = "create" if create else "overwrite"
        timeout_s = self._patience.limits.request_s * max(1.0, len(value) / REQUEST_BYTES)

        def request() -> bool:
            options = self._put_options(len(value), create=create)
            self._pick().pipe_file(name, value, mode=mode, timeout=timeout_s, **options)
            return True

        self._patience.run(request, done=self.is_ours(name, data) if create else None)

    def _put_options(self, length: int, *, create: bool) -> dict[str, Any]:
        """What the file system is to be told beyond."""
        return {}

    def is_ours(self, name: str, data: memoryview) -> Callable[[Trouble], bool | None]:
        """Tells, of a refusal, whether the object that is in the way holds what we wrote.

        Then the answer to an earlier attempt was lost. That attempt need not be ours: aiohttp repeats a
        PUT by itself when a connection that was kept open turns out to be dead.
        """

        def done(kind: Trouble) -> bool | None:
            if kind not in (Trouble.CONFLICT, Trouble.MISSING):
                return None
            found = self.info(name)
            if found is None or found.bytes != len(data):
                return None
            for at in range(0, len(data), COMPARE_BYTES):
                part = data[at : at + COMPARE_BYTES]
                if self.get(name, at, at + len(part)) != part:
                    return None
            return True

        return done

    def get(self, name: str, begin: int, end: int) -> bytes:
        """See `Remote`."""
        refused: RemoteTrouble | None = None
        if end > begin:
            try:
                return self._patience.run(lambda: self._range(name, begin, end))
            except RemoteTrouble as trouble:
                if trouble.kind is not Trouble.REFUSED:
                    raise
                refused = trouble  # stores refuse a range that begins beyond the end
        found = self.info(name)
        if found is None:
            raise RemoteTrouble(FileNotFoundError(name))
        if refused is not None and found.bytes > begin:
            raise refused
        return b""

    def _range(self, name: str, begin: int, end: int) -> bytes:
        return bytes(
            self._pick().cat_file(name, start=begin, end=end, timeout=self._patience.limits.request_s)
        )

    def info(self, name: str) -> RawEntry | None:
        """See `Remote`."""
        try:
            found = self._patience.run(
                lambda: self._pick().info(name, timeout=self._patience.limits.request_s)
            )
        except RemoteTrouble as trouble:
            if trouble.kind is Trouble.MISSING:
                return None
            raise
        return _entry(found) if found["type"] == "file" else None

    def find(self, prefix: str) -> list[RawEntry]:
        """See `Remote`."""
        folder = prefix.rpartition("/")[0]
        try:
            found = self._patience.run(
                lambda: self._pick().find(folder, detail=True, timeout=self._patience.limits.request_s)
            )
        except RemoteTrouble as trouble:
            if trouble.kind is Trouble.MISSING:
                return []
            raise
        entries = (_entry(item) for item in found.values() if item["type"] == "file")
        # A file with the folder's name is found too, and is not in it.
        return [entry for entry in entries if entry.name.startswith(prefix)]

    def delete(self, name: str) -> None:
        """See `Remote`."""
        try:
            self._patience.run(lambda: self._pick().rm_file(name, timeout=self._patience.limits.request_s))
        except RemoteTrouble as trouble:
            if trouble.kind is not Trouble.MISSING:
                raise

    def uploads(self, prefix: str) -> list[RawEntry]:
        """None that could be seen."""
        return []

    def end_upload(self, name: str) -> None:
        """Nothing."""


_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
"""Under what names file systems give the time of an object's change; the first that is there counts."""


def _entry(found: Mapping[str, Any]) -> RawEntry:
    time = next(
        (
            found[key]
            for key in ("LastModified", "mtime", "updated", "last_modified", "created")
            if key in found
        ),
        0.0,
    )
    if isinstance(time, str):
        time = datetime.fromisoformat(time.replace("Z", "+00:00"))
    return RawEntry(name=found["name"], bytes=int(found["size"]), mtime_s=seconds_of(time))


class GcsRemote(BlobRemote):
    """Google's store through gcsfs.

    gcsfs sends what is 50 MiB or longer in pieces and names the condition in the first request. Not every
    server of the protocol asks it again of the last, which makes the object visible. So what is to be created
    only once goes in one request; such objects are indexes, and short.
    """

    def _put_options(self, length: int, *, create: bool) -> dict[str, Any]:
        return {"chunksize": length + 1} if create else {}


class MemoryRemote(BlobRemote):
    """fsspec's own ``memory://``: one per process."""

    conditional: bool | None = True
    survives = False

    def __init__(self, patience: Patience) -> None:
        memory = _NoTimeouts(fsspec.filesystem("memory"))
        super().__init__(lambda: memory, patience)

    def put(self, name: str, data: memoryview, *, create: bool, parts: Parts | None = None) -> None:
        """See `Remote`."""
        with _MEMORY_LOCK:
            super().put(name, data, create=create, parts=parts)


class _NoTimeouts:
    """A file system of this process, which waits for nobody and takes no time-outs."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._fs, name)

        def call(*arguments: Any, timeout: float, **options: Any) -> Any:
            return method(*arguments, **options)

        return call
