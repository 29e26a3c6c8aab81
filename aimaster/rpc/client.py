"""An agent's link to its master: it comes back by itself until it is closed or refused for good.

One session is one stream: Hello up, Welcome down, then heartbeats and facts up, acknowledgements and commands
down. The link ends a session and starts another one when the stream breaks, when the master is silent for
several heartbeats (a stopped process or a cut cable breaks no stream for minutes), or when an older master
answers. Whether to go on without a master, and for how long, is the agent's decision: the link only says
since when it has been alone.

Commands are passed on once: an older epoch ends the session, an older generation or a repeated one is
dropped. Everything here runs on one event loop and nothing is thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc.aio

from aimaster.clock import Clock
from aimaster.core.commands import Command, Prepare, StartWorkers
from aimaster.core.events import NodeEvent
from aimaster.errors import BadMessage, MasterUnreachable, OwnBug
from aimaster.ids import NO_GENERATION, Generation, Incarnation
from aimaster.rpc.convert import AgentBody, MasterBody, decode_from_master, encode_from_agent
from aimaster.rpc.facts import FACT_KINDS
from aimaster.rpc.messages import (
    Ack,
    Header,
    Heartbeat,
    Hello,
    Identity,
    ProcessInfo,
    RefusalKind,
    Refused,
    Welcome,
)
from aimaster.rpc.pending import PendingFacts
from aimaster.rpc.refusals import permanent_error, refusal_error
from aimaster.rpc.retry import Backoff
from aimaster.rpc.security import Credentials
from aimaster.rpc.transport import (
    END_OF_STREAM,
    Call,
    Endpoint,
    Trouble,
    diagnose,
    open_channel,
    open_session,
)
from aimaster.rpc.waiting import within

WELCOME_TIMEOUT_S = 30.0
"""Longest wait for the answer to Hello. A master may first have to find out which of two agents is alive."""
SILENT_BEATS = 5
SILENT_S_MIN = 5.0
"""A session ends after so many heartbeats without an answer, but not before so many seconds."""
BACKOFF_FIRST_S = 0.1
BACKOFF_LONGEST_S = 2.0
"""Short, because a restarted master gives up nodes that have not come back within its `dead` time-out."""


class LinkState(Enum):
    """What `on_state` is told."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    LOST = "lost"
    CLOSED = "closed"


