"""One master process from start to end: port, journal, "ready", lead, hang up.

The port is taken before the journal is opened: where several agents of one machine try to host, the one that
gets the port hosts, and the others learn that it is taken. Nobody is answered before the journal is replayed.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

from aimaster.clock import SystemClock
from aimaster.master.audience import Audience
from aimaster.master.options import MasterOptions
from aimaster.master.recovery import stand_up
from aimaster.master.service import MasterService
from aimaster.rpc.transport import Endpoint, bind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What is known once a master answers."""

    endpoint: Endpoint
    epoch: int
    replayed: int
    """Entries of earlier lives; 0 for a new job."""


async def lead(options: MasterOptions, *, ready: Callable[[Begun], None], revived: bool = False) -> None:
    """Lead the job until it is over or the process is told to end.

    Args:
        options: What the master is told at its start.
        ready: Called once agents are answered.
        revived: Whether this master takes the place of one that died while its job went on; then a journal
            whose job is over is served to its end instead of being set aside.

    Raises:
        PortInUse: somebody listens there.
        AlreadyRunning: another master leads this job with this state folder.
        SetupError: port, folder or journal cannot be used, or the metrics' port.
    """
    bound = bind(options.listen, options.credentials)
    try:
        standing = stand_up(options.state_dir, policy=options.policy, clock=SystemClock(), revived=revived)
    except BaseException:
        await bound.server.stop(None)
        raise
    clock = SystemClock()
    told = standing.incidents.told()
    in_trouble = bool(told) and told[-1].recovered_s is None
    audience = Audience(options.watch, job=options.job, clock=clock, in_trouble=in_trouble)
    service = MasterService(options, standing, bound=bound, told=audience.told)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    try:
        await audience.start(service.status)
        await service.start()
        ready(Begun(endpoint=bound.endpoint, epoch=standing.life.epoch, replayed=standing.replayed))
        log.info("leads job %s at %s, epoch %d", options.job, bound.endpoint, standing.life.epoch)
        await _first(service.run(), stopped.wait())
    finally:
        await service.close()
        await audience.close()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _first(*coroutines: Coroutine[object, object, object]) -> None:
    """Until one of them ends; the other is cancelled."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
