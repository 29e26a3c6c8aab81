"""Making slots beside the event loop: reserving memory takes a tenth of a second for each GB.

A slot is made when a piece needs one, and, when a worker asks for it, ahead of its next save, so that two
saves in a row find both of theirs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from easyckpt.errors import MemoryFull
from easyckpt.saver.holdings import Holdings
from easyckpt.saver.protocol import Held, Key
from easyckpt.slots import Slot

__all__ = ["Reserver"]

_LOG = logging.getLogger("easyckpt.saver")


class Reserver:
    """See the module. Runs in the saver's event loop."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self._making: set[asyncio.Task[None]] = set()

    async def clear_way(self, held: Held, *, body_bytes: int, protect: tuple[Key, ...]) -> None:
        """Have a slot ready for `Holdings.place`.

        Raises:
            SlotsBusy: both slots of the rank are protected or pinned.
            MemoryFull: there is no memory for a slot of this size.
        """
        make = self._holdings.clear_way(held, body_bytes=body_bytes, protect=protect)
        if make is not None:
            await self._make(held.rank, make)

    async def beside(self, held: Held, *, body_bytes: int) -> None:
        """Have a slot ready for `Holdings.place_beside` in parts.

        Raises:
            SlotsBusy: the very piece is here and in use.
            MemoryFull: there is no memory for a third slot.
        """
        make = self._holdings.clear_beside(held, body_bytes=body_bytes)
        if make is not None:
            await self._make(held.rank, make)

    async def ahead(self, rank: int, body_bytes: int) -> Slot | None:
        """The free slot that the rank's next save will use; None if both are in use or memory is short."""
        try:
            make = self._holdings.lacking(rank, body_bytes)
            if make is not None:
                await self._make(rank, make)
        except MemoryFull as error:  # the save itself will say so, on every rank
            _LOG.info("no slot is made ahead: %s", error)
        return self._holdings.free_slot(rank, body_bytes)

    async def _make(self, rank: int, make: Callable[[], Slot]) -> None:
        # What is being made is kept even if nobody waits for it any more: a slot has no name to find it by.
        task = asyncio.ensure_future(self._make_and_keep(rank, make))
        self._making.add(task)
        task.add_done_callback(self._making.discard)
        await asyncio.shield(task)

    async def _make_and_keep(self, rank: int, make: Callable[[], Slot]) -> None:
        self._holdings.add_slot(rank, await asyncio.get_running_loop().run_in_executor(None, make))
