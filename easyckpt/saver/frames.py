"""Messages as bytes: framed, versioned, bounded.

A frame is 4 bytes of length (little endian, of the message), 1 byte of protocol version, and one message as
msgpack with its type's name in it. A frame that is longer than `FRAME_BYTES_MAX`, of another version or of an
unknown type ends the connection with a message that says so.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from easyckpt import errors
from easyckpt.errors import EasyckptError, ProtocolError
from easyckpt.saver import peering, protocol
from easyckpt.saver.protocol import Failure, Message

__all__ = [
    "FRAME_BYTES_MAX",
    "HEAD",
    "PROTOCOL_VERSION",
    "decode_frame",
    "encode_frame",
    "frame_length",
    "make_failure",
    "read_failure",
]

PROTOCOL_VERSION = 1
FRAME_BYTES_MAX = 128 << 20
"""Layouts are the largest messages: about 150 bytes per tensor."""
HEAD = struct.Struct("<IB")


def _message_types() -> Any:
    """The union of all messages."""
    found: Any = None
    for module in (protocol, peering):
        for name in module.__all__:
            kind = getattr(module, name)
            if kind is not Message and issubclass(kind, Message):
                found = kind if found is None else found | kind
    return found


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_message_types())


def encode_frame(message: Message) -> bytes:
    """The bytes of a frame."""
    body = _encoder.encode(message)
    if len(body) + 1 > FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {len(body)} bytes is longer than {FRAME_BYTES_MAX}")
    return HEAD.pack(len(body) + 1, PROTOCOL_VERSION) + body


def frame_length(head: bytes) -> int:
    """How many bytes follow the head.

    Raises:
        ProtocolError: another version, or too long.
    """
    length, version = HEAD.unpack(head)
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the other side speaks version {version} of the saver's protocol, this one {PROTOCOL_VERSION}",
            hint="use one version of easyckpt everywhere",
        )
    if not 1 <= length <= FRAME_BYTES_MAX:
        raise ProtocolError(f"a message of {length} bytes is not within 1 to {FRAME_BYTES_MAX}")
    return int(length) - 1


def decode_frame(body: bytes | bytearray) -> Message:
    """The message of a frame's body.

    Raises:
        ProtocolError: it is none of ours.
    """
    try:
        message: Message = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProtocolError(f"a message that cannot be read: {error}") from error
    return message


def make_failure(error: EasyckptError) -> Failure:
    """An error as a message."""
    return Failure(kind=type(error).__name__, what=error.what, where=error.where, hint=error.hint)


def read_failure(failure: Failure) -> EasyckptError:
    """The error that a message stands for."""
    kind = getattr(errors, failure.kind, EasyckptError)
    if not (isinstance(kind, type) and issubclass(kind, EasyckptError)):
        kind = EasyckptError
    return kind(failure.what, where=failure.where, hint=failure.hint)
