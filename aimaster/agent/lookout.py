"""What the agent watches while workers run, and tells the master unasked.

First steps, restores and committed steps become facts. A look costs a read of shared memory and one question
to the saver; it is frequent until the first step is done, since a recovery ends with it, and rare afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import replace

from aimaster.agent.duties import Duties
from aimaster.agent.workers import Workers
from aimaster.core.commands import StartWorkers
from aimaster.core.events import FirstStepDone, NodeEvent, StepCommitted
from aimaster.ids import NO_GENERATION, Generation
from aimaster.integrations.easyckpt import NodeSaver
from aimaster.rpc.messages import Identity
from aimaster.rpc.waiting import within

EAGER_S = 0.05
"""Between two looks until the first step of an attempt is done."""
CALM_S = 0.5


class Lookout:
    """Looks at workers and saver in turn. Used on the agent's event loop alone."""

    def __init__(
        self,
        identity: Identity,
        *,
        duties: Duties,
        workers: Workers,
        saver: NodeSaver,
        report: Callable[[NodeEvent], None],
    ) -> None:
        self._identity = identity
        self._duties = duties
        self._workers = workers
        self._saver = saver
        self._report = report
        self._stepped: Generation = NO_GENERATION

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            order = self._duties.running
            await self.look_at_saver()
            if order is not None and self._stepped != order.generation:
                self._look_for_first_step(order)
            eager = order is not None and self._stepped != order.generation
            with contextlib.suppress(asyncio.TimeoutError):
                await within(EAGER_S if eager else CALM_S, self._duties.started.wait())
            self._duties.started.clear()

    async def look_at_saver(self) -> None:
        """Pass on what the saver has to tell; also once more at the end."""
        for fact in await self._saver.news(self._identity):
            if isinstance(fact, StepCommitted):
                fact = replace(fact, stalled_s=self._held_s())
            self._report(fact)

    def _held_s(self) -> float:
        """For how long saving has held this attempt's training: the ranks go together."""
        return max((one.record.held_s for one in self._workers.ranks() if one.record), default=0.0)

    def _look_for_first_step(self, order: StartWorkers) -> None:
        progress = self._workers.progress()
        if not progress or any(rank.steps < 1 for rank in progress):
            return
        self._stepped = order.generation
        steps = max(rank.steps for rank in progress)
        records = [one.record for one in self._workers.ranks() if one.record is not None]
        self._report(
            FirstStepDone(
                node=self._identity.node,
                incarnation=self._identity.incarnation,
                generation=order.generation,
                step=self._saver.step_of(order.generation, steps) or steps,
                load_s=max((one.load_s for one in records), default=0.0),
                warm_up_s=max((one.warm_up_s for one in records), default=0.0),
            )
        )
