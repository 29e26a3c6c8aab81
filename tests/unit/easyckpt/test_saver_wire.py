"""Frames, handshake and descriptors over real sockets, with peers that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from easyckpt.errors import MemoryFull, ProtocolError, SaverUnavailable
from easyckpt.saver import frames
from easyckpt.saver.auth import prove_as_client, prove_as_server
from easyckpt.saver.channel import AsyncChannel, BlockingChannel
from easyckpt.saver.frames import decode_frame, encode_frame, frame_length, make_failure, read_failure
from easyckpt.saver.peering import Pull
from easyckpt.saver.protocol import Done, Hello, Key, StageGrant, Welcome

SECRET = b"x" * 32


def both(one: Callable[[AsyncChannel], Coroutine[Any, Any, Any]], two: Callable[..., Any]) -> list[Any]:
    """Run both ends of a connection; what each returned or raised."""

    async def run() -> list[Any]:
        left, right = socket.socketpair()
        ends = [AsyncChannel(left), AsyncChannel(right)]

        async def end(work: Callable[..., Any], channel: AsyncChannel) -> Any:
            try:
                return await work(channel)
            finally:
                channel.close()

        return await asyncio.gather(end(one, ends[0]), end(two, ends[1]), return_exceptions=True)

    return asyncio.run(run())


def test_messages_come_back_as_they_were() -> None:
    for message in (
        Hello(job_id="j", role="worker", rank=3),
        Pull(generation=1, key=Key(1, 2), rank=0),
        Done(),
    ):
        frame = encode_frame(message)
        assert frame_length(frame[:5]) == len(frame) - 5
        assert decode_frame(frame[5:]) == message


def test_another_version_and_other_lengths_are_named() -> None:
    with pytest.raises(ProtocolError, match="speaks version 9"):
        frame_length(frames.HEAD.pack(10, 9))
    with pytest.raises(ProtocolError, match="not within"):
        frame_length(frames.HEAD.pack(0xFFFFFFFF, frames.PROTOCOL_VERSION))
    for body in (b"", b"\xc1", b"\x80", encode_frame(Done())[5:].replace(b"Done", b"Dont")):
        with pytest.raises(ProtocolError, match="cannot be read"):
            decode_frame(body)


def test_an_error_travels_as_itself() -> None:
    error = MemoryFull("no room", where="rank 1", hint="free some")
    back = read_failure(make_failure(error))
    assert type(back) is MemoryFull
    assert str(back) == str(error)
    strange = make_failure(error)
    assert type(read_failure(type(strange)(kind="SystemExit", what="x"))).__name__ == "EasyckptError"


def test_both_sides_prove_that_they_know_the_secret() -> None:
    async def server(channel: AsyncChannel) -> None:
        await prove_as_server(channel, secret=SECRET, job_id="j")

    async def client(channel: AsyncChannel) -> None:
        await prove_as_client(channel, secret=SECRET, job_id="j")

    assert both(server, client) == [None, None]


@pytest.mark.parametrize(("secret", "job_id"), [(b"y" * 32, "j"), (SECRET, "other")])
def test_another_secret_or_job_is_refused_on_both_sides(secret: bytes, job_id: str) -> None:
    async def server(channel: AsyncChannel) -> None:
        await prove_as_server(channel, secret=SECRET, job_id="j")

    async def client(channel: AsyncChannel) -> None:
        await prove_as_client(channel, secret=secret, job_id=job_id)

    one, two = both(server, client)
    assert isinstance(one, ProtocolError)
    assert isinstance(two, (ProtocolError, OSError))


def test_a_reflected_proof_is_refused() -> None:
    async def server(channel: AsyncChannel) -> None:
        await prove_as_server(channel, secret=SECRET, job_id="j")

    async def mirror(channel: AsyncChannel) -> None:
        greeting = bytearray(48)
        await channel.receive_into(memoryview(greeting))
        await channel.send_raw(bytes(greeting[16:]) + bytes(32))

    assert isinstance(both(server, mirror)[0], ProtocolError)


def test_what_is_no_saver_is_named() -> None:
    async def web(channel: AsyncChannel) -> None:
        await channel.send_raw(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n....")

    async def client(channel: AsyncChannel) -> None:
        await prove_as_client(channel, secret=SECRET, job_id="j")

    error = both(web, client)[1]
    assert isinstance(error, ProtocolError)
    assert "no saver" in str(error)


def serve_once(path: str, work: Callable[[socket.socket], None]) -> threading.Thread:
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen(1)

    def run() -> None:
        sock, _ = server.accept()
        with sock, server:
            work(sock)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_descriptor_comes_with_its_message(tmp_path: Any) -> None:
    path = str(tmp_path / "s")
    grant = StageGrant(slot=1, capacity=4096, fresh=True)

    def work(sock: socket.socket) -> None:
        sock.recv(1000)
        frame = encode_frame(grant)
        fd = os.memfd_create("x")
        os.write(fd, b"hello")
        socket.send_fds(sock, [frame[:1]], [fd])
        sock.sendall(frame[1:])
        os.close(fd)

    thread = serve_once(path, work)
    channel = BlockingChannel(path, timeout_s=10)
    assert channel.ask(Done(), StageGrant, timeout_s=10) == grant
    fd = channel.take_fd()
    assert os.pread(fd, 5, 0) == b"hello"
    assert not os.get_inheritable(fd)
    os.close(fd)
    with pytest.raises(ProtocolError, match="0 descriptors"):
        channel.take_fd()
    thread.join()


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", SaverUnavailable),
        (b"\x05\x00", SaverUnavailable),
        (frames.HEAD.pack(3, 77) + b"xx", ProtocolError),
        (encode_frame(Done()), ProtocolError),
        (encode_frame(make_failure(MemoryFull("full"))), MemoryFull),
    ],
)
def test_bad_answers_are_errors_of_ours(tmp_path: Any, answer: bytes, error: type[Exception]) -> None:
    path = str(tmp_path / "s")

    def work(sock: socket.socket) -> None:
        sock.recv(1000)
        sock.sendall(answer)

    thread = serve_once(path, work)
    channel = BlockingChannel(path, timeout_s=10)
    with pytest.raises(error):
        channel.ask(Hello(job_id="j", role="owner"), Welcome, timeout_s=10)
    channel.close()
    thread.join()


def test_nobody_there_and_no_answer_are_named(tmp_path: Any) -> None:
    with pytest.raises(SaverUnavailable, match="cannot be reached"):
        BlockingChannel(str(tmp_path / "none"), timeout_s=1)
    path = str(tmp_path / "s")
    done = threading.Event()
    thread = serve_once(path, lambda _: done.wait(30) and None)
    channel = BlockingChannel(path, timeout_s=10)
    with pytest.raises(SaverUnavailable, match=r"no answer within 0\.1 s"):
        channel.ask(Done(), Done, timeout_s=0.1)
    done.set()
    thread.join()
