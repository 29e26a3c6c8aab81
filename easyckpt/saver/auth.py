"""Who may speak to a saver over TCP: who knows the job's secret.

Both sides prove it without sending it: each hashes the secret with both nonces (HMAC-SHA256) under its own
role's label, so that an answer cannot be reflected. The job id is part of the proof. After it the
connection is plain: use a network that is the job's own, as for the training traffic itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets

from easyckpt.errors import ProtocolError
from easyckpt.saver.channel import AsyncChannel

__all__ = ["HANDSHAKE_TIMEOUT_S", "SECRET_BYTES_MIN", "prove_as_client", "prove_as_server"]

HANDSHAKE_TIMEOUT_S = 10.0
SECRET_BYTES_MIN = 16
_MAGIC = b"easyckpt-saver-1"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


def _proof(secret: bytes, label: bytes, job_id: str, *nonces: bytes) -> bytes:
    parts = (label, job_id.encode(), *nonces)
    framed = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(secret, framed, hashlib.sha256).digest()


async def prove_as_server(channel: AsyncChannel, *, secret: bytes, job_id: str) -> None:
    """Prove ourselves to who connected, and have them prove themselves.

    Raises:
        ProtocolError: they do not know the secret, do not speak this, or take too long.
    """
    try:
        await asyncio.wait_for(_as_server(channel, secret, job_id), HANDSHAKE_TIMEOUT_S)
    except (asyncio.TimeoutError, EOFError, OSError) as error:
        raise ProtocolError("a connection ended before it proved to belong to the job") from error


async def prove_as_client(channel: AsyncChannel, *, secret: bytes, job_id: str) -> None:
    """Prove ourselves to the saver that we connected to, and have it prove itself.

    Raises:
        ProtocolError: it does not know the secret, does not speak this, or takes too long.
    """
    try:
        await asyncio.wait_for(_as_client(channel, secret, job_id), HANDSHAKE_TIMEOUT_S)
    except (asyncio.TimeoutError, EOFError, OSError) as error:
        raise ProtocolError(
            "the other saver refused us",
            hint="all nodes need the same secret and job id",
        ) from error


async def _as_server(channel: AsyncChannel, secret: bytes, job_id: str) -> None:
    ours = secrets.token_bytes(_NONCE_BYTES)
    await channel.send_raw(_MAGIC + ours)
    answer = await _receive(channel, _NONCE_BYTES + _PROOF_BYTES)
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"client", job_id, ours, theirs)):
        raise ProtocolError("a connection without the job's secret was refused")
    await channel.send_raw(_proof(secret, b"server", job_id, ours, theirs))


async def _as_client(channel: AsyncChannel, secret: bytes, job_id: str) -> None:
    greeting = await _receive(channel, len(_MAGIC) + _NONCE_BYTES)
    if not greeting.startswith(_MAGIC):
        raise ProtocolError("whoever listens there is no saver of this version")
    theirs = greeting[len(_MAGIC) :]
    ours = secrets.token_bytes(_NONCE_BYTES)
    await channel.send_raw(ours + _proof(secret, b"client", job_id, theirs, ours))
    proof = await _receive(channel, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(secret, b"server", job_id, theirs, ours)):
        raise ProtocolError("the saver there does not know the job's secret")


async def _receive(channel: AsyncChannel, count: int) -> bytes:
    buffer = bytearray(count)
    await channel.receive_into(memoryview(buffer))
    return bytes(buffer)
