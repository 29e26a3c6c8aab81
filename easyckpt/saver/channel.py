"""Framed messages over a socket: for the saver's event loop, and for the blocking callers of a saver.

Descriptors travel as ancillary data on the first byte of the frame that announces them, so that the receiver
takes both or neither.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from typing import TypeVar

from easyckpt.errors import ProtocolError, SaverUnavailable
from easyckpt.saver.frames import HEAD, decode_frame, encode_frame, frame_length, read_failure
from easyckpt.saver.protocol import Failure, Message

__all__ = ["AsyncChannel", "BlockingChannel", "peer_credentials"]

_CHUNK_BYTES = 4 << 20
"""Bytes of a body handed to the kernel at a time, so that the loop serves others in between."""

MessageT = TypeVar("MessageT", bound=Message)


def peer_credentials(sock: socket.socket) -> tuple[int, int]:
    """Process and user on the other end of a Unix socket, by the kernel's word."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    return pid, uid


class AsyncChannel:
    """One connection in an event loop. One reader and any number of writers; frames never interleave."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._loop = asyncio.get_running_loop()
        self._write_lock = asyncio.Lock()

    async def receive(self) -> Message:
        """The next message.

        Raises:
            EOFError: the other side has closed.
            OSError: the connection broke.
            ProtocolError: no message of ours.
        """
        head = bytearray(HEAD.size)
        await self.receive_into(memoryview(head))
        body = bytearray(frame_length(bytes(head)))
        await self.receive_into(memoryview(body))
        return decode_frame(body)

    async def receive_into(self, buffer: memoryview) -> None:
        """Fill the buffer."""
        done = 0
        while done < len(buffer):
            got = await self._loop.sock_recv_into(self.socket, buffer[done : done + _CHUNK_BYTES])
            if got == 0:
                raise EOFError
            done += got

    async def send(self, message: Message, *, fd: int | None = None, body: memoryview | None = None) -> None:
        """Send a message, with a descriptor, or followed by raw bytes."""
        frame = encode_frame(message)
        async with self._write_lock:
            if fd is not None:
                await self._send_with_fd(frame[:1], fd)
                frame = frame[1:]
            await self._loop.sock_sendall(self.socket, frame)
            if body is not None:
                for begin in range(0, len(body), _CHUNK_BYTES):
                    await self._loop.sock_sendall(self.socket, body[begin : begin + _CHUNK_BYTES])

    async def send_raw(self, data: bytes) -> None:
        """Send bytes that are no message (the handshake)."""
        async with self._write_lock:
            await self._loop.sock_sendall(self.socket, data)

    async def _send_with_fd(self, first: bytes, fd: int) -> None:
        while True:
            try:
                if socket.send_fds(self.socket, [first], [fd]):
                    return
            except (BlockingIOError, InterruptedError):
                writable = self._loop.create_future()
                self._loop.add_writer(self.socket, _wake, writable)
                try:
                    await writable
                finally:
                    self._loop.remove_writer(self.socket)

    async def expect(self, kind: type[MessageT]) -> MessageT:
        """The next message, which must be of this kind; a `Failure` is raised."""
        return _expect(await self.receive(), kind)

    def hang_up(self) -> None:
        """End the connection from anywhere: whoever reads or writes gets `EOFError` or `OSError`."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back. Only for who serves the connection, when nothing waits for it any more:
        an event loop never wakes a reader of a socket that is closed under it."""
        self.socket.close()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class BlockingChannel:
    """One connection to a saver's Unix socket: a question, then its answer. One thread at a time."""

    def __init__(self, path: str, *, timeout_s: float) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise SaverUnavailable(
                f"the saver process cannot be reached: {error.strerror or error}",
                where=path,
                hint="it may have been killed; its log is beside the socket",
            ) from error
        self._fds: list[int] = []

    @property
    def peer_pid(self) -> int:
        """The saver's process."""
        return peer_credentials(self._socket)[0]

    def ask(self, question: Message, kind: type[MessageT], *, timeout_s: float) -> MessageT:
        """Send a question and take its answer.

        Raises:
            EasyckptError: what the saver answered, when it failed.
            SaverUnavailable: the connection broke, or no answer came in time. It is closed then.
        """
        return _expect(self.ask_any(question, timeout_s=timeout_s), kind)

    def ask_any(self, question: Message, *, timeout_s: float) -> Message:
        """As `ask`, for any kind of answer."""
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(encode_frame(question))
            head = self._receive(HEAD.size)
            return decode_frame(self._receive(frame_length(head)))
        except TimeoutError as error:
            self.close()
            raise SaverUnavailable(f"no answer within {timeout_s:g} s", where=self._path) from error
        except (OSError, EOFError) as error:
            self.close()
            raise SaverUnavailable(
                "the saver process is gone",
                where=self._path,
                hint="saving goes on when it is back; its log is beside the socket",
            ) from error
        except ProtocolError:
            self.close()
            raise

    def take_fd(self) -> int:
        """The descriptor that came with the last answer. The caller closes it."""
        if len(self._fds) != 1:
            self.close()
            raise ProtocolError(f"{len(self._fds)} descriptors came along instead of one", where=self._path)
        return self._fds.pop()

    def close(self) -> None:
        """End the connection. May be called twice."""
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _receive(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            data, ancillary, _, _ = self._socket.recvmsg(
                min(count - len(parts), 1 << 20), socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                    self._fds.extend(fds)
            if not data:
                raise EOFError
            parts += data
        return bytes(parts)


def _expect(message: Message, kind: type[MessageT]) -> MessageT:
    if isinstance(message, Failure):
        raise read_failure(message)
    if not isinstance(message, kind):
        raise ProtocolError(f"{type(message).__name__} came instead of {kind.__name__}")
    return message
