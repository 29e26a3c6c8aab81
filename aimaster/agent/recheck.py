"""Looking at this node when a suspicion falls on it, while workers run or before they start again.

Passive checks of sanitycheck alone, which load no processor and no device: they ask the driver, the kernel
and the file systems. While workers go on, the probes run with the least priority. After a failure that may
lie in the node, the workers start again only when the look is over; what would make training fail there
keeps them from it, and the master is told why. A look that cannot be made keeps nobody from anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import sanitycheck
from aimaster.agent.reports import WorkerExit
from aimaster.agent.spoken import say
from aimaster.config import CheckMode, RunConfig
from aimaster.core.diagnosis import Failure, Rule, find
from aimaster.core.events import FINDINGS_MAX, NodeChecked, NodeEvent, Suspicion
from aimaster.core.suspicion import falls_on_node, worth_a_look
from aimaster.ids import Generation
from aimaster.rpc.limits import NOTE_CHARS_MAX, clip
from aimaster.rpc.messages import Identity
from sanitycheck.render.sentences import describe

Rules = Callable[[], Sequence[Rule]]
"""Reads the rules of diagnosis."""

LOOK_S = 60.0
"""For a whole look; a healthy node answers in about a second, and half of it proves a mount dead.

The master waits longer for a node to prepare (`aimaster.core.policy.Timeouts`)."""
LEAST_PRIORITY = 19

_DEVICES = (
    "gpu.inventory",
    "gpu.recovery_action",
    "gpu.ecc",
    "gpu.remap",
    "gpu.throttle",
    "gpu.xid_recent",
    "link.nvlink",
    "link.fabric",
)
_HOST = ("host.cpu_mem", "host.limits", "host.disk", "host.kernel")
_NETWORK = ("net.clock", "net.rdma_ports", "net.rdma_counters")
_ALL = (*_DEVICES, *_HOST, *_NETWORK, "store.mounts", "store.ckpt_path")

CHECKS: Mapping[Suspicion, tuple[str, ...]] = {
    Suspicion.FAILURE: _ALL,
    Suspicion.HANG: _ALL,
    Suspicion.SLOW: (*_DEVICES, "host.cpu_mem", "host.kernel", *_NETWORK),
    Suspicion.SILENCE: (*_HOST, *_NETWORK),
}
"""What is looked at. `store.ckpt_path` writes a few bytes, so it is no part of a look while workers go on."""


class Rechecks:
    """Looks at this node, one look at a time. Used on the agent's event loop alone."""

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        *,
        rules: Rules,
        report: Callable[[NodeEvent], None],
    ) -> None:
        """Nothing is looked at yet.

        Args:
            config: Of the run: whether to check, and what is expected of the node.
            identity: Who reports.
            rules: Reads the rules of diagnosis; called in another thread when a worker has failed.
            report: Takes facts for the master.
        """
        self._config = config
        self._identity = identity
        self._rules = rules
        self._report = report
        self._look: asyncio.Task[None] | None = None
        self._begun_s: float | None = None
        self._cancel = threading.Event()
        self._against = ""
        self.note = ""
        """What the newest look found, for the node's notes; empty before the first."""

    def suspect(self, why: Suspicion, generation: Generation) -> None:
        """Look at what the suspicion is about, unless that was done a moment ago."""
        now = time.monotonic()
        since = None if self._begun_s is None else now - self._begun_s
        if self._config.check.mode is CheckMode.OFF or not worth_a_look(why, since_last_s=since):
            return
        self._begun_s = now
        self._follow(self._looked(why, generation))

    def worker_ended(self, ended: WorkerExit) -> None:
        """A worker ended by itself: look at the node if the rules say that it may be why."""
        if self._config.check.mode is CheckMode.OFF or ended.ok or not ended.error:
            return
        failure = Failure(
            kinds=frozenset({"worker_failed" if ended.signal is None else "worker_killed"}),
            node=self._identity.node,
            rank=ended.rank,
            exit_code=ended.exit_code,
            signal=ended.signal,
            text=ended.error,
        )
        self._follow(self._judge(failure, ended.generation))

    async def settled(self, generation: Generation, *, unless: asyncio.Event) -> str | None:
        """Wait until nothing is being looked at.

        Args:
            generation: That wants to know.
            unless: Ends the wait, when there is something else to do; the look itself goes on.

        Returns:
            Why no workers may start here, for people; empty where they may; None when the wait was ended.
            What was found once is looked at again at each call, so that a node that was mended is used again.
        """
        if self._look is None and self._against:
            self.suspect(Suspicion.FAILURE, generation)
        while self._look is not None:
            look = self._look
            if not await _ended(look, unless=unless):
                return None
            if self._look is look:
                self._look = None
        return self._against if self._config.check.mode is CheckMode.ENFORCE else ""

    async def close(self) -> None:
        """End what is being looked at, and its probes."""
        self._cancel.set()
        if self._look is not None:
            self._look.cancel()
            await asyncio.gather(self._look, return_exceptions=True)
            self._look = None

    def _follow(self, next_look: Coroutine[None, None, None]) -> None:
        """One after the other: a look that is under way ends first."""
        before = self._look

        async def both() -> None:
            if before is not None:
                await asyncio.gather(before, return_exceptions=True)
            await next_look

        self._look = asyncio.create_task(both(), name="recheck")

    async def _judge(self, failure: Failure, generation: Generation) -> None:
        rules = await asyncio.get_running_loop().run_in_executor(None, self._rules)
        if falls_on_node(find(rules, failure)):
            await self._looked(Suspicion.FAILURE, generation)

    async def _looked(self, why: Suspicion, generation: Generation) -> None:
        self._begun_s = time.monotonic()
        report = await self._run(why)
        if report is None:
            return
        verdicts = (sanitycheck.Verdict.FAIL, sanitycheck.Verdict.WARN)
        bad = sorted(report.with_verdict(*verdicts), key=lambda result: not result.blocking)
        looked = sum(
            result.verdict not in (sanitycheck.Verdict.UNKNOWN, sanitycheck.Verdict.SKIPPED)
            for result in report.results
        )
        lines = tuple(_line(one) for one in bad)
        blocking = [line for line, one in zip(lines, bad, strict=True) if one.blocking]
        if why in (Suspicion.FAILURE, Suspicion.HANG):
            self._against = "; ".join(blocking)
        self.note = f"checked ({why.value}): {'; '.join(lines) or f'nothing found by {looked} checks'}"
        say(f"node {self._identity.node}: {self.note}")
        self._report(
            NodeChecked(
                node=self._identity.node,
                incarnation=self._identity.incarnation,
                generation=generation,
                why=why,
                looked=looked,
                findings=lines[:FINDINGS_MAX],
                blocking=bool(blocking),
            )
        )

    async def _run(self, why: Suspicion) -> sanitycheck.Report | None:
        workers_run = why in (Suspicion.SLOW, Suspicion.SILENCE)
        options = sanitycheck.Options(
            only=CHECKS[why],
            local_workers=self._config.nodes.nproc,
            nnodes=self._config.nodes.max,
            ckpt_path=self._config.checkpoint.ckpt_dir,
        )

        def run() -> sanitycheck.Report:
            if workers_run:
                # Of this thread alone, and inherited by the probes; the thread ends with the look.
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)
            return sanitycheck.run(level="quick", options=options, timeout_s=LOOK_S, cancel=self._cancel)

        with contextlib.closing(_Thread()) as thread:
            task = asyncio.get_running_loop().run_in_executor(thread, run)
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                self._cancel.set()
                await asyncio.gather(task, return_exceptions=True)
                raise
            except (sanitycheck.SanitycheckError, OSError) as error:
                say(f"the node could not be checked ({error}); going on without it")
                return None


async def _ended(look: asyncio.Task[None], *, unless: asyncio.Event) -> bool:
    """Wait for a look; False when it goes on and the wait was ended."""
    called = asyncio.create_task(unless.wait(), name="called-away")
    try:
        await asyncio.wait((look, called), return_when=asyncio.FIRST_COMPLETED)
    finally:
        called.cancel()
    if not look.done():
        return False
    look.result()
    return True


def _line(result: sanitycheck.Result) -> str:
    """The worst that a check found."""
    text = f"{result.check}: {result.verdict.value}, {describe(result.findings[0])}"
    return clip(" ".join(text.split()), NOTE_CHARS_MAX)


class _Thread(ThreadPoolExecutor):
    """One thread for one look, since probes end with the thread that started them."""

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="recheck")

    def close(self) -> None:
        """Let the thread end when it has nothing left to do."""
        self.shutdown(wait=False)
