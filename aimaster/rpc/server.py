"""The master's side of the wire: sessions of agents, and status for people.

The server knows the protocol and nothing about jobs. It takes an agent in (versions, the job's name, one live
agent per node), hands heartbeats and facts to the `Master` it was given, and passes commands to whoever is
connected. What a broken or foreign peer sends ends that peer's session and nothing else.

A command for a node without a session is dropped: the master says it again when the node comes back. A
session's acknowledgements say how far the master's journal is, so an agent never forgets a fact too early.

Two agents with one node id: the one that is alive keeps it. A new agent waits until the old session either
gives another sign of life, and is refused then, or does not for three heartbeats, and takes its place.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import grpc
import grpc.aio

from aimaster.core.commands import CheckNode, Command, EndNode, Prepare, StartWorkers
from aimaster.core.events import NodeEvent
from aimaster.errors import BadMessage
from aimaster.ids import NO_GENERATION, Generation, Incarnation, JobId, NodeId
from aimaster.rpc import limits
from aimaster.rpc.convert import MasterBody, decode_from_agent, encode_from_master
from aimaster.rpc.gen import contract
from aimaster.rpc.messages import (
    Ack,
    Header,
    Heartbeat,
    Hello,
    Identity,
    RefusalKind,
    Refused,
    Welcome,
)
from aimaster.rpc.status import JobStatus, decode_status_request, encode_status
from aimaster.rpc.transport import END_OF_STREAM, Bound, Call
from aimaster.rpc.waiting import within

HELLO_TIMEOUT_S = 10.0
"""A stream on which nobody says hello is closed after so long."""
COMMANDS_WAITING_MAX = 64
"""An agent that lets more commands wait does not read; its session is ended, and it will come back."""
LIFE_SIGN_BEATS = 3
LIFE_SIGN_S_MIN = 3.0
"""An old session has so many heartbeats, and at least so long, to show that its agent lives."""
LAST_WORD_S = 2.0
"""How long the last word to an agent may take; one that does not read is cut off."""
STOP_GRACE_S = 1.0

NodeCommand = Prepare | StartWorkers | CheckNode | EndNode


class Master(Protocol):
    """What the server needs from a master. Everything is called on the server's event loop."""

    @property
    def welcome(self) -> Welcome:
        """What an accepted agent is told."""

    async def admit(self, identity: Identity, hello: Hello) -> Refused | None:
        """Take an agent in, or say why not; its arrival is journalled when this returns."""

    async def take(self, fact: NodeEvent) -> None:
        """Take in a fact, once per number; may return before it is journalled."""

    def acknowledged(self, identity: Identity) -> int:
        """Highest number of this agent's facts that is journalled."""

    def beat(self, identity: Identity, beat: Heartbeat) -> None:
        """A heartbeat came."""

    def disconnected(self, identity: Identity) -> None:
        """The agent's stream is gone; the agent may not be."""

    def status(self) -> JobStatus:
        """All that people may know."""


