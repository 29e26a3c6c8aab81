"""The single writer: steps the machine, journals what it decided, then has it carried out. One at a time.

Events from sessions, timers and the failure detector meet in one bounded queue. The loop takes what waits as
a batch, steps the machine through it and writes all of it in one transaction, because a burst of a thousand
failures must not cost a thousand flushes. Only then are commands sent and facts acknowledged: what somebody
was told is always in the journal.

The journal is written on a thread of its own, so that a slow disk delays decisions but no heartbeat. A full
disk is waited for: training goes on, and the master decides again when there is room.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from aimaster.core.commands import Decision, Reason
from aimaster.core.events import Event, WorkerExited
from aimaster.core.transitions import IllegalEvent
from aimaster.errors import NoSpace
from aimaster.journal.base import Entry, Record
from aimaster.master.recovery import Standing

EVENTS_WAITING_MAX = 20_000
"""Beyond it sessions are not read from until the journal has caught up."""
BATCH_MAX = 256
"""Most events in one transaction."""
FULL_DISK_RETRY_S = 2.0

log = logging.getLogger(__name__)

Outcome = Decision | IllegalEvent
"""What became of an event; an illegal one changed nothing and is not in the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One event, and who wants to know what became of it."""

    event: Event
    done: Callable[[Outcome], None] | None = None


class Ledger:
    """Owns machine and journal. Used on one event loop.

    Args:
        standing: Where this life of the master begins.
        carry_out: Called with every journalled step, in order; must not block.
    """

    def __init__(self, standing: Standing, *, carry_out: Callable[[Entry], None]) -> None:
        self._machine = standing.machine
        self._journal = standing.journal
        self._clock = standing.clock
        self._epoch = standing.life.epoch
        self._carry_out = carry_out
        self._queue: asyncio.Queue[Work] = asyncio.Queue()
        self._emptied = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")
        self.trouble = ""
        """Why nothing can be journalled at the moment; empty when it can."""

    async def room(self) -> None:
        """Wait while too many events do. Queueing itself never waits, so that nothing is lost half-way."""
        while self._queue.qsize() >= EVENTS_WAITING_MAX:
            self._emptied.clear()
            await self._emptied.wait()

    def put(self, event: Event, done: Callable[[Outcome], None] | None = None) -> None:
        """Queue an event; `done` is called once it is journalled and carried out."""
        self._queue.put_nowait(Work(event=event, done=done))

    async def settle(self, event: Event) -> Outcome:
        """Queue an event and wait until it is journalled and carried out."""
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

        def done(outcome: Outcome) -> None:
            if not future.done():
                future.set_result(outcome)

        await self.room()
        self.put(event, done)
        return await future

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            AimasterError: the journal cannot be written for a reason that waiting does not mend.
        """
        while True:
            batch = [await self._queue.get()]
            while len(batch) < BATCH_MAX and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            self._emptied.set()
            await self._write(batch)

    def close(self) -> None:
        """Close the journal, after a write that is under way."""
        self._thread.shutdown(wait=True)
        self._journal.close()

    async def _write(self, batch: list[Work]) -> None:
        answered = [(work, self._step(work.event)) for work in batch]
        records = [answer for _, answer in answered if isinstance(answer, Record)]
        records = [record for record in records if _is_worth_a_line(record)]
        entries: dict[int, Entry] = {}
        if records:
            last = await self._append(records)
            for seq, record in enumerate(records, start=last - len(records) + 1):
                entries[id(record)] = Entry(seq=seq, epoch=self._epoch, record=record)
        for work, answer in answered:
            if isinstance(answer, Record) and id(answer) in entries:
                self._carry_out(entries[id(answer)])
            if work.done is not None:
                work.done(answer.decision if isinstance(answer, Record) else answer)

    def _step(self, event: Event) -> Record | IllegalEvent:
        now = self._clock.now()
        try:
            decision = self._machine.step(event, now)
        except IllegalEvent as error:
            log.warning("illegal event: %s", error)
            return error
        digest = self._machine.digest()
        return Record(event=event, decision=decision, digest=digest, at_s=now, wall_s=self._clock.wall())

    async def _append(self, records: list[Record]) -> int:
        loop = asyncio.get_running_loop()
        while True:
            try:
                last = await loop.run_in_executor(self._thread, self._journal.append, records)
            except NoSpace as error:
                if not self.trouble:
                    log.error("%s", error)  # the sentence says it all
                self.trouble = str(error)
                await asyncio.sleep(FULL_DISK_RETRY_S)
            else:
                self.trouble = ""
                return last


def _is_worth_a_line(record: Record) -> bool:
    """What came too late changed nothing and may come often; a worker's end is told all the same."""
    stale = record.decision.reason is Reason.STALE and not record.decision.commands
    return not stale or isinstance(record.event, WorkerExited)
