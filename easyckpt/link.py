"""One rank's connection to the saver of its node. No torch.

Two threads speak on it: the training thread, and the one that copies and seals behind it. A question and its
answer, with the descriptor that may come along, are one turn; turns never mix.

A link belongs to the process that made it: after a fork the child must not speak on it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from dataclasses import dataclass

import msgspec

from easyckpt.errors import EasyckptError, Misuse, ProtocolError
from easyckpt.overlap.touch import PageTable
from easyckpt.saver.channel import BlockingChannel, MessageT
from easyckpt.saver.frames import make_failure, read_failure
from easyckpt.saver.protocol import (
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
    Reserve,
    Reserved,
    Seal,
    StageAbort,
    StageAsk,
    StageGrant,
    StageInfo,
    StageQuery,
    StageRefuse,
    WantedChunk,
    Welcome,
)
from easyckpt.saver.protocol import Failure as FailureMessage
from easyckpt.slots import map_private, map_shared

__all__ = ["Grant", "Piece", "RankLink", "Seat", "query"]

CONNECT_TIMEOUT_S = 30.0
ANSWER_TIMEOUT_S = 60.0
BLOCK_TIMEOUT_S = 3660.0
LOAD_TIMEOUT_S = 3600.0
"""A large checkpoint from slow storage."""

OPEN_TIMEOUT_S = 150.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Which rank this is, and where its saver is."""

    socket_path: str
    job_id: str
    generation: int
    rank: int
    world_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A slot to copy into."""

    slot: mmap.mmap
    pages: PageTable
    """Of the slot, in this process."""
    last_layout: str
    """Digest of the layout that this process wrote there last; empty if none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A verified piece to read from; nothing that is written to it reaches the slot."""

    step: int
    tier: str
    body: mmap.mmap
    body_bytes: int
    layout: bytes


class RankLink:
    """See the module.

    Args:
        seat: who we are.
        options: of the checkpointer.

    Raises:
        SaverUnavailable: the saver is not there.
        StaleGeneration: this rank's generation is over.
        Misuse: another rank saves to another folder.
    """

    def __init__(self, seat: Seat, options: Open) -> None:
        self.seat = seat
        self.cost_s = 0.0
        """What the last save cost training, for the lead."""
        self._pid = os.getpid()
        self._turn = threading.RLock()
        self._maps: dict[int, tuple[mmap.mmap, PageTable]] = {}
        self._written: dict[int, str] = {}
        self._granted = 0
        self._known_layouts: set[str] = set()
        self._channel = BlockingChannel(seat.socket_path, timeout_s=CONNECT_TIMEOUT_S)
        try:
            hello = Hello(job_id=seat.job_id, role="worker", generation=seat.generation, rank=seat.rank)
            self._channel.ask(hello, Welcome, timeout_s=CONNECT_TIMEOUT_S)
            self._channel.ask(options, Done, timeout_s=OPEN_TIMEOUT_S)
        except BaseException:
            self._channel.close()
            raise

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise Misuse(
                "a checkpointer cannot be used in a forked process",
                hint="save and load in the process that made it",
            )

    def stage(
        self,
        step: int,
        *,
        layout: bytes,
        layout_digest: str,
        body_bytes: int,
        block: bool,
        metrics: dict[str, float],
    ) -> Grant | StageInfo:
        """Ask for a slot for this step.

        Args:
            step: training step.
            layout: JSON; sent only if the saver does not have it.
            layout_digest: names it.
            body_bytes: room that is needed.
            block: wait while the slots are busy.
            metrics: kept in the manifest.
        """
        self._check_process()
        with self._turn:
            return self._stage(
                StageAsk(
                    step=step,
                    layout=layout,
                    layout_digest=layout_digest,
                    body_bytes=body_bytes,
                    block=block,
                    metrics=metrics,
                    cost_s=self.cost_s,
                )
            )

    def _stage(self, question: StageAsk) -> Grant | StageInfo:
        known = question.layout_digest in self._known_layouts
        timeout_s = BLOCK_TIMEOUT_S if question.block else ANSWER_TIMEOUT_S
        while True:
            asked = msgspec.structs.replace(question, layout=b"") if known else question
            answer = self._channel.ask_any(asked, timeout_s=timeout_s)
            if isinstance(answer, LayoutUnknown) and known:
                known = False
                continue
            break
        self._known_layouts.add(question.layout_digest)
        if isinstance(answer, FailureMessage):
            raise read_failure(answer)
        if isinstance(answer, StageRefuse):
            return StageInfo(
                step=question.step, stage="skipped", reason=answer.reason, not_before=answer.not_before
            )
        if isinstance(answer, StageInfo):
            return answer
        if not isinstance(answer, StageGrant):
            raise ProtocolError(f"{type(answer).__name__} came instead of a grant")
        slot, pages = self._map(answer)
        self._granted = answer.slot
        return Grant(slot=slot, pages=pages, last_layout=self._written.pop(answer.slot, ""))

    def _map(self, answer: StageGrant | Reserved) -> tuple[mmap.mmap, PageTable]:
        """The mapping of a slot, whose descriptor came along if it is ``fresh``.

        Mappings of slots that the saver no longer has are dropped: they alone would keep their memory.
        """
        number = answer.slot
        if answer.fresh:
            fd = self._channel.take_fd()
            try:
                mapping = map_shared(fd, answer.capacity)
            finally:
                os.close(fd)
            self._maps[number] = (mapping, PageTable(mapping))
            self._written.pop(number, None)
        found = self._maps.get(number)
        if found is None:
            raise ProtocolError("the saver names a slot that it never sent", where=self.seat.socket_path)
        for gone in [other for other in self._maps if other not in answer.slots]:
            # Not closed by hand: torch may still hold a view for a moment, and the last one closes it.
            del self._maps[gone]
            self._written.pop(gone, None)
        return found

    def reserve(self, body_bytes: int) -> PageTable | None:
        """Have the saver make the slot that the next save will need, if it lacks one.

        Returns:
            The pages of the slot, none of them present yet in this process; None if nothing is lacking or
            there is no memory, which the save will say.
        """
        self._check_process()
        with self._turn:
            answer = self._ask(Reserve(body_bytes=body_bytes), Reserved)
            if answer.slot < 0:
                return None
            return self._map(answer)[1]

    def _ask(
        self, question: Message, kind: type[MessageT], *, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> MessageT:
        with self._turn:
            return self._channel.ask(question, kind, timeout_s=timeout_s)

    def seal(self, step: int, layout_digest: str) -> None:
        """Every byte is in the slot."""
        self._check_process()
        with self._turn:
            self._written[self._granted] = layout_digest
            self._ask(Seal(step=step), Done)

    def abort(self, step: int, reason: str) -> None:
        """The copy failed."""
        self._ask(StageAbort(step=step, reason=reason), Done)

    def load(self, index: int, step: int | None) -> Piece | LoadOffer | None:
        """The piece of this rank, when all ranks' pieces are ready; or an offer to answer with `want`; None
        if there is nothing to load.

        Call `loaded` when the piece was read.
        """
        self._check_process()
        return self._take_load(Load(index=index, step=step))

    def want(self, index: int, attempt: int, chunks: tuple[WantedChunk, ...]) -> Piece | LoadOffer | None:
        """Say what this rank needs of the step that was offered. The piece holds these chunks
        (`easyckpt.assembly.place`) and has no layout; or the offer is another one."""
        return self._take_load(LoadWant(index=index, attempt=attempt, chunks=chunks))

    def refuse(self, index: int, attempt: int, error: EasyckptError) -> None:
        """This rank cannot take the step that was offered: nobody loads it, and everybody is told."""
        refusal = make_failure(error)
        with contextlib.suppress(EasyckptError):  # the answer is this very error
            self._take_load(LoadWant(index=index, attempt=attempt, refusal=refusal))

    def reshape(self, index: int) -> LoadOffer:
        """The piece of this rank lacks something: what the pieces of all ranks have."""
        return self._ask(LoadReshape(index=index), LoadOffer, timeout_s=LOAD_TIMEOUT_S)

    def _take_load(self, question: Load | LoadWant) -> Piece | LoadOffer | None:
        with self._turn:
            return self._take_answer(self._channel.ask_any(question, timeout_s=LOAD_TIMEOUT_S))

    def _take_answer(self, answer: Message) -> Piece | LoadOffer | None:
        if isinstance(answer, FailureMessage):
            raise read_failure(answer)
        if isinstance(answer, LoadOffer):
            return answer
        if not isinstance(answer, LoadReady):
            raise ProtocolError(f"{type(answer).__name__} came instead of a piece")
        if answer.step is None:
            return None
        fd = self._channel.take_fd()
        try:
            body = map_private(fd, answer.capacity)
        finally:
            os.close(fd)
        return Piece(
            step=answer.step,
            tier=answer.tier,
            body=body,
            body_bytes=answer.body_bytes,
            layout=answer.layout,
        )

    def loaded(self, index: int) -> None:
        """The piece was read; its slot may be overwritten in time."""
        self._ask(Loaded(index=index), Done)

    def query(self, step: int) -> StageInfo:
        """How far a step is."""
        question = StageQuery(step=step, generation=self.seat.generation)
        return self._ask(question, StageInfo)

    def goodbye(self, timeout_s: float) -> Closed:
        """Have the newest step made durable, and take leave."""
        self._check_process()
        question = Close(timeout_s=timeout_s)
        return self._ask(question, Closed, timeout_s=timeout_s + ANSWER_TIMEOUT_S)

    def close(self) -> None:
        """End the connection. Without `goodbye` the saver lingers, and then makes the newest step durable."""
        self._channel.close()
        self._maps.clear()


def query(seat: Seat, step: int, *, stage: str, timeout_s: float) -> StageInfo:
    """Wait on a connection of its own until a step got to a stage, or cannot, or the time is over.

    Raises:
        SaverUnavailable: the saver is gone.
    """
    channel = BlockingChannel(seat.socket_path, timeout_s=CONNECT_TIMEOUT_S)
    try:
        channel.ask(Hello(job_id=seat.job_id, role="visitor"), Welcome, timeout_s=CONNECT_TIMEOUT_S)
        question = StageQuery(step=step, generation=seat.generation, stage=stage, timeout_s=timeout_s)
        return channel.ask(question, StageInfo, timeout_s=timeout_s + ANSWER_TIMEOUT_S)
    finally:
        channel.close()
