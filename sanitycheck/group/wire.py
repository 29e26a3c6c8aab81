"""JSON lines over a stream, of bounded length."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

__all__ = ["Lines", "send_line"]

LINE_BYTES_MAX = 8 << 20
"""The facts of a large group: 1,000 nodes give about 1 MiB."""
SEND_TIMEOUT_S = 20.0


class Lines:
    """Cuts a stream into messages; what is no JSON object, or too long, is broken."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete now.

        Raises:
            ValueError: The stream is not ours.
        """
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        if len(self._buffer) > LINE_BYTES_MAX:
            raise ValueError(f"a message has more than {LINE_BYTES_MAX} bytes")
        messages = [json.loads(line) for line in lines if line.strip()]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message is no JSON object")
        return messages


def send_line(sock: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message, whole.

    Raises:
        OSError: The other side is gone, or takes nothing for too long.
    """
    sock.settimeout(SEND_TIMEOUT_S)
    sock.sendall(json.dumps(message).encode() + b"\n")
