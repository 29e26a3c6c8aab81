"""All who watch a job from its master: Prometheus, targets of notices, TensorBoard. None can hold it up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from aimaster.clock import Clock
from aimaster.core.notices import Notices
from aimaster.ids import JobId
from aimaster.journal.base import Entry
from aimaster.master.metrics import MetricsServer
from aimaster.master.notify import Notifier, body_of
from aimaster.master.options import WatchOptions
from aimaster.master.tensorboard import EVERY_S, Board
from aimaster.rpc.status import JobStatus

log = logging.getLogger(__name__)


class Audience:
    """Used on the master's event loop.

    Args:
        options: who watches.
        job: for the notices.
        clock: the machine's.
        in_trouble: whether an incident is not overcome yet.
    """

    def __init__(self, options: WatchOptions, *, job: JobId, clock: Clock, in_trouble: bool) -> None:
        self._options, self._job, self._clock = options, job, clock
        self._notices = Notices(in_trouble=in_trouble)
        self._notifier = Notifier(options.targets)
        self._metrics: MetricsServer | None = None
        self._drawing: asyncio.Task[None] | None = None

    async def start(self, status: Callable[[], JobStatus]) -> None:
        """Begin to show the job.

        Raises:
            PortInUse: somebody listens where the metrics are to be served.
            SetupError: they cannot be served for another reason.
        """
        options = self._options
        if options.metrics is not None:
            self._metrics = MetricsServer(options.metrics, token=options.metrics_token, status=status)
            log.info("metrics at http://%s/metrics", await self._metrics.start())
        if options.tensorboard is not None:
            self._drawing = asyncio.create_task(self._draw(status), name="tensorboard")

    def told(self, entry: Entry) -> None:
        """A step that is in the journal."""
        notice = self._notices.take(entry.record.event, entry.record.decision)
        if notice is not None:
            self._notifier.put(body_of(notice, job=self._job, at_wall_s=entry.record.wall_s))

    async def close(self) -> None:
        """Let what is queued be said, within a bound."""
        if self._metrics is not None:
            await self._metrics.stop()
        if self._drawing is not None:
            self._drawing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._drawing
        await asyncio.to_thread(self._notifier.close)

    async def _draw(self, status: Callable[[], JobStatus]) -> None:
        """Trouble with the folder ends the curves and nothing else."""
        assert self._options.tensorboard is not None
        try:
            board = await asyncio.to_thread(Board, self._options.tensorboard)
            try:
                while True:
                    await asyncio.to_thread(board.write, status(), wall_s=self._clock.wall())
                    await asyncio.sleep(EVERY_S)
            finally:
                await asyncio.to_thread(board.write, status(), wall_s=self._clock.wall())
                await asyncio.to_thread(board.close)
        except (OSError, ImportError) as error:
            log.warning("no curves for TensorBoard any more: %s", error)
