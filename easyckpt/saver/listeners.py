"""The sockets that a saver listens on, and who hung up without saying so."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from easyckpt.errors import SaverUnavailable
from easyckpt.saver.channel import AsyncChannel
from easyckpt.saver.replicate import parse_address

__all__ = ["hang_up_at_death", "tcp_listener", "unix_listener"]

LOCAL_BACKLOG = 128
PEER_BACKLOG = 1024


def unix_listener(socket_path: str) -> socket.socket:
    """A socket for the workers and the agent of this user. The caller holds the lock: nobody listens there.

    Raises:
        SaverUnavailable: the path cannot be used.
    """
    path = Path(socket_path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            server.bind(str(path))
        finally:
            os.umask(before)
        server.listen(LOCAL_BACKLOG)
    except OSError as error:
        server.close()
        raise SaverUnavailable(f"cannot listen: {error.strerror or error}", where=str(path)) from error
    server.setblocking(False)
    return server


def tcp_listener(listen: str, *, advertise: str) -> tuple[socket.socket, str]:
    """A socket for other savers, and the address that they are told.

    Args:
        listen: ``host:port``; port 0 takes a free one.
        advertise: the host to tell, if it is not the one listened on.

    Raises:
        SaverUnavailable: the address is taken or not ours.
    """
    host, port = parse_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(PEER_BACKLOG)
    except OSError as error:
        server.close()
        raise SaverUnavailable(
            f"cannot listen: {error.strerror or error}", where=listen, hint="port 0 takes a free one"
        ) from error
    server.setblocking(False)
    shown = advertise or host
    shown = f"[{shown}]" if ":" in shown else shown
    return server, f"{shown}:{server.getsockname()[1]}"


async def hang_up_at_death(pid: int, channel: AsyncChannel) -> None:
    """Close a client's connection when its process ends, even if a child has inherited the socket."""
    if not hasattr(os, "pidfd_open"):
        return
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
        channel.hang_up()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
