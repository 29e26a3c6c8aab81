"""Checksums of checkpoint bytes: xxh3-128 of every 64 MiB, and one of those.

::

    body    ├── 64 MiB ──┼── 64 MiB ──┼─ rest ─┤
    chunks      hash         hash        hash
    whole       xxh3-128 of these hashes, 16 bytes each, in order

So the digest of a body costs one pass over its bytes, several threads can share that pass, a changed byte is
found within its chunk, and whoever has the chunk hashes can compute the digest without the bytes.

xxh3 finds damage, not forgery: who can write the folder can write the checksums too. It runs at the speed of
the memory, so that hashing costs a fraction of the write. Reference: https://xxhash.com (XXH3, 128 bit, seed
0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import xxhash

from easyckpt.lanes import run_lanes

__all__ = [
    "HASH_CHUNK_BYTES",
    "HASH_NAME",
    "BodyDigest",
    "bytes_digest",
    "chunk_count",
    "chunk_range",
    "digest_body",
    "prefix_digest",
]

HASH_NAME = "xxh3-128"
HASH_CHUNK_BYTES = 64 << 20
"""A unit of verification and of repair: small against a body, large against a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyDigest:
    """Hashes of one body, as lowercase hex."""

    whole: str
    chunks: tuple[str, ...]

    @classmethod
    def of(cls, chunks: Sequence[str]) -> BodyDigest:
        """From the chunk hashes alone.

        Raises:
            ValueError: one of them is no hex.
        """
        joined = b"".join(bytes.fromhex(chunk) for chunk in chunks)
        return cls(whole=bytes_digest(joined), chunks=tuple(chunks))


def bytes_digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def chunk_count(length: int, *, chunk_bytes: int = HASH_CHUNK_BYTES) -> int:
    """How many chunks a body has; an empty one has none."""
    return -(-length // chunk_bytes)


def chunk_range(index: int, *, length: int, chunk_bytes: int = HASH_CHUNK_BYTES) -> tuple[int, int]:
    """First byte of a chunk, and the byte after its last."""
    return index * chunk_bytes, min((index + 1) * chunk_bytes, length)


def prefix_digest(body: memoryview, seal: BodyDigest, *, end: int) -> str:
    """Digest of a body's first bytes: of the hashes of the chunks that lie within, and of the rest.

    Args:
        body: flat bytes.
        seal: its digest, in chunks of `HASH_CHUNK_BYTES`.
        end: the byte after the last.
    """
    whole = end // HASH_CHUNK_BYTES
    return BodyDigest.of((*seal.chunks[:whole], bytes_digest(body[whole * HASH_CHUNK_BYTES : end]))).whole


def digest_body(
    body: memoryview, *, chunk_bytes: int = HASH_CHUNK_BYTES, lanes: int | None = None
) -> BodyDigest:
    """Hash a body, in several threads if it is long.

    Args:
        body: flat bytes.
        chunk_bytes: unit; only tests choose another.
        lanes: threads; None takes what the machine gives.
    """
    chunks = [""] * chunk_count(len(body), chunk_bytes=chunk_bytes)

    def one(index: int) -> None:
        begin, end = chunk_range(index, length=len(body), chunk_bytes=chunk_bytes)
        chunks[index] = bytes_digest(body[begin:end])

    run_lanes([partial(one, index) for index in range(len(chunks))], lanes=lanes)
    return BodyDigest.of(chunks)
