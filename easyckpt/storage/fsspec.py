"""Checkpoints in object stores and other remote places, through fsspec.

An object appears there when its last request is answered, so a durable write is one put (in parts if it is
long), and nothing is renamed. What must be created only once needs one of

* a conditional request (``If-None-Match`` in S3, generation match in Google's store, no overwriting in
  Azure's): tried once per process on a name of its own, since some stores accept the condition and ignore it;
* else claims (`easyckpt.storage.claims`), which take some seconds per object.

An object that is there with the very bytes that were to be created counts as created: an answer got lost.

Ranges are read, and long objects written, by several requests at a time. Requests are bounded in time and
repeated within limits (`easyckpt.storage.patience`). Credentials come from where the client library looks for
them (environment, profile, instance role); one in the URL is refused, because URLs are logged.

``file://`` is not served here: `open_storage` turns it into `LocalStorage`, whose durable write fsspec
does not have.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from urllib.parse import urlsplit

from easyckpt.errors import EasyckptError, Misuse, StorageUnavailable
from easyckpt.storage.base import (
    BytesSource,
    Entry,
    Parts,
    StorageProperties,
    as_bytes_view,
    check_parts,
    check_path,
)
from easyckpt.storage.claims import CLAIM_PREFIX, Claimed, ClaimLimits, create_by_claim
from easyckpt.storage.patience import Patience
from easyckpt.storage.remote import BlobRemote, GcsRemote, MemoryRemote, RawEntry, Remote, lanes_of
from easyckpt.storage.trouble import RemoteTrouble, Trouble

__all__ = ["PROTOCOLS", "FsspecStorage"]

PROTOCOLS = {
    "memory": "memory", "s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs",
    "az": "az", "abfs": "az", "abfss": "az",
}  # fmt: skip
"""What a URL may begin with → the kind of store. Others may lose or tear objects in ways that nobody has
tried."""

READ_BYTES = 8 << 20
"""Of one ranged request, when more is wanted."""

REQUESTS = 8
"""At a time and process, for long objects."""

_LIBRARIES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}
_LOG = logging.getLogger("easyckpt.storage")


@functools.cache
def _pool() -> Executor:
    return ThreadPoolExecutor(REQUESTS, thread_name_prefix="requests")


class FsspecStorage:
    """A folder of a remote store as a checkpoint store. Any thread may call.

    Args:
        url: for example ``s3://bucket/run1``, ``memory://run1``.
        patience: how requests are repeated; the default suits training.
        claims: times for stores without conditional requests.

    Raises:
        Misuse: an unknown protocol, a missing client library, or credentials in the URL.
    """

    def __init__(
        self, url: str, *, patience: Patience | None = None, claims: ClaimLimits | None = None
    ) -> None:
        self._scheme, path = _parse(url)
        self._kind = PROTOCOLS[self._scheme]
        self._remote = _make_remote(self._kind, patience if patience is not None else Patience())
        self._claims = claims if claims is not None else ClaimLimits()
        self._root = f"/{path}" if self._kind == "memory" else path
        self._probe_lock = threading.Lock()

    @property
    def properties(self) -> StorageProperties:
        """What this kind of store promises."""
        return StorageProperties(
            name=f"fsspec+{self._kind}",
            conditional_create=True,
            atomic_replace=True,
            survives_process=self._remote.survives,
            survives_power_loss=self._remote.survives,
        )

    def where(self, path: str = "") -> str:
        """The object's URL."""
        return f"{self._scheme}://{self._full(path).lstrip('/')}"

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    @contextmanager
    def _told(self, doing: str, path: str) -> Iterator[None]:
        """Errors of client libraries as ours."""
        try:
            yield
        except RemoteTrouble as trouble:
            raise trouble.as_storage_error(doing=doing, where=self.where(path)) from trouble.__cause__

    # ----- writing -----

    def write_durable(
        self, path: str, data: BytesSource, *, if_absent: bool = False, parts: Parts | None = None
    ) -> None:
        """See `Storage.write_durable`."""
        full = self._full(check_path(path))
        view = as_bytes_view(data)
        with self._told("write", path):
            if not if_absent:
                self._remote.put(full, view, create=False, parts=parts)
            elif self._is_conditional():
                self._remote.put(full, view, create=True, parts=parts)
                self._check_length(path, full, len(view))
            else:
                check_parts(view, parts)
                store = _ClaimedObject(self._remote, full, view)
                create_by_claim(store, where=self.where(path), limits=self._claims)

    def _check_length(self, path: str, full: str, length: int) -> None:
        # What was replaced may have been replaced again meanwhile; what was created is sure to be ours.
        found = self._remote.info(full)
        if found is None or found.bytes != length:
            has = "does not show it" if found is None else f"has {found.bytes}"
            raise StorageUnavailable(
                f"wrote {length} bytes and the store {has}",
                where=self.where(path),
                hint="this store loses writes: do not keep checkpoints here",
            )

    def _is_conditional(self) -> bool:
        with self._probe_lock:
            if self._remote.conditional is None:
                self._remote.conditional = _heeds_conditions(
                    self._remote, self._full(f".probe-{secrets.token_hex(8)}")
                )
                if not self._remote.conditional:
                    _LOG.warning(
                        "%s ignores conditional requests: what must be created once is claimed first, which "
                        "takes %g s per index file", self.where(), self._claims.settle_s,
                    )  # fmt: skip
            return self._remote.conditional

    # ----- reading -----

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        """See `Storage.read`."""
        full = self._full(check_path(path))
        with self._told("read", path):
            if end is None or end - begin > READ_BYTES:
                found = self._remote.info(full)
                length = begin if found is None else found.bytes
                end = length if end is None else min(end, length)
            if end - begin <= READ_BYTES:
                return self._remote.get(full, begin, end)
        buffer = bytearray(end - begin)
        got = self.read_into(path, memoryview(buffer), begin)
        del buffer[got:]
        return bytes(buffer)

    def read_into(self, path: str, buffer: memoryview, begin: int = 0) -> int:
        """See `Storage.read_into`. Long ranges are read by several requests at a time."""
        full = self._full(check_path(path))
        view = buffer.cast("B") if buffer.nbytes else buffer
        starts = range(0, max(1, len(view)), READ_BYTES)

        def fetch(at: int) -> int:
            part = view[at : at + READ_BYTES]
            data = self._remote.get(full, begin + at, begin + at + len(part))
            part[: len(data)] = data
            return len(data)

        with self._told("read", path):
            counts = list(map(fetch, starts) if len(starts) == 1 else _pool().map(fetch, starts))
        total = 0
        for at, count in zip(starts, counts, strict=True):
            total += count
            if count < min(READ_BYTES, len(view) - at):
                break  # the object ends here
        return total

    def stat(self, path: str) -> Entry | None:
        """See `Storage.stat`."""
        full = self._full(check_path(path))
        with self._told("look at it", path):
            found = self._remote.info(full)
        return None if found is None else Entry(path=path, bytes=found.bytes, mtime_s=found.mtime_s)

    def exists(self, path: str) -> bool:
        """See `Storage.exists`."""
        return self.stat(path) is not None

    def list(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage.list`."""
        return self._entries(prefix, self._remote.find, hidden=False)

    def unfinished(self, prefix: str = "") -> tuple[Entry, ...]:
        """See `Storage.unfinished`: uploads that were cut off, and claims and probes whose writer died."""
        hidden = self._entries(prefix, self._remote.find, hidden=True)
        cut_off = self._entries(prefix, self._remote.uploads, hidden=True)
        return tuple(sorted((*hidden, *cut_off), key=lambda entry: entry.path))

    def _entries(
        self, prefix: str, find: Callable[[str], Sequence[RawEntry]], *, hidden: bool
    ) -> tuple[Entry, ...]:
        check_path(prefix, folder=True)
        with self._told("list", prefix.rstrip("/")):
            found = find(f"{self._root}/{prefix}")
        entries = []
        for item in found:
            path = item.name[len(self._root) + 1 :]
            if _is_plain(path, hidden=hidden):
                entries.append(Entry(path=path, bytes=item.bytes, mtime_s=item.mtime_s))
        return tuple(sorted(entries, key=lambda entry: entry.path))

    def delete(self, path: str) -> None:
        """See `Storage.delete`."""
        full = self._full(check_path(path, hidden=True))
        with self._told("delete", path):
            if path.rpartition("/")[2].startswith(".new-"):
                self._remote.end_upload(full)
            else:
                self._remote.delete(full)

    def free_bytes(self) -> int | None:
        """Unknown."""
        return None


class _ClaimedObject:
    """One object and its claims, for `create_by_claim`."""

    def __init__(self, remote: Remote, full: str, data: memoryview) -> None:
        self._remote = remote
        self._full = full
        self._data = data
        folder, slash, name = full.rpartition("/")
        self._prefix = f"{folder}{slash}{CLAIM_PREFIX}{name}-"

    def exists(self) -> bool:
        return self._remote.info(self._full) is not None

    def put_claim(self, token: str) -> None:
        self._remote.put(self._prefix + token, memoryview(token.encode()), create=False)

    def claims(self) -> tuple[Claimed, ...]:
        found = self._remote.find(self._prefix)
        return tuple(Claimed(token=entry.name[len(self._prefix) :], mtime_s=entry.mtime_s) for entry in found)

    def withdraw(self, token: str) -> None:
        try:
            self._remote.delete(self._prefix + token)
        except RemoteTrouble as trouble:  # it gets stale, and retention sweeps it
            _LOG.warning("a claim stays behind: %s%s: %s", self._prefix, token, trouble)

    def write(self) -> None:
        self._remote.put(self._full, self._data, create=False)


def _parse(url: str) -> tuple[str, str]:
    """Protocol, and what comes after it."""
    parts = urlsplit(url)
    if "@" in parts.netloc and parts.scheme not in ("az", "abfs", "abfss"):
        raise Misuse(
            "a URL of a checkpoint folder holds no user or password",
            where=f"{parts.scheme}://…",
            hint="give credentials by the environment or a profile: URLs are logged",
        )
    shown = f"{parts.scheme}://{parts.netloc}{parts.path}"
    if parts.scheme not in PROTOCOLS:
        raise Misuse(
            "checkpoints cannot be kept in this kind of store yet",
            where=shown,
            hint="use a folder, file://, s3://, gs:// or az://; a store that is mounted as a folder will do",
        )
    if parts.query or parts.fragment:
        raise Misuse("a URL of a checkpoint folder ends with its path", where=shown)
    path = f"{parts.netloc}{parts.path}".strip("/")
    if not path:
        raise Misuse("this names no bucket", where=shown, hint=f"{parts.scheme}://bucket/run1")
    return parts.scheme, path


def _make_remote(kind: str, patience: Patience) -> Remote:
    if kind == "memory":
        return MemoryRemote(patience)
    library = _LIBRARIES[kind]
    if importlib.util.find_spec(library) is None:
        raise Misuse(f"{kind}:// needs {library}, which is not installed", hint=f"pip install {library}")
    if kind == "s3":
        from easyckpt.storage.s3 import S3Remote  # most checkpoints never need it

        return S3Remote(patience, _pool)
    made = GcsRemote if kind == "gs" else BlobRemote
    return made(lanes_of(kind, {}), patience)


def _heeds_conditions(remote: Remote, name: str) -> bool:
    """Whether a second conditional create of one name is refused; the name has to be free."""
    try:
        remote.put(name, memoryview(b"1"), create=True)
        remote.put(name, memoryview(b"2"), create=True)
    except RemoteTrouble as trouble:
        if trouble.kind is Trouble.CONFLICT:
            return True
        if trouble.kind is Trouble.REFUSED:  # the condition itself is refused
            return False
        raise
    finally:
        with contextlib.suppress(RemoteTrouble):  # it stays a hidden name, and retention sweeps it
            remote.delete(name)
    return False


def _is_plain(path: str, *, hidden: bool) -> bool:
    """Names that are not ours to touch are not objects of the checkpoint; hidden ones are unfinished
    writes."""
    if path.rpartition("/")[2].startswith(".") != hidden:
        return False
    try:
        check_path(path, hidden=hidden)
    except EasyckptError:
        return False
    return True
