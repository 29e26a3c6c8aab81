"""A member's connection to the saver that leads its generation, kept up for as long as the generation lasts.

On node rank 0 the lead is in the same process: messages go over the event loop's queue, in the same order and
with the same types as over TCP, so that one node and many behave alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from easyckpt.errors import EasyckptError
from easyckpt.saver.channel import AsyncChannel
from easyckpt.saver.lead import Lead
from easyckpt.saver.member import Member
from easyckpt.saver.peering import Link
from easyckpt.saver.protocol import Message
from easyckpt.saver.replicate import Dialer

__all__ = ["Outbox", "join_local", "pump", "stay_linked"]

RECONNECT_FIRST_S = 0.02
RECONNECT_MAX_S = 2.0
OUTBOX_MAX = 100_000
"""Messages that wait for one slow connection; more means that it is dead."""

_LOG = logging.getLogger("easyckpt.saver")


def join_local(lead: Lead, member: Member) -> None:
    """Connect a member with the lead in the same process."""
    loop = asyncio.get_running_loop()

    def to_member(message: Message) -> None:
        loop.call_soon(member.receive, message)

    def to_lead(message: Message) -> None:
        loop.call_soon(lead.receive, member.begin.node_rank, message, to_member)

    member.connected(to_lead)


async def stay_linked(member: Member, dialer: Dialer) -> None:
    """Connect a member with a lead elsewhere, again and again, until cancelled.

    A saver that has not begun the generation yet hangs up at once: only a connection on which something came
    makes the next pause a short one.
    """
    pause = RECONNECT_FIRST_S
    address = member.begin.lead_address

    def receive(message: Message) -> None:
        nonlocal pause
        pause = RECONNECT_FIRST_S
        member.receive(message)

    while True:
        try:
            channel = await dialer.connect(address)
        except EasyckptError as error:
            _LOG.info("the lead at %s: %s", address, error)
        else:
            try:
                await channel.send(Link())
                outbox = Outbox(channel)
                member.connected(outbox.put)
                await pump(channel, outbox, receive)
            except (OSError, EOFError, EasyckptError) as error:
                said = error if str(error) else type(error).__name__
                _LOG.info("the connection to the lead at %s ended: %s", address, said)
            finally:
                member.disconnected()
                channel.close()
        await asyncio.sleep(pause)
        pause = min(pause * 2, RECONNECT_MAX_S)


class Outbox:
    """Messages on their way out of one connection, in order."""

    def __init__(self, channel: AsyncChannel) -> None:
        self._channel = channel
        self._queue: asyncio.Queue[Message] = asyncio.Queue(OUTBOX_MAX)

    def put(self, message: Message) -> None:
        """Send soon; never blocks. A connection that takes nothing is closed."""
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self._channel.hang_up()

    async def run(self) -> None:
        """Send until the connection ends."""
        while True:
            await self._channel.send(await self._queue.get())


async def pump(channel: AsyncChannel, outbox: Outbox, receive: Callable[[Message], None]) -> None:
    """Carry messages both ways until the connection ends.

    Raises:
        EOFError: the other side closed.
        OSError: it broke.
        EasyckptError: a message was none of ours.
    """
    sender = asyncio.ensure_future(outbox.run())
    try:
        while True:
            reading = asyncio.ensure_future(channel.receive())
            try:
                await asyncio.wait({reading, sender}, return_when=asyncio.FIRST_COMPLETED)
            except BaseException:
                reading.cancel()
                raise
            if not reading.done():
                reading.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError, EOFError):
                    await reading
                await sender  # raises what ended it
                raise EOFError
            receive(reading.result())
    finally:
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError, EOFError):
            await sender
