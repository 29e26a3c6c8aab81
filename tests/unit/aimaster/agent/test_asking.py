"""The question which collective a rank waits in, and its answers."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aimaster.agent import asking
from aimaster.agent.spy import parse
from aimaster.agent.witness import LATE_S_MAX, ObservedClock
from aimaster.core.stacks import Frame
from aimaster.worker.recorder import ASK_NAME, in_words


def entry(op: str, seq: int, *, retired: bool) -> dict[str, object]:
    return {"profiling_name": f"gloo:{op}", "collective_seq_id": seq, "is_p2p": False, "retired": retired}


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ([], ""),
        ([entry("all_reduce", 7, retired=True)], "after all_reduce #7"),
        ([entry("all_reduce", 7, retired=True), entry("broadcast", 8, retired=False)], "broadcast #8"),
        ([entry("gather", 3, retired=False), entry("scatter", 4, retired=False)], "gather #3, scatter #4"),
    ],
)
def test_an_answer_names_what_has_not_ended(
    tmp_path: Path, entries: list[dict[str, object]], says: str
) -> None:
    (tmp_path / "fr-7.json").write_text(json.dumps(in_words(entries)))
    assert asking.answer(tmp_path, 7) == says


@pytest.mark.parametrize("text", ["", "[", "{}", '[{"op": 1}]', '[{"op": "x", "seq": 1}]', "7"])
def test_half_an_answer_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "fr-7.json").write_text(text)
    assert asking.answer(tmp_path, 7) == ""


def test_asking_never_waits_and_forgets_the_old_answer(tmp_path: Path) -> None:
    asking.ask(tmp_path, 7)  # nobody is there
    os.mkfifo(tmp_path / ASK_NAME.format(pid=7))
    (tmp_path / "fr-7.json").write_text("[]")
    asking.ask(tmp_path, 7)  # somebody is, and does not listen
    assert not (tmp_path / "fr-7.json").exists()
    asking.forget(tmp_path, 7)
    assert list(tmp_path.iterdir()) == []


def test_a_dump_gives_the_main_thread_and_the_holder_of_the_interpreter() -> None:
    threads = [
        {"os_thread_id": 8, "thread_name": "other", "owns_gil": True, "frames": []},
        {
            "os_thread_id": 7,
            "thread_name": "MainThread",
            "owns_gil": False,
            "frames": [{"name": "f", "filename": "/a.py", "line": 3}],
        },
    ]
    dump = parse(json.dumps(threads).encode(), pid=7)
    assert dump is not None
    assert (dump.frames, dump.holder) == ((Frame(name="f", path="/a.py", line=3),), 8)


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b'[{"os_thread_id": 1}]', b"\xff"])
def test_a_dump_that_is_none_is_told(text: bytes) -> None:
    assert parse(text, pid=7) is None


def test_the_observed_clock_does_not_count_what_nobody_saw() -> None:
    times = iter([100.0, 100.5, 3700.0, 3600.0, 3600.5])
    clock = ObservedClock(lambda: next(times))
    assert clock.tick() == 0.5
    assert clock.tick() == 0.5 + LATE_S_MAX  # the machine was paused for an hour
    assert clock.tick() == 0.5 + LATE_S_MAX  # a clock that goes back counts for nothing
    assert clock.tick() == 1.0 + LATE_S_MAX
