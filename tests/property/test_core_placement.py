"""Ranks, for any members, wishes and past."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aimaster.core.placement import Guest, place
from aimaster.ids import NodeId

GUESTS = st.lists(
    st.builds(
        Guest,
        node=st.integers(0, 20).map(lambda number: NodeId(f"n{number}")),
        workers=st.integers(1, 8),
        wanted_node_rank=st.none() | st.integers(0, 12),
    ),
    min_size=1,
    max_size=10,
    unique_by=lambda guest: guest.node,
)
PAST = st.lists(st.integers(0, 20), unique=True, max_size=12).map(
    lambda numbers: {NodeId(f"n{number}"): rank for rank, number in enumerate(numbers)}
)


@given(GUESTS, PAST)
def test_everyone_has_one_seat_and_ranks_have_no_holes(guests: list[Guest], past: dict[NodeId, int]) -> None:
    seats = place(guests, past)
    assert sorted(seat.node for seat in seats) == sorted(guest.node for guest in guests)
    assert [seat.node_rank for seat in seats] == list(range(len(guests)))
    ranks = [rank for seat in seats for rank in range(seat.first_rank, seat.first_rank + seat.workers)]
    assert ranks == list(range(sum(guest.workers for guest in guests)))
    workers = {guest.node: guest.workers for guest in guests}
    assert all(seat.workers == workers[seat.node] for seat in seats)


@given(GUESTS, PAST)
def test_survivors_stay_where_they_are(guests: list[Guest], past: dict[NodeId, int]) -> None:
    for seat in place(guests, past):
        before = past.get(seat.node)
        if before is not None and before < len(guests):
            assert seat.node_rank == before


@given(GUESTS)
def test_a_wish_that_nobody_shares_is_granted(guests: list[Guest]) -> None:
    wishes = [guest.wanted_node_rank for guest in guests]
    seats = {seat.node: seat.node_rank for seat in place(guests, {})}
    for guest in guests:
        wish = guest.wanted_node_rank
        if wish is not None and wish < len(guests) and wishes.count(wish) == 1:
            assert seats[guest.node] == wish


@given(GUESTS, PAST)
def test_the_same_question_has_the_same_answer(guests: list[Guest], past: dict[NodeId, int]) -> None:
    assert place(guests, past) == place(list(guests), dict(past))
