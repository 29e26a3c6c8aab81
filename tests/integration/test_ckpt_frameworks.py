"""DDP, FSDP2 and ZeRO 1 to 3 load each other's checkpoints at other numbers of ranks, from memory and
storage.

A cover: each kind saves and loads, at several numbers of ranks, from either tier. All cells, and many seeds
of the continuation, are run by ``benchmarks/reshard_matrix.py``.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.framework_client import Cells, run_cells

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[Cells]:
    with run_cells(tmp_path) as running:
        yield running


def test_each_kind_loads_another_kinds_checkpoint_at_another_number_of_ranks(cells: Cells) -> None:
    for saved, ranks, on_disk, in_memory in (
        ("zero3", 2, ("zero1", 3), ("ddp", 1)),
        ("ddp", 2, ("fsdp2", 3), ("zero3", 1)),
        ("fsdp2", 3, None, ("zero2", 2)),
        ("zero2", 2, ("ddp", 4), ("fsdp2", 2)),
        ("zero1", 3, None, ("zero1", 2)),
    ):
        source = cells.source(saved, ranks)
        cells.load(*in_memory, of=source, tier="memory", last=True)
        if on_disk is not None:
            cells.load(*on_disk, of=source, tier="disk")


def test_a_master_that_was_saved_is_kept_whatever_loads_it(cells: Cells) -> None:
    source = cells.source("zero1", 2, "bfloat16")
    cells.load("zero3", 1, of=source, tier="memory", last=True)
    cells.load("ddp", 1, of=source, tier="disk", dtype="float32")  # its weights are the masters


def test_training_goes_on_bit_equal_after_a_kill_at_a_random_point(cells: Cells, seed: int) -> None:
    rng = random.Random(seed)
    assert cells.continues("fsdp2", 2, dtype="float32", rng=rng) == []
    assert cells.continues("zero3", 2, dtype="bfloat16", rng=rng) == []
