"""The outer form that every index file of a checkpoint has: JSON with a kind, a schema number and a checksum.

::

    {"kind": "easyckpt.manifest", "schema": 2, "checksum": "<32 hex digits>", …fields of this kind… }

The checksum is xxh3-128 of the file with the 32 digits replaced by zeros, so that a reader in any language
can check it without knowing how we order or space JSON. A flipped bit in a number that would still be valid
JSON is found this way.

Reading trusts nothing: length first, then kind and schema, then checksum, then the fields with their types
and ranges. Fields that a reader does not know are ignored; what an older reader must not ignore raises the
schema number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from easyckpt.digest import bytes_digest
from easyckpt.errors import CorruptCheckpoint, UnknownFormat
from easyckpt.storage.base import Storage

__all__ = ["SCHEMA", "decode", "encode", "read_index"]

SCHEMA = 2
"""Of all index files together. Raised when an older reader would misunderstand."""

SCHEMAS_READ = (1, 2)
"""What this version reads. 1: the digest of a piece is the hash of its whole body (`easyckpt.manifest`)."""

_NO_CHECKSUM = "0" * 32
_REPAIR_HINT = "`easyckpt why` shows which steps it concerns; older steps are not affected"

T = TypeVar("T")


class _Head(msgspec.Struct):
    kind: str
    schema: int
    checksum: str


def encode(kind: str, fields: Mapping[str, Any], *, pretty: bool = True) -> bytes:
    """An index file's bytes.

    Args:
        kind: for example ``easyckpt.manifest``.
        fields: plain JSON values.
        pretty: with line breaks, for people; large ones go without.
    """
    head = {"kind": kind, "schema": SCHEMA, "checksum": _NO_CHECKSUM}
    raw = msgspec.json.encode({**head, **fields})
    if pretty:
        raw = msgspec.json.format(raw, indent=1) + b"\n"
    return raw.replace(_NO_CHECKSUM.encode(), bytes_digest(raw).encode(), 1)


def decode(raw: bytes, kind: str, *, into: type[T], where: str) -> T:
    """Read an index file; nothing in it is trusted.

    Args:
        raw: the file's bytes.
        kind: what it has to be.
        into: dataclass of its fields.
        where: named in errors.

    Raises:
        UnknownFormat: another kind, or a schema number that this version does not know.
        CorruptCheckpoint: damaged, or a value has a wrong type or range.
    """
    try:
        head = msgspec.json.decode(raw, type=_Head)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"it cannot be read as JSON: {error}", where=where, hint=_REPAIR_HINT
        ) from error
    if head.kind != kind:
        raise UnknownFormat(
            f"it is {head.kind[:60]!r} and has to be {kind!r}", where=where, hint=_REPAIR_HINT
        )
    if head.schema not in SCHEMAS_READ:
        raise UnknownFormat(
            f"it has schema {head.schema}, and this version reads up to {SCHEMA}",
            where=where,
            hint="use the version of easyckpt that wrote it, or a newer one",
        )
    unsigned = raw.replace(head.checksum.encode(), _NO_CHECKSUM.encode(), 1)
    if len(head.checksum) != len(_NO_CHECKSUM) or bytes_digest(unsigned) != head.checksum:
        raise CorruptCheckpoint("its checksum differs from its content", where=where, hint=_REPAIR_HINT)
    try:
        return msgspec.json.decode(raw, type=into)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(
            f"a value in it is not valid: {error}", where=where, hint=_REPAIR_HINT
        ) from error


def read_index(storage: Storage, path: str, *, bytes_max: int) -> bytes:
    """An index file's bytes, if it is there and not longer than it can honestly be.

    Raises:
        StorageMissing: it is not there.
        CorruptCheckpoint: it is longer than ``bytes_max``.
    """
    raw = storage.read(path, 0, bytes_max + 1)
    if len(raw) > bytes_max:
        raise CorruptCheckpoint(
            f"it is longer than the {bytes_max} bytes that it may have",
            where=storage.where(path),
            hint=_REPAIR_HINT,
        )
    return raw
