"""Looks at ranks that stand still, and says what it sees of each; decides nothing.

A rank that makes steps costs one read of shared memory per look. One that has stood still for a second is
looked at in the kernel's counters, with all processes that came from it; one that stands still for longer
than its steps lately took, also in its Python stack, at first every second, then ever less often. So a
training with slow steps is hardly looked at, and one that hangs is understood within seconds.

All durations are on an observed clock: a look that comes late (the machine was paused, or the agent was
starved) counts as one interval, however late it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from aimaster.agent import asking, counters, proc
from aimaster.agent.counters import Counters
from aimaster.agent.ranks import RankState
from aimaster.agent.spy import Dump, Spy
from aimaster.core.sights import COLLECTIVE_CHARS_MAX, Activity, Sight, Wait
from aimaster.core.stacks import in_loader, kind_of, short, text_of
from aimaster.rpc.limits import STACKS_MAX

LOOK_S = 0.5
LATE_S_MAX = 1.5
"""A look that comes later than that after the last one did not observe the time between."""
COUNTERS_AFTER_S = 1.0
STACKS_AFTER_S = 1.5
PATIENCE = 1.5
"""Stacks are read when a rank stands still for so many times its longest step lately."""
RECENT_STEPS = 20
BACKOFF_S = (1.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Between two looks at the stack of one rank while it stands still."""
IDLE_CPU_SHARE = 0.05
"""Of one processor, for the whole tree: the threads of a transport that poll use a percent or two."""
IDLE_BYTES_PER_S = 64 * 1024
DATA_WORKERS_MAX = 16
"""Processes below a rank whose stacks are read when the rank waits for data."""


