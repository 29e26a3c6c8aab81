"""Parts of long work: all are done, in bounded threads, and trouble is the first one's."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from easyckpt.lanes import run_lanes


@pytest.mark.parametrize("lanes", [None, 1, 3, 100])
def test_every_task_runs_once_and_the_threads_are_gone(lanes: int | None) -> None:
    before = threading.active_count()
    done: list[int] = []
    run_lanes([partial(done.append, number) for number in range(50)], lanes=lanes)
    assert sorted(done) == list(range(50))
    assert threading.active_count() == before
    run_lanes([], lanes=lanes)


def test_no_more_than_so_many_at_once() -> None:
    lock, together = threading.Lock(), threading.Barrier(3)
    running, most = 0, 0

    def task() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait(timeout=60)  # passes only if three are here at once
        with lock:
            running -= 1

    run_lanes([task] * 9, lanes=3)
    assert most == 3


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_a_task_raises_is_raised_when_all_have_ended(lanes: int, kind: type[BaseException]) -> None:
    ended: list[int] = []

    def task(number: int) -> None:
        if number == 2:
            raise kind("two")
        if number > 2:
            time.sleep(0.02)  # all of them together take seconds: time enough to leave some out
        ended.append(number)

    with pytest.raises(kind, match="two"):
        run_lanes([partial(task, number) for number in range(1000)], lanes=lanes)
    assert {0, 1} <= set(ended)
    assert len(ended) < 999, "those that had not begun are left out"
    assert threading.active_count() < 50