class Session:
    """One connected agent."""

    def __init__(self, identity: Identity, say: Callable[[Session, MasterBody], bytes]) -> None:
        self.identity = identity
        self.seq = 0
        self._say = say
        self._commands: deque[NodeCommand] = deque()
        self._ack_due = False
        self._wake = asyncio.Event()
        self._sign = asyncio.Event()
        self._end = asyncio.Event()
        self._farewell: Refused | None = None

    def command(self, command: NodeCommand) -> None:
        """Queue a command."""
        if len(self._commands) >= COMMANDS_WAITING_MAX:
            self.end(None)
            return
        self._commands.append(command)
        self._wake.set()

    def acknowledge(self) -> None:
        """Send the present state of the journal soon; several wishes become one message."""
        self._ack_due = True
        self._wake.set()

    def life_sign(self) -> None:
        """The agent said something."""
        self._sign.set()

    async def lives(self, timeout_s: float) -> bool:
        """Whether the agent says anything within the time; False also when its stream ends."""
        self._sign.clear()
        waits = [asyncio.create_task(event.wait()) for event in (self._sign, self._end)]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return self._sign.is_set() and not self._end.is_set()

    async def ended(self) -> None:
        """Return once it was ended and a last word has had its time, whether or not the agent reads."""
        await self._end.wait()
        await asyncio.sleep(LAST_WORD_S)

    def end(self, farewell: Refused | None) -> None:
        """Close the stream, after a last word if there is one; the first call counts."""
        if not self._end.is_set():
            self._farewell = farewell
        self._end.set()
        self._wake.set()

    async def write_all(self, context: Call) -> None:
        """Write what there is to say until the session is ended."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._commands:
                command = self._commands.popleft()
                self.seq += 1
                self._ack_due = False
                await context.write(self._say(self, command))
            if self._end.is_set():
                if self._farewell is not None:
                    await context.write(self._say(self, self._farewell))
                return
            if self._ack_due:
                self._ack_due = False
                await context.write(self._say(self, Ack()))


class AgentServer:
    """Serves agents and status on one port.

    Args:
        master: Whom everything is handed to.
        job: The job's name.
        incarnation: Of this life of the master.
        epoch: Of its lease; raised by every life.
        bound: The port.
    """

    def __init__(
        self,
        master: Master,
        *,
        job: JobId,
        incarnation: Incarnation,
        epoch: int,
        bound: Bound,
    ) -> None:
        self.generation: Generation = NO_GENERATION
        """Newest that the master knows; stands in every header."""
        self._master = master
        self._job = job
        self._incarnation = incarnation
        self._epoch = epoch
        self._sessions: dict[NodeId, Session] = {}
        self._server = bound.server
        self._server.add_generic_rpc_handlers((self._handlers(),))

    async def start(self) -> None:
        """Begin to answer."""
        await self._server.start()

    async def stop(self) -> None:
        """End all sessions and close the port."""
        for session in self._sessions.values():
            session.end(None)
        await self._server.stop(STOP_GRACE_S)

    def send(self, command: Command) -> bool:
        """Pass a command to its node; False if the node is not connected now."""
        if not isinstance(command, NodeCommand):
            raise TypeError(f"{type(command).__name__} is not a command to a node")
        session = self._sessions.get(command.node)
        if session is None:
            return False
        session.command(command)
        return True

    def acknowledge(self, node: NodeId) -> None:
        """Something of this node was journalled: tell it."""
        session = self._sessions.get(node)
        if session is not None:
            session.acknowledge()

    def hang_up(self, identity: Identity) -> None:
        """End an agent's session; it will join again."""
        session = self._sessions.get(identity.node)
        if session is not None and session.identity == identity:
            session.end(None)

    def connected(self, node: NodeId) -> bool:
        """Whether the node has a session."""
        return node in self._sessions

    @property
    def session_count(self) -> int:
        """How many agents are connected."""
        return len(self._sessions)

    # Streams ------------------------------------------------------------------------------------------------

    def _handlers(self) -> _Methods:
        return _Methods(
            {
                contract.SESSION_METHOD: grpc.stream_stream_rpc_method_handler(self._serve_agent),
                contract.GETSTATUS_METHOD: grpc.unary_unary_rpc_method_handler(self._serve_status),
            }
        )

    async def _serve_status(self, request: bytes, context: Call) -> bytes:
        try:
            job = decode_status_request(request)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        if job and job != self._job:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this master leads job {self._job}")
        return encode_status(self._master.status())

    async def _serve_agent(self, _: object, context: Call) -> None:
        session: Session | None = None
        try:
            session = await self._welcome(context)
            if session is not None:
                await self._converse(session, context)
        except BadMessage as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except asyncio.TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "nobody said hello")
        finally:
            if session is not None:
                self._forget(session)

    async def _welcome(self, context: Call) -> Session | None:
        """Read Hello and answer it; None if the agent was refused."""
        data = await within(HELLO_TIMEOUT_S, context.read())
        if data is END_OF_STREAM:
            return None
        header, hello = decode_from_agent(data)
        if not isinstance(hello, Hello):
            raise BadMessage(f"{type(hello).__name__} before Hello")
        identity = Identity(job=header.job, node=header.node, incarnation=header.incarnation)
        session = Session(identity, self._say)
        refused = self._check_terms(header, hello) or await self._check_node_id(identity)
        if refused is None:
            # Registered before it is journalled: what the master decides about it waits in its queue.
            self._sessions[identity.node] = session
            try:
                refused = await self._master.admit(identity, hello)
            except BaseException:
                self._forget(session)
                raise
        if refused is not None:
            self._forget(session)
            await context.write(self._say(session, refused))
            return None
        try:
            await context.write(self._say(session, self._master.welcome))
        except BaseException:
            self._forget(session)
            raise
        return session

    async def _converse(self, session: Session, context: Call) -> None:
        tasks = [
            asyncio.create_task(self._read_all(session, context)),
            asyncio.create_task(session.write_all(context)),
            asyncio.create_task(session.ended()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read_all(self, session: Session, context: Call) -> None:
        identity = session.identity
        while (data := await context.read()) is not END_OF_STREAM:
            header, body = decode_from_agent(data)
            if (header.job, header.node, header.incarnation) != (
                identity.job,
                identity.node,
                identity.incarnation,
            ):
                raise BadMessage(f"a message of {header.node} in the session of {identity.node}")
            session.life_sign()
            if isinstance(body, Heartbeat):
                self._master.beat(identity, body)
                session.acknowledge()
            elif isinstance(body, NodeEvent):
                await self._master.take(body)
            else:
                raise BadMessage("a second Hello in one session")

    def _check_terms(self, header: Header, hello: Hello) -> Refused | None:
        """Version and job."""
        if hello.protocol_max < limits.PROTOCOL_MIN or hello.protocol_min > limits.PROTOCOL_MAX:
            return Refused(
                kind=RefusalKind.PROTOCOL,
                message=f"{hello.software} on {header.node} speaks protocol {hello.protocol_min} to "
                f"{hello.protocol_max}, this master {limits.PROTOCOL_MIN} to {limits.PROTOCOL_MAX}; "
                "install the same aimaster-ft on every node",
            )
        if header.job != self._job:
            return Refused(
                kind=RefusalKind.JOB,
                message=f"this master leads job {self._job}, not {header.job}; "
                "give every node the same --rdzv-id, and each job a port of its own",
            )
        return None

    async def _check_node_id(self, identity: Identity) -> Refused | None:
        """Whether another living agent has this node id; a session that is superseded is closed."""
        refused = Refused(
            kind=RefusalKind.NODE_ID,
            message=f"another live agent is node {identity.node} of this job; give each its own --node-id",
        )
        interval_s = self._master.welcome.heartbeat_interval_s
        while (old := self._sessions.get(identity.node)) is not None:
            if old.identity.incarnation == identity.incarnation:
                old.end(None)
                self._forget(old)
            elif await old.lives(max(LIFE_SIGN_S_MIN, LIFE_SIGN_BEATS * interval_s)):
                return refused
            elif self._sessions.get(identity.node) is old:
                old.end(refused)
                self._forget(old)
        return None

    def _forget(self, session: Session) -> None:
        """The session is over; nothing is said if another one has taken its place."""
        session.end(None)
        if self._sessions.get(session.identity.node) is session:
            del self._sessions[session.identity.node]
            self._master.disconnected(session.identity)

    def _say(self, session: Session, body: MasterBody) -> bytes:
        header = Header(
            job=self._job,
            node=session.identity.node,
            incarnation=self._incarnation,
            generation=self.generation,
            seq=session.seq if isinstance(body, Command) else 0,
            ack=self._master.acknowledged(session.identity),
            epoch=self._epoch,
        )
        return encode_from_master(header, body)


class _Methods(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic when it runs
    """Our methods by name; messages travel as bytes and are converted by `convert`."""

    def __init__(self, methods: dict[str, Any]) -> None:
        self._methods = methods

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """Called by gRPC for every call."""
        return self._methods.get(handler_call_details.method)
