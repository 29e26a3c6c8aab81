"""The place where checkpoints go, used as a checkpoint would use it: ``store.ckpt_path``.

A folder of our own name is made in the nearest folder that exists (the checkpoint folder itself is not made:
it would stay behind, or be taken away under somebody who just made it), one file is written, synced,
renamed, listed, read back past the page cache and compared, and all of it removed. SIGTERM, which the engine
sends before it kills, removes it too.
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts.request import Request

__all__ = ["StoreFacts", "classify_error", "collect", "without_secrets"]

PROBE_PREFIX = ".sanitycheck-"
BLOCK_BYTES = 1 << 20
INSTANT_BYTES = 256 << 10
THOROUGH_BYTES = 64 << 20
SYNC_BYTES = 4 << 20
WRITE_S_MAX = 5.0
FREE_SHARE_USED_MAX = 8
"""The probe writes at most 1/8 of the free room."""
ERROR_CHARS_MAX = 300

_ANY_URL = re.compile(r"\w+://[^\s'\"]+")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_TROUBLE = (OSError, ImportError, ValueError, RuntimeError)
"""What fsspec's backends turn their trouble into. Anything else ends the probe and is shown as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What happened to the probe's file.

    Attributes:
        url: The path or URL without credentials.
        tried_at: The existing folder in which it was tried.
        problem: Empty, or one of ``read_only``, ``no_space``, ``not_permitted``, ``not_a_folder``,
            ``backend_missing``, ``unreachable``, ``differs``, ``not_listed``.
        during: What was being done when it went wrong.
        left_behind: Path that could not be removed.
        free_bytes: None where the store does not say.
    """

    url: str = "/checkpoints"
    tried_at: str = "/checkpoints"
    local: bool = True
    problem: str = ""
    during: str = ""
    error: str = ""
    payload_bytes: int = THOROUGH_BYTES
    write_s: float = 0.1
    read_s: float = 0.1
    free_bytes: int | None = 1 << 40
    left_behind: str = ""


def without_secrets(url: str) -> str:
    """A URL without user, password and query, any of which may hold a credential."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url
    rest = rest.split("?", 1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def classify_error(error: BaseException) -> str:
    """The kind of problem that an exception of a file system or of an fsspec backend tells of."""
    number = error.errno if isinstance(error, OSError) else None
    if number in _NO_SPACE:
        return "no_space"
    if number == errno.EROFS:
        return "read_only"
    if number in (errno.ENOTDIR, errno.EEXIST) or isinstance(error, NotADirectoryError):
        return "not_a_folder"
    if isinstance(error, PermissionError) or number in (errno.EACCES, errno.EPERM):
        return "not_permitted"
    if isinstance(error, ImportError) or (isinstance(error, ValueError) and "rotocol" in str(error)):
        return "backend_missing"
    return "unreachable"


def _blocks(total: int, seed: bytes) -> Iterator[bytes]:
    """Reproducible bytes that do not compress across blocks."""
    for index, begin in enumerate(range(0, total, BLOCK_BYTES)):
        head = index.to_bytes(8, "big")
        yield (head + seed)[: min(BLOCK_BYTES, total - begin)]


def _write(fs: Any, path: str, total: int, seed: bytes) -> tuple[int, float]:
    """Write up to ``total`` bytes; (bytes, seconds).

    A slow store gets fewer bytes instead of a longer time, so that only one that stands still runs into the
    deadline. For that the bytes must leave the page cache as they are written.
    """
    begin = time.perf_counter()
    written = 0
    with fs.open(path, "wb") as file:
        for block in _blocks(total, seed):
            file.write(block)
            written += len(block)
            if written % SYNC_BYTES == 0 or written == total:
                file.flush()
                if _is_local(fs):
                    os.fsync(file.fileno())
                if time.perf_counter() - begin > WRITE_S_MAX:
                    break
    return written, time.perf_counter() - begin


def _read_equals(fs: Any, path: str, total: int, seed: bytes) -> tuple[bool, float]:
    begin = time.perf_counter()
    equal = True
    with fs.open(path, "rb") as file:
        if _is_local(fs):
            # Else the page cache would answer, and nothing is learned of the device.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for block in _blocks(total, seed):
            equal = equal and file.read(len(block)) == block
        equal = equal and file.read(1) == b""
    return equal, time.perf_counter() - begin


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def _existing(fs: Any, path: str) -> str:
    """The path, or the nearest folder above it that exists; an object store's bucket counts as existing."""
    place = path.rstrip("/") or "/"
    while place not in ("", "/") and not fs.exists(place):
        above = posixpath.dirname(place)
        if above == place or not above:
            return place
        place = above
    return place or "/"


def _free_bytes(place: str) -> int:
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize


def collect(request: Request) -> StoreFacts:
    """Write, sync, rename, list, read back, compare, remove."""
    url = request.options.ckpt_path
    if url is None:
        raise NotApplicableError("no checkpoint path was given")
    trail = ["opening the store"]

    def tell(phrase: str) -> None:
        trail.append(phrase)
        request.tell(phrase)

    request.tell(trail[0])
    shown = without_secrets(url)
    facts = StoreFacts(url=shown, tried_at="", payload_bytes=0, write_s=0.0, read_s=0.0, free_bytes=None)
    try:
        import fsspec

        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        tell("looking for the folder")
        local = _is_local(fs)
        place = _existing(fs, os.path.abspath(path) if local else path)
        facts = replace(facts, tried_at=place, local=local)
        if local and not os.path.isdir(place):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", place)
        if local:
            facts = replace(facts, free_bytes=_free_bytes(place))
        return _exercise(fs, facts, thorough=request.thorough, tell=tell)
    except _TROUBLE as error:
        return _with_problem(facts, error, during=trail[-1])


def _with_problem(facts: StoreFacts, error: BaseException, *, during: str) -> StoreFacts:
    text = _ANY_URL.sub(lambda match: without_secrets(match.group()), f"{type(error).__name__}: {error}")
    text = text[:ERROR_CHARS_MAX]
    return replace(facts, problem=classify_error(error), during=during, error=text)


def _exercise(fs: Any, base: StoreFacts, *, thorough: bool, tell: Callable[[str], None]) -> StoreFacts:
    """Use the store from a folder of our own, which goes whatever happens, SIGTERM's SystemExit included."""
    folder = posixpath.join(base.tried_at, f"{PROBE_PREFIX}{secrets.token_hex(8)}")
    phases = [""]

    def telling(phrase: str) -> None:
        phases.append(phrase)
        tell(phrase)

    left = ""
    try:
        facts = _steps(fs, folder, base=base, thorough=thorough, tell=telling)
    except _TROUBLE as error:
        facts = _with_problem(base, error, during=phases[-1])
    finally:
        tell("removing")
        left = _remove(fs, folder)
    return replace(facts, left_behind=left)


def _steps(
    fs: Any, folder: str, *, base: StoreFacts, thorough: bool, tell: Callable[[str], None]
) -> StoreFacts:
    total = THOROUGH_BYTES if thorough else INSTANT_BYTES
    if base.free_bytes is not None:
        total = max(1, min(total, base.free_bytes // FREE_SHARE_USED_MAX))
    first, second = posixpath.join(folder, "written"), posixpath.join(folder, "renamed")
    seed = secrets.token_bytes(BLOCK_BYTES)
    tell("making a folder")
    fs.makedirs(folder, exist_ok=False)
    tell("writing")
    total, write_s = _write(fs, first, total, seed)
    facts = replace(base, payload_bytes=total, write_s=write_s)
    tell("renaming")
    fs.mv(first, second)
    tell("listing")
    names = [posixpath.basename(str(name).rstrip("/")) for name in fs.ls(folder, detail=False)]
    if names != ["renamed"]:
        return replace(facts, problem="not_listed", during="listing", error=f"found {names[:4]}")
    tell("reading back")
    equal, read_s = _read_equals(fs, second, total, seed)
    facts = replace(facts, read_s=read_s)
    return facts if equal else replace(facts, problem="differs", during="reading back")


def _remove(fs: Any, folder: str) -> str:
    """Take the probe's folder away; the path when that does not work."""
    try:
        if fs.exists(folder):
            fs.rm(folder, recursive=True)
    except _TROUBLE:
        return folder
    return ""