class ObservedClock:
    """Seconds during which the agent was awake."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last = clock()
        self.now_s = 0.0

    def tick(self) -> float:
        """Look at the clock; time beyond `LATE_S_MAX` since the last look was not observed."""
        now = self._clock()
        self.now_s += min(max(0.0, now - self._last), LATE_S_MAX)
        self._last = now
        return self.now_s


@dataclass(slots=True)
class _Stack:
    """What the newest look at the stack said, and since when it says so."""

    wait: Wait
    where: str
    text: str
    since_s: float
    seen_s: float


@dataclass(slots=True)
class _Watched:
    """One rank in one process."""

    pid: int
    steps: int
    moved_s: float
    """When it last finished a step, on the observed clock."""
    recent: list[float] = field(default_factory=list)
    counters: Counters | None = None
    counted_s: float = 0.0
    idle_since_s: float | None = None
    activity: Activity = Activity.UNKNOWN
    stack: _Stack | None = None
    looks: int = 0
    next_look_s: float = 0.0
    switches: dict[int, int] = field(default_factory=dict)
    collective: str = ""


class Witness:
    """Watches the ranks of this node. Used on the agent's event loop alone.

    Args:
        ranks: The ranks that are there.
        folder: The run directory, where ranks answer questions.
        spy: Reads stacks.
        clock: The agent's.
    """

    def __init__(
        self, ranks: Callable[[], tuple[RankState, ...]], *, folder: Path, spy: Spy, clock: ObservedClock
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._spy = spy
        self.clock = clock
        self._watched: dict[int, _Watched] = {}

    @property
    def trouble(self) -> str:
        """What turned out not to be possible here; empty where nothing did."""
        return self._spy.trouble

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Look at every rank once."""
        now = self.clock.tick()
        subjects = self._ranks()
        here = {subject.local_rank for subject in subjects}
        for gone in [rank for rank in self._watched if rank not in here]:
            asking.forget(self._folder, self._watched.pop(gone).pid)
        still = [s for s in subjects if not s.ended and self._note_steps(s, now) >= COUNTERS_AFTER_S]
        if not still:
            return
        everything = proc.everything()
        for subject in still:
            watched = self._watched[subject.local_rank]
            children = counters.below(subject.pid, everything)
            self._count(watched, children, now)
            if self._wants_stack(watched, now):
                await self._read_stack(watched, children)

    def sights(self) -> tuple[dict[int, Sight], tuple[str, ...]]:
        """What is seen of each local rank, and the distinct stacks that the sights point into."""
        stacks: list[str] = []
        sights: dict[int, Sight] = {}
        for subject in self._ranks():
            watched = self._watched.get(subject.local_rank)
            if subject.ended:
                sights[subject.local_rank] = Sight(still_s=0.0, activity=Activity.ENDED)
            elif watched is not None and watched.pid == subject.pid:
                sights[subject.local_rank] = self._sight(watched, stacks)
        return sights, tuple(stacks)

    def _sight(self, watched: _Watched, stacks: list[str]) -> Sight:
        now, stack = self.clock.now_s, watched.stack
        index = -1
        if stack is not None and stack.text:
            if stack.text not in stacks and len(stacks) < STACKS_MAX:
                stacks.append(stack.text)
            index = stacks.index(stack.text) if stack.text in stacks else -1
        return Sight(
            still_s=max(0.0, now - watched.moved_s),
            activity=watched.activity,
            idle_s=0.0 if watched.idle_since_s is None else max(0.0, now - watched.idle_since_s),
            wait=Wait.UNKNOWN if stack is None else stack.wait,
            wait_s=0.0 if stack is None else stack.seen_s - stack.since_s,
            where="" if stack is None else stack.where,
            collective=watched.collective[:COLLECTIVE_CHARS_MAX],
            stack=index,
        )

    def _note_steps(self, subject: RankState, now: float) -> float:
        """How long the rank has stood still."""
        steps = subject.record.steps if subject.record else 0
        watched = self._watched.get(subject.local_rank)
        if watched is not None and watched.pid != subject.pid:
            asking.forget(self._folder, watched.pid)
        if watched is None or watched.pid != subject.pid or steps < watched.steps:
            self._watched[subject.local_rank] = _Watched(subject.pid, steps, now)
            return 0.0
        if steps == watched.steps:
            return now - watched.moved_s
        # The page says when on the monotonic clock; between two looks both clocks run alike.
        beat_s = now
        if subject.record is not None:
            beat_s = max(watched.moved_s, now - (time.monotonic_ns() - subject.record.beat_ns) / 1e9)
        watched.recent.append((beat_s - watched.moved_s) / (steps - watched.steps))
        del watched.recent[:-RECENT_STEPS]
        self._watched[subject.local_rank] = _Watched(subject.pid, steps, beat_s, watched.recent)
        return max(0.0, now - beat_s)

    def _count(self, watched: _Watched, children: list[int], now: float) -> None:
        found = counters.read_tree(watched.pid, children)
        before, watched.counters = watched.counters, found
        elapsed_s, watched.counted_s = now - watched.counted_s, now
        if found is None:
            watched.activity, watched.idle_since_s = Activity.UNKNOWN, None
        elif found.traced:
            watched.activity, watched.idle_since_s = Activity.TRACED, None
        elif before is None:
            watched.activity = Activity.STOPPED if found.stopped else Activity.UNKNOWN
        else:
            watched.activity = _activity(before, found, elapsed_s)
            if watched.activity in (Activity.ACTIVE, Activity.MOVING):
                watched.idle_since_s = None
            elif watched.idle_since_s is None:
                watched.idle_since_s = now - elapsed_s

    def _wants_stack(self, watched: _Watched, now: float) -> bool:
        longest_s = max(watched.recent, default=0.0)
        patience_s = max(STACKS_AFTER_S, PATIENCE * longest_s)
        return now - watched.moved_s >= patience_s and now >= watched.next_look_s

    async def _read_stack(self, watched: _Watched, children: list[int]) -> None:
        # The answer to a question is there at the next look, if at all; the last one that was given stays.
        if watched.looks > 0:
            watched.collective = asking.answer(self._folder, watched.pid) or watched.collective
        asking.ask(self._folder, watched.pid)
        dump = await self._spy.dump(watched.pid)
        now = self.clock.now_s
        wait, where = await self._understand(watched, dump, children)
        text = text_of(dump.frames) if dump is not None else ""
        before = watched.stack
        same = before is not None and (before.wait, before.where, before.text) == (wait, where, text)
        since_s = before.since_s if before is not None and same else now
        watched.stack = _Stack(wait, where, text, since_s, now)
        watched.next_look_s = now + BACKOFF_S[min(watched.looks, len(BACKOFF_S) - 1)]
        watched.looks += 1

    async def _understand(
        self, watched: _Watched, dump: Dump | None, children: list[int]
    ) -> tuple[Wait, str]:
        if dump is None or not dump.frames:
            return Wait.UNKNOWN, ""
        wait, where = kind_of(dump.frames)
        if wait is Wait.DEBUGGER:
            return wait, where
        if dump.holder is not None and self._is_locked(watched, [watched.pid], only=dump.holder):
            return Wait.INTERPRETER, short(dump.frames[0])
        if in_loader(dump.frames):
            return await self._look_at_data_workers(watched, children)
        return wait, where

    async def _look_at_data_workers(self, watched: _Watched, children: list[int]) -> tuple[Wait, str]:
        """Whether those data workers that have work all wait for locks that nobody can give back."""
        locked = ""
        for pid in children[:DATA_WORKERS_MAX]:
            dump = await self._spy.dump(pid)
            if dump is None:
                continue
            if _waits_for_work(dump):
                continue
            if not self._is_locked(watched, [pid]):
                return Wait.OTHER, "data worker: " + short(dump.frames[0]) if dump.frames else "data worker"
            locked = "data worker: " + (short(dump.frames[0]) if dump.frames else "in a lock")
        return (Wait.LOCKED, locked) if locked else (Wait.OTHER, "data loader")

    def _is_locked(self, watched: _Watched, pids: list[int], *, only: int | None = None) -> bool:
        """Whether threads wait on a futex (or sleep, holding the interpreter) and have not once woken."""
        found = [t for pid in pids for t in counters.threads(pid) if only in (None, t.tid)]
        locked = bool(found)
        for thread in found:
            fits = thread.in_lock or (only is not None and thread.in_sleep)
            if not fits or watched.switches.get(thread.tid, thread.switches) != thread.switches:
                locked = False
            watched.switches[thread.tid] = thread.switches
        return locked


def _activity(before: Counters, now: Counters, elapsed_s: float) -> Activity:
    if now.stopped:
        return Activity.STOPPED
    if elapsed_s <= 0:
        return Activity.UNKNOWN
    moved = now.bytes_moved - before.bytes_moved
    if moved > IDLE_BYTES_PER_S * elapsed_s:
        return Activity.MOVING
    used_s = now.cpu_s - before.cpu_s
    if now.runnable or used_s > max(IDLE_CPU_SHARE * elapsed_s, 2 * counters.TICK_S):
        return Activity.ACTIVE
    return Activity.IDLE


def _waits_for_work(dump: Dump) -> bool:
    """Whether a data worker waits for the next index: the loader's own loop, outside of the data set."""
    names = {f.name.rpartition(".")[2] for f in dump.frames}
    return "_worker_loop" in names and "fetch" not in names
