"""One connection to the saver's Unix socket: a worker's rank, an agent, or a visitor.

A question is answered before the next is read. When a worker's connection ends without a goodbye, what it was
copying is given up at once, so that the other ranks are not kept waiting for a dead one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

from easyckpt.errors import EasyckptError, Misuse, ProtocolError, SaverUnavailable, StaleGeneration
from easyckpt.saver.channel import AsyncChannel
from easyckpt.saver.frames import make_failure
from easyckpt.saver.holdings import Piece
from easyckpt.saver.member import ORDER, Member
from easyckpt.saver.protocol import (
    Begin,
    Close,
    Closed,
    Done,
    Hello,
    LayoutUnknown,
    Load,
    Loaded,
    LoadOffer,
    LoadReady,
    LoadReshape,
    LoadWant,
    Message,
    Open,
    PersistNow,
    Release,
    Reserve,
    Reserved,
    Seal,
    Shutdown,
    StageAbort,
    StageAsk,
    StageGrant,
    StageInfo,
    StageQuery,
    StageRefuse,
    Status,
    StatusAsk,
    Welcome,
)
from easyckpt.saver.resume import Ready

__all__ = ["Session", "SessionHost"]

BEGIN_TIMEOUT_S = 120.0
"""How long a worker waits for its node to become part of its generation."""

LAYOUTS_KEPT = 4

_LOG = logging.getLogger("easyckpt.saver")


class SessionHost(Protocol):
    """What a session needs from the saver."""

    @property
    def member(self) -> Member | None: ...

    def welcome(self) -> Welcome: ...

    def status(self) -> Status: ...

    def begin(self, message: Begin) -> None: ...

    def shutdown(self, drain_timeout_s: float) -> None: ...

    def said_goodbye(self, session: Session) -> None: ...

    @property
    def begun(self) -> asyncio.Event: ...

    @property
    def job_id(self) -> str: ...


class Session:
    """See the module. ``run`` serves it to its end."""

    def __init__(self, channel: AsyncChannel, host: SessionHost) -> None:
        self.channel = channel
        self.hello = Hello(job_id="", role="visitor")
        self.goodbye = False
        """Whether a worker closed its checkpointer properly."""
        self._host = host
        self._member: Member | None = None
        self._layouts: dict[str, bytes] = {}
        self._copying: Piece | None = None
        self._reading: Piece | None = None
        self._reading_tier = ""
        self._slots_sent: set[int] = set()
        self._answers: dict[type[Message], Callable[..., object]] = {
            Begin: self._begin, Open: self._open, StageAsk: self._stage, Seal: self._seal,
            StageAbort: self._abort, StageQuery: self._query, Load: self._load, Loaded: self._loaded,
            Close: self._close, PersistNow: self._persist_now, StatusAsk: self._status,
            LoadWant: self._want, LoadReshape: self._reshape, Release: self._release,
            Reserve: self._reserve, Shutdown: self._shutdown,
        }  # fmt: skip

    @property
    def rank(self) -> int:
        """Of a worker."""
        return self.hello.rank

    async def run(self) -> None:
        """Answer questions until the connection ends."""
        try:
            self.hello = await self.channel.expect(Hello)
            if self.hello.job_id != self._host.job_id:
                raise ProtocolError(f"this is the saver of job {self._host.job_id}, not {self.hello.job_id}")
            await self.channel.send(self._host.welcome())
            await self._serve()
        except (EOFError, OSError):
            pass
        except EasyckptError as error:  # no message of ours, or not for us: say so and hang up
            _LOG.warning("a connection was ended: %s", error)
            with contextlib.suppress(OSError):
                await self.channel.send(make_failure(error))
        finally:
            self._let_go()
            if self._member is not None:
                self._member.left(self.rank)
            self.channel.close()

    async def _serve(self) -> None:
        """Answer one question after the other; an answer that nobody waits for any more is given up."""
        receiving = asyncio.ensure_future(self.channel.receive())
        answering: asyncio.Future[None] | None = None
        try:
            while True:
                message = await receiving
                receiving = asyncio.ensure_future(self.channel.receive())
                answering = asyncio.ensure_future(self._answer(message))
                await asyncio.wait({receiving, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done() and receiving.exception() is not None:
                    await receiving  # raises what ended the connection
                await answering
        finally:
            for task in (receiving, answering):
                if task is not None and not task.done():
                    task.cancel()
                    await asyncio.wait({task})
                elif task is not None and not task.cancelled():
                    task.exception()  # seen, whatever it was

    async def _answer(self, message: Message) -> None:
        handler = self._answers.get(type(message))
        if handler is None:
            raise ProtocolError(f"{type(message).__name__} is no question for a saver")
        try:
            result = handler(message)
            reply = await result if asyncio.iscoroutine(result) else result
        except EasyckptError as error:
            reply = make_failure(error)
        if isinstance(reply, tuple):
            await self.channel.send(reply[0], fd=reply[1])
        elif isinstance(reply, Message):
            await self.channel.send(reply)

    def _let_go(self) -> None:
        piece, self._copying = self._copying, None
        if piece is not None:
            piece.unpin()
            if self._member is not None:
                self._member.stage_failed(self.rank, piece.key.step, "the worker is gone")
        self._stop_reading()

    def _stop_reading(self) -> Piece | None:
        piece, self._reading = self._reading, None
        if piece is not None:
            piece.unpin()
        return piece

    # --- any role
    # --------------------------------------------------------------------------------------------

    def _begin(self, message: Begin) -> Message:
        self._host.begin(message)
        return self._host.welcome()

    def _status(self, _: StatusAsk) -> Message:
        return self._host.status()

    def _release(self, _: Release) -> Message:
        self.hello = Hello(job_id=self.hello.job_id, role="visitor")
        return Done()

    def _shutdown(self, message: Shutdown) -> Message:
        self._host.shutdown(message.drain_timeout_s)
        return Done()

    async def _persist_now(self, message: PersistNow) -> Message:
        member = self._host.member
        if member is None:
            return Closed(memory_step=None, durable_step=None, degraded="no generation has begun")
        drained = await member.drain(message.timeout_s)
        return Closed(
            memory_step=drained.memory_step, durable_step=drained.durable_step, degraded=drained.degraded
        )

    async def _query(self, message: StageQuery) -> Message:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + message.timeout_s
        persist_asked = False
        while True:
            member = self._host.member
            if member is None or member.begin.generation != message.generation:
                return StageInfo(step=message.step, stage="abandoned", reason="the generation is over")
            info = member.stage_of(message.step) or StageInfo(step=message.step, stage="staging")
            newest = member.health.durable_step
            overtaken = newest is not None and newest > message.step
            if overtaken and message.stage == "durable" and info.stage in ORDER[:-1]:
                reason = f"step {newest}, which is newer, is durable"
                return StageInfo(step=message.step, stage="abandoned", reason=reason)
            if not message.stage or info.stage not in ORDER or _reached(info.stage, message.stage):
                return info
            needs_storage = message.stage == "durable" or (
                message.stage == "replicated" and member.begin.nodes < 2
            )
            if needs_storage and not persist_asked and info.stage != "staging":
                persist_asked = True
                member.ask_persist()
            left = deadline - loop.time()
            if left <= 0:
                return StageInfo(step=message.step, stage=info.stage, reason=member.health.degraded)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(member.changed(), left)

    # --- a worker
    # --------------------------------------------------------------------------------------------

    async def _joined(self) -> Member:
        """This node's member in the worker's generation."""
        if self.hello.role != "worker":
            raise Misuse(f"a connection of role {self.hello.role} has no rank")
        wanted = self.hello.generation
        loop = asyncio.get_running_loop()
        deadline = loop.time() + BEGIN_TIMEOUT_S
        while True:
            member = self._host.member
            current = member.begin.generation if member is not None else -1
            if member is not None and wanted == current:
                break
            if wanted is not None and current > wanted:
                raise StaleGeneration(
                    f"generation {wanted} has been replaced by {current}", where=f"rank {self.rank}"
                )
            begun = self._host.begun
            try:
                await asyncio.wait_for(begun.wait(), max(deadline - loop.time(), 0.001))
            except asyncio.TimeoutError:
                raise SaverUnavailable(
                    f"this node did not become part of generation {wanted} within {BEGIN_TIMEOUT_S:g} s",
                    where=f"rank {self.rank}",
                    hint="the first rank of the node, or the agent, has to begin it",
                ) from None
        if self.rank not in member.ranks:
            raise Misuse(f"rank {self.rank} is not on this node, which has ranks {list(member.ranks)}")
        if member is not self._member:
            member.came(self.rank)
        self._member = member
        return member

    def _current(self) -> Member:
        member = self._member
        if member is None:
            raise Misuse("the checkpointer was not opened")
        if member is not self._host.member:
            raise StaleGeneration(f"generation {member.begin.generation} is over", where=f"rank {self.rank}")
        return member

    async def _open(self, message: Open) -> Message:
        member = await self._joined()
        member.open(message)
        return Done()

    async def _stage(self, message: StageAsk) -> object:
        member = self._current()
        self._let_go()
        if message.layout:
            self._layouts[message.layout_digest] = message.layout
            while len(self._layouts) > LAYOUTS_KEPT:
                self._layouts.pop(next(iter(self._layouts)))
        layout = self._layouts.get(message.layout_digest)
        if layout is None:
            return LayoutUnknown()
        answer = await member.stage(self.rank, message, layout)
        if isinstance(answer, StageInfo):
            return (
                answer
                if answer.stage == "abandoned"
                else StageRefuse(reason=answer.reason, not_before=answer.not_before)
            )
        answer.pin()
        self._copying = answer
        number = answer.slot.number
        fresh = self._is_fresh(number)
        slots = member.slots_of(self.rank)
        grant = StageGrant(slot=number, capacity=answer.slot.capacity, fresh=fresh, slots=slots)
        return (grant, answer.slot.fd) if fresh else grant

    def _is_fresh(self, number: int) -> bool:
        """Whether the worker has not had the slot's descriptor yet; it has it then."""
        fresh = number not in self._slots_sent
        self._slots_sent.add(number)
        return fresh

    async def _reserve(self, message: Reserve) -> object:
        member = self._current()
        slot = await member.reserve(self.rank, message.body_bytes)
        if slot is None:
            return Reserved()
        fresh = self._is_fresh(slot.number)
        slots = member.slots_of(self.rank)
        reserved = Reserved(slot=slot.number, capacity=slot.capacity, fresh=fresh, slots=slots)
        return (reserved, slot.fd) if fresh else reserved

    def _seal(self, message: Seal) -> Message:
        member = self._current()
        piece = self._copying
        if piece is None or piece.key.step != message.step:
            raise Misuse(f"step {message.step} is not being copied", where=f"rank {self.rank}")
        self._copying = None
        piece.unpin()
        member.seal(piece)
        return Done()

    def _abort(self, message: StageAbort) -> Message:
        member = self._current()
        piece, self._copying = self._copying, None
        if piece is not None:
            piece.unpin()
            member.stage_failed(self.rank, piece.key.step, message.reason)
        return Done()

    async def _load(self, message: Load) -> object:
        member = self._current()
        return self._answer_load(await member.resumes.load(self.rank, message.index, message.step))

    async def _want(self, message: LoadWant) -> object:
        member = self._current()
        return self._answer_load(await member.resumes.want(self.rank, message))

    async def _reshape(self, message: LoadReshape) -> Message:
        return await self._current().resumes.reshape(self.rank, message.index)

    def _answer_load(self, answer: Ready | LoadOffer | None) -> object:
        """The answer's piece is pinned until it was read, or something else is read."""
        self._stop_reading()
        if answer is None:
            return LoadReady(step=None)
        if isinstance(answer, LoadOffer):
            return answer
        piece = answer.piece
        self._reading, self._reading_tier = piece, answer.tier
        ready = LoadReady(
            step=answer.step,
            tier=answer.tier,
            body_bytes=piece.body_bytes,
            capacity=piece.slot.capacity,
            layout=piece.layout,
        )
        return ready, piece.slot.fd

    def _loaded(self, _: Loaded) -> Message:
        member = self._current()
        piece = self._stop_reading()
        if piece is not None:
            member.loaded(self.rank, piece.key.step, self._reading_tier)
        return Done()

    async def _close(self, message: Close) -> Message:
        member = self._current()
        drained = await member.drain(message.timeout_s)
        self.goodbye = True
        self._host.said_goodbye(self)
        return Closed(
            memory_step=drained.memory_step, durable_step=drained.durable_step, degraded=drained.degraded
        )


def _reached(stage: str, wanted: str) -> bool:
    return ORDER.index(stage) >= ORDER.index(wanted)
