"""Checksums of checkpoint bytes: xxh3-128 of every 64 MiB, and of the whole.

xxh3 finds damage, not forgery: who can write the folder can write the checksums too. It runs at the speed of
the memory, so that hashing costs a fraction of the write. Reference: https://xxhash.com (XXH3, 128 bit, seed
0).
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

__all__ = [
    "HASH_CHUNK_BYTES",
    "HASH_NAME",
    "BodyDigest",
    "bytes_digest",
    "chunk_count",
    "chunk_range",
    "digest_body",
]

HASH_NAME = "xxh3-128"
HASH_CHUNK_BYTES = 64 << 20
"""A unit of verification and of repair: small against a body, large against a request."""

_WINDOW_BYTES = 1 << 20
"""Both hashes take this much in turn, so that the second finds it in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyDigest:
    """Hashes of one body, as lowercase hex."""

    whole: str
    chunks: tuple[str, ...]


def bytes_digest(data: bytes | bytearray | memoryview) -> str:
    """xxh3-128, 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def chunk_count(length: int, *, chunk_bytes: int = HASH_CHUNK_BYTES) -> int:
    """How many chunks a body has; an empty one has none."""
    return -(-length // chunk_bytes)


def chunk_range(index: int, *, length: int, chunk_bytes: int = HASH_CHUNK_BYTES) -> tuple[int, int]:
    """First byte of a chunk, and the byte after its last."""
    return index * chunk_bytes, min((index + 1) * chunk_bytes, length)


def digest_body(body: memoryview, *, chunk_bytes: int = HASH_CHUNK_BYTES) -> BodyDigest:
    """Hash a body once for both purposes.

    Args:
        body: flat bytes.
        chunk_bytes: unit; only tests choose another.
    """
    if 0 < len(body) <= chunk_bytes:
        digest = bytes_digest(body)
        return BodyDigest(whole=digest, chunks=(digest,))
    whole = xxhash.xxh3_128()
    chunks = []
    for index in range(chunk_count(len(body), chunk_bytes=chunk_bytes)):
        begin, end = chunk_range(index, length=len(body), chunk_bytes=chunk_bytes)
        chunk = xxhash.xxh3_128()
        for at in range(begin, end, _WINDOW_BYTES):
            window = body[at : min(at + _WINDOW_BYTES, end)]
            whole.update(window)
            chunk.update(window)
        chunks.append(chunk.hexdigest())
    return BodyDigest(whole=whole.hexdigest(), chunks=tuple(chunks))
