"""Where checkpoints are kept: one interface, a few implementations, one conformance suite.

`open_storage` makes one from what a user writes: a folder, ``file://…``, ``memory://…``, or the URL of an
object store (``s3://…``).
"""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from easyckpt.errors import Misuse
from easyckpt.storage.base import BytesSource, Entry, Parts, Storage, StorageProperties
from easyckpt.storage.local import LocalStorage
from easyckpt.storage.memory import MemoryStorage

__all__ = [
    "BytesSource",
    "Entry",
    "LocalStorage",
    "MemoryStorage",
    "Parts",
    "Storage",
    "StorageProperties",
    "open_storage",
]


def open_storage(root: str | os.PathLike[str]) -> Storage:
    """The store that a folder or a URL names. Nothing is created or contacted yet.

    Args:
        root: a folder, ``file:///…``, ``memory://…`` (fsspec's, one per process), or the URL of an object
            store.

    Raises:
        Misuse: empty, or a kind of store that is not supported.
    """
    text = os.fspath(root)
    if not text or "\0" in text:
        raise Misuse("this names no checkpoint folder", where=ascii(text))
    if "://" not in text:
        return LocalStorage(os.path.expanduser(text))
    if text.startswith("file://"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise Misuse("a file URL has three slashes and an absolute path", where=text)
        return LocalStorage(unquote(parts.path))
    from easyckpt.storage.fsspec import FsspecStorage  # imports fsspec, which most checkpoints never need

    return FsspecStorage(text)
