"""Parts of the copy behind a save: the choice of the way, jobs, pages, and slots that are made ahead."""

from __future__ import annotations

import asyncio
import mmap
import threading

import pytest

from easyckpt.overlap.job import CopyThread, Job
from easyckpt.overlap.pace import TRIALS, WARM_UP_SAVES, Pace
from easyckpt.overlap.touch import BLOCK_BYTES, PageTable
from easyckpt.saver.holdings import Holdings, PieceState, SlotsBusy
from easyckpt.saver.protocol import Held, Key
from easyckpt.saver.reserving import Reserver
from easyckpt.slots import Slot

STEP_S = 1.0
COPY_S = 0.1


def run(pace: Pace, saves: int, *, overlapped_s: float, blocking_s: float) -> list[bool]:
    """Steps of one second, a save in every fourth; how each save was copied."""
    now, ways = 0.0, []
    for number in range(saves * 4):
        cost = 0.0
        if number % 4 == 3:
            ways.append(pace.overlaps)
            pace.saved(overlapped=ways[-1])
            pace.copied(COPY_S)
            cost = overlapped_s if ways[-1] else blocking_s
        now += STEP_S + cost
        pace.stepped(now)
    return ways


def test_overlap_that_pays_is_never_doubted() -> None:
    pace = Pace()
    assert all(run(pace, 40, overlapped_s=0.02, blocking_s=0.1))
    assert pace.news == ""


def test_overlap_that_costs_more_is_held_against_blocking_and_given_up() -> None:
    pace = Pace()
    ways = run(pace, 40, overlapped_s=0.5, blocking_s=0.1)
    assert ways[: WARM_UP_SAVES + TRIALS] == [True] * (WARM_UP_SAVES + TRIALS)
    assert not any(ways[-20:])
    assert "500.0 ms of training when its copy overlaps, and 100.0 ms" in pace.news


def test_overlap_that_is_slow_but_still_cheaper_stays() -> None:
    pace = Pace()
    ways = run(pace, 40, overlapped_s=0.3, blocking_s=0.9)
    assert ways.count(False) <= TRIALS + 1
    assert all(ways[-20:])


@pytest.mark.parametrize("wanted", [True, False])
def test_who_asks_for_a_way_gets_it(wanted: bool) -> None:
    assert run(Pace(wanted), 40, overlapped_s=0.5, blocking_s=0.1) == [wanted] * 40


def test_everybody_who_waits_copies_and_the_proof_is_asked_once() -> None:
    copied: list[int] = []
    proofs: list[int] = []
    ends: list[Exception | None] = []
    pieces = [lambda index=index: copied.append(index) for index in range(500)]
    job = Job(pieces, prove=lambda: proofs.append(len(copied)), finish=lambda _, error: ends.append(error))
    helpers = [threading.Thread(target=job.wait_copied) for _ in range(4)]
    thread = CopyThread()
    for helper in helpers:
        helper.start()
    thread.submit(job.run)
    for helper in helpers:
        helper.join(60)
    assert job.wait_finished(60)
    thread.close()
    assert sorted(copied) == list(range(500))
    assert proofs == [500]
    assert ends == [None]


def test_an_interrupt_of_who_helps_gives_the_copy_up() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    ends: list[Exception | None] = []
    job = Job([interrupted], prove=lambda: None, finish=lambda _, error: ends.append(error))
    with pytest.raises(KeyboardInterrupt):
        job.wait_copied()
    job.run()
    assert "KeyboardInterrupt" in str(ends[0])


def test_pages_are_made_present_once_and_only_where_asked() -> None:
    mapping = mmap.mmap(-1, 3 * BLOCK_BYTES + 4096)
    pages = PageTable(mapping)
    assert pages.missing == 4
    pages.touch(BLOCK_BYTES + 5, BLOCK_BYTES + 6)
    assert pages.missing in (3, 0)  # none on a kernel that cannot
    while pages.touch_one():
        pass
    assert pages.missing == 0
    assert mapping[:4096] == bytes(4096)


def held(step: int) -> Held:
    return Held(key=Key(1, step), rank=0, world_size=1, digest="")


def test_a_slot_made_ahead_is_the_one_that_the_next_piece_gets_and_there_are_two() -> None:
    holdings = Holdings(headroom=0)
    reserver = Reserver(holdings)

    async def go() -> None:
        first = holdings.place(held(1), layout=b"", body_bytes=5000, protect=())
        first.state = PieceState.SEALED
        ahead = await reserver.ahead(0, 5000)
        assert isinstance(ahead, Slot)
        assert await reserver.ahead(0, 5000) is ahead
        await reserver.clear_way(held(2), body_bytes=5000, protect=(Key(1, 1),))
        second = holdings.place(held(2), layout=b"", body_bytes=5000, protect=(Key(1, 1),))
        assert second.slot is ahead
        assert await reserver.ahead(0, 5000) is None
        second.pin()
        with pytest.raises(SlotsBusy):
            await reserver.clear_way(held(3), body_bytes=5000, protect=(Key(1, 1),))
        second.unpin()
        await reserver.clear_way(held(3), body_bytes=90_000, protect=(Key(1, 1),))
        third = holdings.place(held(3), layout=b"", body_bytes=90_000, protect=(Key(1, 1),))
        assert third.slot.capacity >= 90_000
        assert holdings.slot_bytes == first.slot.capacity + third.slot.capacity

    try:
        asyncio.run(go())
    finally:
        holdings.close()