class _SessionEnded(MasterUnreachable):
    """Why a session is over. Never leaves this module: the link starts the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCallbacks:
    """What the link asks and tells its agent; all are called on the event loop and must not block."""

    hello: Callable[[], Hello]
    """At the start of every session, for what is true then."""
    heartbeat: Callable[[], Heartbeat]
    """Once per interval; gives `processes` each time."""
    on_command: Callable[[Command], None]
    """Once for each new command."""
    on_state: Callable[[LinkState], None]


class MasterLink:
    """The agent's side of the contract.

    Args:
        endpoint: Where the master listens or will listen.
        credentials: Of the job.
        identity: Of this agent's life.
        callbacks: What it asks and tells the agent.
        clock: For `connected_since` and `lost_since`.
        rng: For back-off; give a seeded one in tests.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        credentials: Credentials,
        identity: Identity,
        callbacks: LinkCallbacks,
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._credentials = credentials
        self._identity = identity
        self._ask = callbacks
        self._clock = clock
        self._rng = rng or random.Random()
        self._pending = PendingFacts()
        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._closing = asyncio.Event()
        self._welcome: Welcome | None = None
        self._connected_since: float | None = None
        self._lost_since: float | None = None
        self._trouble = ""
        self._epoch = 0
        self._master: Incarnation | None = None
        self._command_seq = 0
        self._generation = NO_GENERATION
        self._obeyed: set[tuple[type[Command], Generation]] = set()
        self._said: tuple[tuple[ProcessInfo, ...] | None, tuple[str, ...]] | None = None

    @property
    def connected_since(self) -> float | None:
        """Monotonic time of the last Welcome, while connected."""
        return self._connected_since

    @property
    def lost_since(self) -> float | None:
        """Monotonic time at which the master was lost; None while connected and before the first Welcome."""
        return self._lost_since

    @property
    def welcome(self) -> Welcome | None:
        """What the master said at the last Welcome; None before the first one."""
        return self._welcome

    @property
    def trouble(self) -> str:
        """Why the last try failed, for people; empty while connected."""
        return self._trouble

    @property
    def facts_given_up(self) -> int:
        """Facts that were lost because too many waited."""
        return self._pending.given_up

    async def run(self) -> None:
        """Connect, and again after each loss, until `close`.

        Raises:
            PeerRefused: the master will not have this agent: `ProtocolMismatch`, `JobMismatch`,
                `SecretDiffers`, or the job is over.
            AlreadyRunning: another live agent has this node id.
            CredentialsMissing: the master asks for a secret and there is none here.
        """
        backoff = Backoff(self._rng, first_s=BACKOFF_FIRST_S, longest_s=BACKOFF_LONGEST_S)
        while not self._closing.is_set():
            self._ask.on_state(LinkState.CONNECTING)
            try:
                await self._session(backoff)
            except _SessionEnded as ended:
                await self._after_session(str(ended))
            if not self._closing.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await within(backoff.next_s(), self._closing.wait())
        self._ask.on_state(LinkState.CLOSED)

    def report(self, event: NodeEvent) -> None:
        """Tell the master a fact: numbered here, kept until journalled there, sent again after a cut.

        Raises:
            TypeError: for an event that is not an agent's to tell.
        """
        if not isinstance(event, FACT_KINDS):
            raise TypeError(f"{type(event).__name__} is not a fact that an agent reports")
        if (event.node, event.incarnation) != (self._identity.node, self._identity.incarnation):
            raise OwnBug(f"a fact about {event.node} reported by the agent of {self._identity.node}")
        self._drained.clear()
        if self._pending.add(event):
            self._wake.set()

    async def flush(self, timeout_s: float) -> bool:
        """Wait until every fact is journalled; whether that was so in time."""
        self._wake.set()
        try:
            await within(timeout_s, self._drained.wait())
        except asyncio.TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the session and make `run` return. Facts that are not flushed are lost."""
        self._closing.set()
        self._wake.set()

    # One session --------------------------------------------------------------------------------------------

    async def _session(self, backoff: Backoff) -> None:
        async with open_channel(self._endpoint, self._credentials) as channel:
            call = open_session(channel)
            try:
                await self._unless_closed(self._open(call))
                if not self._closing.is_set():
                    backoff.reset()
                    await self._unless_closed(self._receive(call), self._send(call))
            except grpc.aio.AioRpcError as error:
                raise _SessionEnded(error.details() or error.code().name) from error
            except BadMessage as error:
                raise _SessionEnded(str(error)) from error
            except asyncio.TimeoutError as error:
                raise _SessionEnded("the master does not answer") from error
            finally:
                call.cancel()

    async def _open(self, call: Call) -> None:
        """Say hello and be welcome."""
        hello = self._ask.hello()
        await within(WELCOME_TIMEOUT_S, self._write(call, hello))
        header, body = await self._read(call, WELCOME_TIMEOUT_S)
        self._obey_header(header)
        if isinstance(body, Refused):
            self._refused(body)
        if not isinstance(body, Welcome):
            raise BadMessage(f"{type(body).__name__} in place of an answer to Hello")
        self._said = (hello.processes, hello.notes)
        self._welcome = body
        self._pending.start_again(header.ack)
        self._note_drained()
        self._connected_since = self._clock.monotonic()
        self._lost_since = None
        self._trouble = ""
        self._ask.on_state(LinkState.CONNECTED)

    async def _unless_closed(self, *work: Coroutine[Any, Any, None]) -> None:
        """Until one of them ends, or `close`: what listens there may never say a word."""
        tasks = [asyncio.create_task(one) for one in (*work, self._closed())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task.cancelled():  # gRPC cancels whoever waits for a call that was cut
                    raise _SessionEnded("the stream was cut")
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _closed(self) -> None:
        await self._closing.wait()

    async def _receive(self, call: Call) -> None:
        assert self._welcome is not None
        silent_s = max(SILENT_S_MIN, SILENT_BEATS * self._welcome.heartbeat_interval_s)
        while True:
            header, body = await self._read(call, silent_s)
            self._obey_header(header)
            self._pending.acknowledge(header.ack)
            self._note_drained()
            if isinstance(body, Refused):
                self._refused(body)
            elif isinstance(body, Command):
                self._obey(header, body)
            elif not isinstance(body, Ack):
                raise BadMessage(f"{type(body).__name__} in the middle of a session")

    async def _send(self, call: Call) -> None:
        assert self._welcome is not None
        interval_s = self._welcome.heartbeat_interval_s
        # The first beat falls anywhere in the interval: agents that came together do not beat together.
        next_beat = self._clock.monotonic() + self._rng.uniform(0, interval_s)
        loop = asyncio.get_running_loop()
        while True:
            for fact in self._pending.take_unsent():
                await self._write(call, fact)
            if self._clock.monotonic() >= next_beat:
                await self._write(call, self._beat())
                next_beat = max(next_beat + interval_s, self._clock.monotonic())
            alarm = loop.call_later(max(0.0, next_beat - self._clock.monotonic()), self._wake.set)
            try:
                await self._wake.wait()
            finally:
                alarm.cancel()
            self._wake.clear()

    async def _write(self, call: Call, body: AgentBody) -> None:
        try:
            await call.write(self._encode(body))
        except asyncio.InvalidStateError as error:  # how gRPC says that the call is over already
            raise await _how_it_ended(call) from error

    async def _read(self, call: Call, timeout_s: float) -> tuple[Header, MasterBody]:
        data = await within(timeout_s, call.read())
        if data is END_OF_STREAM:
            raise await _how_it_ended(call)
        return decode_from_master(data)

    def _beat(self) -> Heartbeat:
        """A heartbeat that repeats processes and notes only where they changed."""
        beat = self._ask.heartbeat()
        saying = (beat.processes, beat.notes)
        if saying == self._said:
            return dataclasses.replace(beat, processes=None, notes=())
        self._said = saying
        return beat

    def _encode(self, body: AgentBody) -> bytes:
        generation = body.generation if isinstance(body, Hello) else self._generation
        header = Header(
            job=self._identity.job,
            node=self._identity.node,
            incarnation=self._identity.incarnation,
            generation=generation,
            seq=body.seq if isinstance(body, NodeEvent) else 0,
            ack=self._command_seq,
            epoch=self._epoch,
        )
        return encode_from_agent(header, body)

    # What the master says -----------------------------------------------------------------------------------

    def _obey_header(self, header: Header) -> None:
        if header.epoch < self._epoch:
            raise _SessionEnded(f"a master of epoch {header.epoch} answers, {self._epoch} was here already")
        self._epoch = header.epoch
        if header.incarnation != self._master:
            self._master = header.incarnation
            self._command_seq = 0

    def _obey(self, header: Header, command: Command) -> None:
        self._command_seq = max(self._command_seq, header.seq)
        if isinstance(command, Prepare | StartWorkers):
            key = (type(command), command.generation)
            if command.generation < self._generation or key in self._obeyed:
                return
            if command.generation > self._generation:
                self._generation = command.generation
                self._obeyed.clear()
            self._obeyed.add(key)
        self._ask.on_command(command)

    def _refused(self, refused: Refused) -> None:
        """Raise what it means; what may pass while a job is under way only ends the session."""
        error = refusal_error(refused, self._endpoint)
        passing = refused.kind not in (RefusalKind.ENDED, RefusalKind.NODE_ID)
        if passing and self._welcome is not None:
            raise _SessionEnded(str(error))
        raise error

    async def _after_session(self, why: str) -> None:
        """Note the loss; before the first Welcome, find out whether trying again makes sense."""
        if self._closing.is_set():
            return
        self._trouble = why
        if self._connected_since is not None:
            self._lost_since = self._clock.monotonic()
            self._connected_since = None
            self._ask.on_state(LinkState.LOST)
        if self._welcome is None:
            found = await diagnose(self._endpoint, self._credentials)
            if found.trouble is not Trouble.NONE:
                self._trouble = found.sentence
            error = permanent_error(found, self._endpoint)
            if error is not None:
                raise error

    def _note_drained(self) -> None:
        if not self._pending:
            self._drained.set()


async def _how_it_ended(call: Call) -> _SessionEnded:
    """Why a finished call is finished."""
    return _SessionEnded(await call.details() or "the master ended the session")
