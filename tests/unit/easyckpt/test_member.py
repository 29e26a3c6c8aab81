"""What a member tells its lead, and tells again."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from easyckpt.saver.commits import Threads
from easyckpt.saver.holdings import Holdings
from easyckpt.saver.member import Member
from easyckpt.saver.peering import DrainWanted, StageFailed
from easyckpt.saver.protocol import Begin, Message
from easyckpt.saver.replicate import Dialer


@contextmanager
def member() -> Iterator[Member]:
    """Node 1 of 2, with ranks 2 and 3. No lead yet."""
    begin = Begin(generation=1, node_rank=1, nodes=2, first_rank=2, ranks=2, world_size=4)

    def spawn(work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        raise AssertionError(f"nothing runs here: {what}")

    with ThreadPoolExecutor(1) as pool:
        yield Member(
            begin,
            holdings=Holdings(),
            dialer=Dialer(job_id="job", secret=b""),
            threads=Threads(hashing=pool, storage=pool),
            spawn=spawn,
            address="",
        )


def failures(messages: list[Message]) -> list[tuple[int, int]]:
    return [(message.rank, message.step) for message in messages if isinstance(message, StageFailed)]


def test_what_a_broken_connection_may_have_lost_is_told_again() -> None:
    with member() as one:
        told: list[Message] = []
        one.connected(told.append)
        one.stage_failed(2, 7, "no memory")
        one.disconnected()
        one.stage_failed(3, 7, "no memory")
        one.stage_failed(3, 8, "no memory")
        assert failures(told) == [(2, 7)]
        again: list[Message] = []
        one.connected(again.append)
        assert failures(again) == [(2, 7), (3, 8)]


def test_only_ranks_that_have_left_are_said_to_be_gone() -> None:
    """One that closes must not cost its partner, who is a moment behind, the last step."""
    with member() as one:
        told: list[Message] = []
        one.connected(told.append)
        one.ask_persist()
        for rank in (2, 3, 3):
            one.came(rank)
        one.left(3)  # it has connected anew meanwhile
        one.ask_persist()
        one.left(3)
        one.ask_persist()
        one.left(2)
        one.ask_persist()
        gone = [message.gone for message in told if isinstance(message, DrainWanted)]
        assert gone == [(), (), (3,), (2, 3)]


def test_a_change_between_asking_and_waiting_is_not_missed() -> None:
    """`asyncio.wait_for` begins a coroutine a moment later: what changes in that moment counts."""

    async def scene(one: Member) -> None:
        asyncio.get_running_loop().call_soon(one.wake)  # runs before the waiting begins
        await asyncio.wait_for(one.changed(), 30)

    with member() as one:
        asyncio.run(scene(one))
