"""Slots: reserved in full, never overwritten while they are needed, given back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from easyckpt.errors import MemoryFull
from easyckpt.saver.holdings import Holdings, Piece, PieceState, SlotsBusy
from easyckpt.saver.protocol import Held, Key
from easyckpt.slots import Slot, available_bytes, map_private, map_shared

SIZE = 3 * 4096


def memfds() -> int:
    """Slots that this process holds."""
    names = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            names.append(os.readlink(f"/proc/self/fd/{entry}"))
        except OSError:
            continue
    return sum("easyckpt-slot" in name for name in names)


def held(step: int, rank: int = 0) -> Held:
    return Held(key=Key(1, step), rank=rank, world_size=1, digest="")


def put(
    holdings: Holdings, step: int, *, rank: int = 0, size: int = SIZE, protect: tuple[int, ...] = ()
) -> Piece:
    keys = tuple(Key(1, step) for step in protect)
    piece = holdings.place(held(step, rank), layout=b"{}", body_bytes=size, protect=keys)
    piece.state = PieceState.SEALED
    return piece


def test_a_slot_is_shared_memory_without_a_name_and_reserved_in_full() -> None:
    before = memfds()
    slot = Slot(5000, headroom=0)
    try:
        assert slot.capacity == 8192
        assert os.fstat(slot.fd).st_blocks * 512 >= slot.capacity
        shared, private = map_shared(slot.fd, slot.capacity), map_private(slot.fd, slot.capacity)
        shared[0] = 7
        private[1] = 9
        assert (slot.view[0], slot.view[1]) == (7, 0)
        shared.close()
        private.close()
        with pytest.raises(OSError):
            os.ftruncate(slot.fd, 0)  # nobody can take the pages from under a reader
    finally:
        slot.close()
        slot.close()
    assert memfds() == before


def test_too_little_memory_is_an_error_before_anything_is_taken() -> None:
    before = memfds()
    with pytest.raises(MemoryFull, match="does not fit"):
        Slot(available_bytes() + (1 << 40))
    with pytest.raises(MemoryFull, match="stay free"):
        Slot(4096, headroom=1 << 60)
    assert memfds() == before


def test_two_slots_take_turns_and_the_protected_step_stays() -> None:
    holdings = Holdings(headroom=0)
    first, second = put(holdings, 1), put(holdings, 2)
    third = put(holdings, 3, protect=(2,))
    assert third.slot is first.slot
    assert holdings.find(0, Key(1, 1)) is None
    assert holdings.find(0, Key(1, 2)) is second
    with pytest.raises(SlotsBusy):
        put(holdings, 4, protect=(2, 3))
    assert holdings.slot_bytes == 2 * SIZE
    holdings.close()


def test_a_pinned_piece_is_neither_overwritten_nor_freed() -> None:
    holdings = Holdings(headroom=0)
    first, second = put(holdings, 1), put(holdings, 2)
    with first.pinned() as body:
        third = put(holdings, 3)
        assert third.slot is second.slot
        with pytest.raises(SlotsBusy):
            put(holdings, 4, protect=(3,))
        holdings.keep_only(frozenset(), ranks=frozenset())
        assert holdings.find(0, Key(1, 1)) is None
        body[0] = 1  # still mapped
        assert first.slot.fd >= 0
    assert first.slot.fd < 0
    holdings.close()


def test_an_unfinished_piece_is_overwritten_first() -> None:
    holdings = Holdings(headroom=0)
    old = put(holdings, 1)
    put(holdings, 2).state = PieceState.COPYING
    put(holdings, 3)
    assert holdings.find(0, Key(1, 1)) is old
    holdings.close()


def test_the_limit_holds_over_all_ranks_and_a_larger_state_gets_new_slots() -> None:
    before = memfds()
    holdings = Holdings(headroom=0, memory_limit=4 * SIZE)
    put(holdings, 1)
    put(holdings, 2, size=2 * SIZE)
    with pytest.raises(MemoryFull, match="may take are in use"):
        put(holdings, 1, rank=1, size=2 * SIZE)
    put(holdings, 1, rank=1)
    holdings.close()
    assert memfds() == before


def test_a_restore_overwrites_nothing_until_all_are_ready() -> None:
    holdings = Holdings(headroom=0)
    put(holdings, 1)
    put(holdings, 2)
    beside = holdings.place_beside(held(7), layout=b"{}", body_bytes=SIZE)
    beside.state = PieceState.SEALED
    assert {item.key.step for item in holdings.inventory()} == {1, 2, 7}
    holdings.keep_only(frozenset({Key(1, 7)}), ranks=frozenset({0}))
    assert {item.key.step for item in holdings.inventory()} == {7}
    assert holdings.slot_bytes == 2 * SIZE
    holdings.rename(Key(1, 7), Key(2, 7))
    assert holdings.sealed(0, Key(2, 7)) is beside
    holdings.close()


def test_a_slot_that_is_reserved_in_parts_is_shown_to_nobody_before_it_is_whole() -> None:
    before = memfds()
    holdings = Holdings(headroom=0)
    make = holdings.clear_beside(held(7), body_bytes=SIZE)
    assert make is not None
    slot = make()
    assert os.fstat(slot.fd).st_blocks == 0
    holdings.add_slot(0, slot)
    assert holdings.free_slot(0, SIZE) is None, "a save would write into memory that may not be there"
    piece = holdings.place_beside(held(7), layout=b"{}", body_bytes=SIZE, in_parts=True)
    assert piece.slot is slot
    slot.reserve(0, 4096)
    holdings.drop(piece)
    assert memfds() == before, "half of a slot is of no use to anybody"
    make = holdings.clear_beside(held(7), body_bytes=SIZE)
    assert make is not None
    holdings.add_slot(0, make())
    piece = holdings.place_beside(held(7), layout=b"{}", body_bytes=SIZE, in_parts=True)
    piece.slot.reserve(0, SIZE)
    piece.slot.finish(SIZE)
    assert os.fstat(piece.slot.fd).st_blocks * 512 == SIZE
    holdings.drop(piece)
    assert holdings.free_slot(0, SIZE) is piece.slot
    holdings.close()


def test_no_memory_is_left_in_the_file_system(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    holdings = Holdings(headroom=0)
    put(holdings, 1)
    assert set(os.listdir("/dev/shm")) == before
    holdings.close()
