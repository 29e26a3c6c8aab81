"""The end within a grace time: what is written when, and that no second is waited for in vain."""

from __future__ import annotations

import asyncio

import pytest

from aimaster.agent.preemption import stop_and_persist


class Node:
    """A node whose workers take a while to end, and whose saver takes a while to write."""

    def __init__(self, *, stopping_s: float, writing_s: float) -> None:
        self.memory_step, self.durable_step = 10, 3
        self._stopping_s, self._writing_s = stopping_s, writing_s
        self.told: list[tuple[str, float]] = []

    async def stop(self, grace_s: float) -> None:
        self.told.append(("stop", grace_s))
        await asyncio.sleep(min(self._stopping_s, grace_s))
        self.memory_step = 12  # saved once more before they ended

    async def persist(self, timeout_s: float) -> int | None:
        self.told.append(("persist", timeout_s))
        step = self.memory_step
        if self._writing_s > timeout_s:
            await asyncio.sleep(timeout_s)
            return None
        await asyncio.sleep(self._writing_s)
        self.durable_step = step
        return step


def end(node: Node, grace_s: float) -> int | None:
    return asyncio.run(stop_and_persist(grace_s, stop=node.stop, persist=node.persist))


def test_what_was_saved_while_stopping_is_written_too() -> None:
    node = Node(stopping_s=0.01, writing_s=0.01)
    assert end(node, 5.0) == 12
    assert [what for what, _ in node.told] == ["persist", "stop", "persist"] or [
        what for what, _ in node.told
    ] == ["stop", "persist", "persist"]
    assert dict(node.told)["stop"] == pytest.approx(2.5)


def test_writing_does_not_wait_for_workers_that_do_not_end() -> None:
    node = Node(stopping_s=60.0, writing_s=0.01)
    assert end(node, 4.0) == 12
    first, second = (timeout for what, timeout in node.told if what == "persist")
    assert first > 2.0 > second, "at once, and once more in what is left"


def test_storage_that_is_too_slow_costs_no_more_than_the_grace() -> None:
    node = Node(stopping_s=0.01, writing_s=60.0)
    assert end(node, 0.4) is None
    assert node.durable_step == 3, "what was durable before still is"
