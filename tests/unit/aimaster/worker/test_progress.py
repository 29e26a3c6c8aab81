"""The progress page: who gets a record, how calls become steps, what a reader sees."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from aimaster.worker.progress import RECORD, RECORD_BYTES, Phase, ProgressPage, ProgressWriter, decode


@pytest.fixture
def page() -> Iterator[ProgressPage]:
    page = ProgressPage(2)
    yield page
    page.close()


@pytest.fixture
def writer(page: ProgressPage) -> Iterator[ProgressWriter]:
    writer = ProgressWriter(page.path, local_rank=1, rank=5)
    assert writer.claim(training=False)
    yield writer
    writer.close()


def test_a_record_is_64_bytes() -> None:
    assert RECORD.size == RECORD_BYTES == 64


def test_an_unclaimed_record_is_none(page: ProgressPage) -> None:
    assert page.read(0) is None


def test_what_is_written_is_read(page: ProgressPage, writer: ProgressWriter) -> None:
    writer.enter(Phase.IMPORTING)
    writer.beat("a")
    writer.saved(41)
    record = page.read(1)
    assert record is not None
    assert (record.pid, record.rank, record.steps, record.saved_step) == (os.getpid(), 5, 1, 41)
    assert record.phase is Phase.TRAINING
    assert page.read(0) is None


def test_one_optimizer_is_one_step_each_time(writer: ProgressWriter) -> None:
    assert [writer.beat("a") for _ in range(3)] == [1, 2, 3]


@pytest.mark.parametrize("groups", [2, 7, 300])
def test_parts_of_a_step_count_once(writer: ProgressWriter, groups: int) -> None:
    for step in range(1, 6):
        assert {writer.beat(group) for group in range(groups)} == {step}


def test_optimizers_with_a_rhythm_of_their_own_still_progress(writer: ProgressWriter) -> None:
    for _ in range(10):
        for name in ("d", "d", "d", "g"):
            writer.beat(name)
    assert writer.steps == 30  # the critic steps three times as often as the generator


def test_a_new_optimizer_every_epoch_goes_on_counting(writer: ProgressWriter) -> None:
    for epoch in range(3):
        for _ in range(10):
            writer.beat(epoch)
    assert writer.steps >= 28


@pytest.mark.parametrize("rank", [-1, 10_000])
def test_a_rank_without_a_record_is_refused(page: ProgressPage, rank: int) -> None:
    with pytest.raises(ValueError, match="no record"):
        ProgressWriter(page.path, local_rank=rank, rank=None)


CLAIM = """
import sys
from aimaster.worker.progress import ProgressWriter
writer = ProgressWriter(sys.argv[1], local_rank=0, rank=None)
print(writer.claim(training=sys.argv[2] == "1"), flush=True)
if sys.argv[3] == "step":
    writer.beat(0)
print("ready", flush=True)
sys.stdin.read()
"""


def _other(page: ProgressPage, *, training: bool, step: bool) -> tuple[bool, subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, page.path, str(int(training)), "step" if step else ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    claimed = process.stdout.readline() == "True\n"
    assert process.stdout.readline() == "ready\n"
    return claimed, process


def test_a_live_trainer_keeps_its_record(page: ProgressPage) -> None:
    claimed, trainer = _other(page, training=False, step=True)
    assert claimed
    mine = ProgressWriter(page.path, local_rank=0, rank=None)
    assert not mine.claim(training=False)
    assert not mine.claim(training=True)
    trainer.communicate()
    assert mine.claim(training=False)  # it is dead now
    mine.close()


def test_a_launcher_gives_way_to_the_process_that_trains(page: ProgressPage) -> None:
    claimed, launcher = _other(page, training=False, step=False)
    assert claimed
    mine = ProgressWriter(page.path, local_rank=0, rank=None)
    assert not mine.claim(training=False)
    assert mine.claim(training=True)
    record = page.read(0)
    assert record is not None
    assert record.pid == os.getpid()
    launcher.communicate()
    mine.close()


def test_a_writer_that_died_half_way_blocks_nobody(page: ProgressPage) -> None:
    fd = os.open(page.path, os.O_RDWR)
    os.pwrite(fd, (3).to_bytes(4, "little"), 0)  # odd: being written
    assert page.read(0) is None
    mine = ProgressWriter(page.path, local_rank=0, rank=None)
    assert mine.claim(training=False)
    assert page.read(0) is not None
    mine.close()
    os.close(fd)


def test_nonsense_in_a_record_is_not_believed(page: ProgressPage) -> None:
    fd = os.open(page.path, os.O_RDWR)
    os.pwrite(fd, b"\xfe" * 64, 0)
    assert page.read(0) is None
    os.close(fd)
    with pytest.raises(ValueError, match="99"):
        decode(RECORD.pack(2, 1, 1, 0, -1, 0, 99, -1, 0, 0, 0))


def test_a_process_that_outlives_its_generation_counts_anew(
    page: ProgressPage, writer: ProgressWriter
) -> None:
    for _ in range(3):
        writer.beat("a")
    writer.saved(41)
    writer.held(2.5)
    writer.renew()
    record = page.read(1)
    assert record is not None
    assert (record.steps, record.saved_step, record.held_s) == (0, None, 0.0)
    assert record.phase is Phase.STARTING
    assert writer.beat("a") == 1


def test_a_record_that_was_cleared_is_free(page: ProgressPage, writer: ProgressWriter) -> None:
    page.clear(1)
    assert page.read(1) is None
    other = ProgressWriter(page.path, local_rank=1, rank=6)
    assert other.claim(training=False)
    other.close()


def test_what_loading_and_saving_took_is_told_with_the_next_step(
    page: ProgressPage, writer: ProgressWriter
) -> None:
    writer.loaded(1.5)
    writer.beat("a")
    writer.loaded(9.0)  # not what the start took
    writer.held(0.25)
    writer.held(0.5)
    writer.beat("a")
    record = page.read(1)
    assert record is not None
    assert (record.load_s, record.held_s) == (1.5, 0.75)
    assert 0 <= record.warm_up_s < 60
