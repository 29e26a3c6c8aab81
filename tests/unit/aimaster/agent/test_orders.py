"""The newest order wins, whatever came before and however often it comes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aimaster.agent.orders import Orders
from aimaster.core.commands import Command, EndNode, Prepare, Reason, StartWorkers
from aimaster.ids import Generation, NodeId

NODE = NodeId("n")


def prepare(generation: int) -> Prepare:
    return Prepare(node=NODE, generation=Generation(generation), reason=Reason.ENOUGH_NODES)


def start(generation: int) -> StartWorkers:
    return StartWorkers(
        node=NODE,
        generation=Generation(generation),
        attempt=0,
        node_rank=0,
        nodes=1,
        first_rank=0,
        world_size=1,
        master_addr="a",
        master_port=1,
        saver_lead="",
        progress_expected=False,
    )


END = EndNode(node=NODE, exit_code=0, reason=Reason.JOB_FINISHED)


def taken(orders: Orders) -> list[Command]:
    found: list[Command] = []
    while (order := orders.take()) is not None:
        found.append(order)
    return found


def test_prepare_then_start_of_one_generation_both_count() -> None:
    orders = Orders()
    assert orders.give(prepare(1))
    assert orders.give(start(1))
    assert taken(orders) == [prepare(1), start(1)]


def test_newer_prepare_replaces_what_waits() -> None:
    orders = Orders()
    orders.give(prepare(1))
    orders.give(start(1))
    orders.give(prepare(2))
    assert taken(orders) == [prepare(2)]


def test_older_orders_change_nothing() -> None:
    orders = Orders()
    orders.give(prepare(2))
    assert not orders.give(start(1))
    assert taken(orders) == [prepare(2)]


def test_same_order_again_is_carried_out_again_only_if_it_was_taken() -> None:
    orders = Orders()
    orders.give(prepare(1))
    assert not orders.give(prepare(1))
    assert taken(orders) == [prepare(1)]
    assert orders.give(prepare(1))  # the master came back and asks for the answer once more


def test_end_replaces_everything_and_stays() -> None:
    orders = Orders()
    orders.give(prepare(1))
    assert orders.give(END)
    assert not orders.give(prepare(2))
    assert taken(orders) == [END]


@given(st.lists(st.one_of(st.builds(prepare, st.integers(1, 5)), st.builds(start, st.integers(1, 5)))))
def test_what_is_taken_never_goes_back_in_generation(commands: list[Command]) -> None:
    orders = Orders()
    seen: list[int] = []
    for number, command in enumerate(commands):
        orders.give(command)
        if number % 2:
            seen += [order.generation for order in taken(orders)]  # type: ignore[attr-defined]
    seen += [order.generation for order in taken(orders)]  # type: ignore[attr-defined]
    assert seen == sorted(seen)
