"""The saver process of one node: owns the memory, outlives every worker, ends by itself.

One event loop decides and answers; threads hash, write and read. The process listens on a Unix socket (mode
0600, same user only) for workers and the agent, and, if told to and given the job's secret, on TCP for
other savers.

**Life.** While an owner (an agent) or a worker is connected, it stays. When the last one has gone it
lingers, so that the next attempt on this node adopts what it holds; then it makes the newest step durable
and ends. With no owner, it ends at once when every rank has closed its checkpointer, and gives back what it
held in that moment. Its memory is anonymous: nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from easyckpt.errors import Misuse, ProtocolError, StaleGeneration
from easyckpt.saver.auth import SECRET_BYTES_MIN
from easyckpt.saver.channel import AsyncChannel, peer_credentials
from easyckpt.saver.commits import Threads
from easyckpt.saver.holdings import Holdings
from easyckpt.saver.lead import Lead
from easyckpt.saver.listeners import hang_up_at_death, tcp_listener, unix_listener
from easyckpt.saver.member import Member
from easyckpt.saver.peers import serve_peer
from easyckpt.saver.protocol import Begin, Status, Welcome
from easyckpt.saver.replicate import Dialer
from easyckpt.saver.session import Session
from easyckpt.saver.uplink import join_local, stay_linked
from easyckpt.slots import HEADROOM_BYTES

__all__ = ["Saver", "SaverConfig"]

DRAIN_TIMEOUT_S = 120.0
"""What the last persist may take when the saver ends by itself."""

CONNECTIONS_MAX = 4096

_LOG = logging.getLogger("easyckpt.saver")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaverConfig:
    """How a saver was started."""

    socket_path: str
    job_id: str
    node_id: str = ""
    linger_s: float = 60.0
    listen: str = ""
    """``host:port`` for other savers; empty for none. Port 0 takes a free one."""
    advertise: str = ""
    """Host that others reach this node under, if it is not the one listened on."""
    secret: bytes = b""
    memory_limit: int | None = None
    headroom: int = HEADROOM_BYTES


class Saver:
    """See the module. Make it and `run` it within one event loop."""

    def __init__(self, config: SaverConfig) -> None:
        self._config = config
        self._secret = config.secret
        self._threads = Threads.make()
        self._holdings = Holdings(memory_limit=config.memory_limit, headroom=config.headroom)
        self._sessions: set[Session] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._lead: Lead | None = None
        self._member: Member | None = None
        self._link: asyncio.Task[None] | None = None
        self._begun = asyncio.Event()
        self._ending = asyncio.Event()
        self._drain_timeout_s = DRAIN_TIMEOUT_S
        self._closed_ranks: set[int] = set()
        self._had_client = False
        self._listeners: list[socket.socket] = []
        self.listen_address = ""
        self.troubles = 0
        """Background tasks that failed in a way that nobody foresaw."""

    # --- what a session needs (SessionHost)
    # -------------------------------------------------------------------

    @property
    def job_id(self) -> str:
        """Whose saver this is."""
        return self._config.job_id

    @property
    def member(self) -> Member | None:
        """This node's part in the current generation."""
        return self._member

    @property
    def lead(self) -> Lead | None:
        """The lead of the current generation, if it is in this process."""
        return self._lead

    @property
    def holdings(self) -> Holdings:
        """What is in memory here."""
        return self._holdings

    @property
    def secret(self) -> bytes:
        """What other savers have to know; too short if there is none."""
        return self._secret

    @property
    def begun(self) -> asyncio.Event:
        """Set at the next begin."""
        return self._begun

    def welcome(self) -> Welcome:
        """Who we are."""
        member = self._member
        return Welcome(
            pid=os.getpid(),
            node_id=self._config.node_id,
            generation=member.begin.generation if member is not None else 0,
            begun=member is not None,
            listen_address=self.listen_address,
        )

    def status(self) -> Status:
        """All that an agent reports."""
        member = self._member
        health = member.health if member is not None else None
        workers = [session for session in self._sessions if session.hello.role == "worker"]
        return Status(
            pid=os.getpid(),
            generation=member.begin.generation if member is not None else 0,
            listen_address=self.listen_address,
            memory_step=health.memory_step if health is not None else None,
            replicated_step=health.replicated_step if health is not None else None,
            durable_step=health.durable_step if health is not None else None,
            restored=tuple(member.restored[rank] for rank in sorted(member.restored)) if member else (),
            degraded=health.degraded if health is not None else "",
            slot_bytes=self._holdings.slot_bytes,
            skipped=member.skipped if member is not None else 0,
            ranks_open=len(workers),
        )

    def begin(self, message: Begin) -> None:
        """Become part of a generation.

        Raises:
            StaleGeneration: a newer one of the same life has begun.
            Misuse: the place is not possible.
            ProtocolError: several nodes, and no secret or no address.
        """
        _check_place(message)
        member = self._member
        if member is not None:
            if message.life == member.begin.life and message.generation < member.begin.generation:
                raise StaleGeneration(
                    f"generation {message.generation} has been replaced by {member.begin.generation}",
                    where=self._config.socket_path,
                )
            if message == member.begin:
                self._ending.clear()
                return
        if message.secret is not None:
            self._secret = message.secret
        if message.nodes > 1 and (not self.listen_address or len(self._secret) < SECRET_BYTES_MIN):
            raise ProtocolError(
                "several nodes need an address to listen on and the job's secret",
                where=self._config.socket_path,
                hint="start the saver with --listen and --secret-file",
            )
        self._end_generation(f"generation {message.generation} has begun")
        _LOG.info("begin %s", _shown(message))
        dialer = Dialer(job_id=self._config.job_id, secret=self._secret)
        self._member = Member(
            message,
            holdings=self._holdings,
            dialer=dialer,
            threads=self._threads,
            spawn=self.spawn,
            address=self.listen_address,
        )
        self._closed_ranks.clear()
        if message.node_rank == 0:
            self._lead = Lead(message, threads=self._threads, spawn=self.spawn, clock=time.monotonic)
            join_local(self._lead, self._member)
        else:
            self._link = self.spawn(stay_linked(self._member, dialer), "the link to the lead")
        self._ending.clear()
        self._begun.set()
        self._begun = asyncio.Event()

    def _end_generation(self, why: str) -> None:
        if self._link is not None:
            self._link.cancel()
            self._link = None
        if self._lead is not None:
            self._lead.close()
            self._lead = None
        if self._member is not None:
            self._member.retire(why)
            self._member = None

    def shutdown(self, drain_timeout_s: float) -> None:
        """Drain and end."""
        self._drain_timeout_s = drain_timeout_s
        self._ending.set()

    def said_goodbye(self, session: Session) -> None:
        """A rank has closed its checkpointer."""
        self._closed_ranks.add(session.rank)
        member = self._member
        owned = any(other.hello.role == "owner" for other in self._sessions)
        if member is None or owned or not self._closed_ranks >= set(member.ranks):
            return
        if member.health.memory_step == member.health.durable_step:
            self._holdings.close()  # a clean end gives the memory back at once; storage has it all
        self.shutdown(DRAIN_TIMEOUT_S)

    def spawn(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        """Run a task whose failure is recorded, whatever it is."""
        task = asyncio.ensure_future(self._guarded(work, what))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guarded(self, work: Coroutine[Any, Any, None], what: str) -> None:
        try:
            await work
        except Exception:  # noqa: BLE001 - the process's outer loop: nothing may end it unseen
            self.troubles += 1
            _LOG.exception("%s failed", what)

    # --- the process
    # -----------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Open the sockets.

        Raises:
            SaverUnavailable: an address is taken or not ours.
        """
        unix = unix_listener(self._config.socket_path)
        self._listeners.append(unix)
        self.spawn(self._accept(unix, self._serve_unix), "the Unix socket")
        if self._config.listen:
            server, self.listen_address = tcp_listener(self._config.listen, advertise=self._config.advertise)
            self._listeners.append(server)
            self.spawn(self._accept(server, self._serve_tcp), "the TCP socket")

    async def _accept(self, server: socket.socket, serve: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(server)
            except OSError as error:
                if server.fileno() < 0:
                    return
                _LOG.warning("a connection was not accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) > CONNECTIONS_MAX:
                sock.close()
                continue
            self.spawn(serve(sock), "a connection")

    async def _serve_unix(self, sock: socket.socket) -> None:
        pid, uid = peer_credentials(sock)
        if uid != os.getuid():
            _LOG.warning("user %d (process %d) was refused", uid, pid)
            sock.close()
            return
        session = Session(AsyncChannel(sock), self)
        self._sessions.add(session)
        watch = self.spawn(hang_up_at_death(pid, session.channel), "watching a client")
        try:
            await session.run()
        finally:
            self._sessions.discard(session)
            watch.cancel()

    async def _serve_tcp(self, sock: socket.socket) -> None:
        await serve_peer(sock, self, job_id=self._config.job_id, threads=self._threads)

    async def run(self) -> None:
        """Serve until it is time to end, then drain and give everything back.

        Who begins a generation while we drain is not turned away: then the end is off.
        """
        try:
            while True:
                await self._wait_for_end()
                self._ending.set()
                await self._drain()
                if self._ending.is_set():
                    return
        finally:
            self._end_generation("the saver ends")
            for server in self._listeners:
                server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._threads.end()
            self._holdings.close()
            with contextlib.suppress(OSError):
                os.unlink(self._config.socket_path)

    async def _drain(self) -> None:
        member, lead = self._member, self._lead
        if member is not None:
            drained = await member.drain(self._drain_timeout_s)
            _LOG.info("drained: memory %s, durable %s", drained.memory_step, drained.durable_step)
        if lead is not None and lead is self._lead:
            await lead.finish()

    async def _wait_for_end(self) -> None:
        alone_since = time.monotonic()
        while not self._ending.is_set():
            if any(session.hello.role in ("owner", "worker") for session in self._sessions):
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since >= self._config.linger_s:
                _LOG.info("nobody came for %g s", self._config.linger_s)
                return
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), min(0.25, self._config.linger_s))


def _check_place(message: Begin) -> None:
    possible = (
        message.nodes >= 1
        and 0 <= message.node_rank < message.nodes
        and message.ranks >= 1
        and 0 <= message.first_rank <= message.world_size - message.ranks
        and message.generation >= 0
        and (message.node_rank == 0 or message.lead_address)
    )
    if not possible:
        raise Misuse(f"this place in a generation is not possible: {_shown(message)}")


def _shown(message: Begin) -> str:
    ranks = f"{message.first_rank}-{message.first_rank + message.ranks - 1} of {message.world_size}"
    place = f"node {message.node_rank} of {message.nodes}, ranks {ranks}"
    return f"generation {message.generation}: {place}, lead {message.lead_address or 'here'}"
