"""Steps that another number of ranks saved, or that were cut in another way: from memory, a peer and storage.

Ranks live in the test's process, one after the other; their shards are DTensors of a process group that only
knows numbers (torch's own "fake" backend), so that every cut is tried without starting anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from easyckpt.api import Checkpointer
from tests.ckpt_nodes import Nodes, make_nodes

SHAPE = (7, 5)
"""Odd, so that shards are uneven: over four ranks 2, 2, 2 and 1 rows, over five the last one is empty."""


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        yield made


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[Any]:
    """A process group in which this process is one rank; gives its mesh."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


def value_of(step: int, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.arange(count, dtype=torch.float32).reshape(shape) + step * 1000


def shard(whole: torch.Tensor, mesh: Any, dim: int) -> DTensor:
    pieces = whole.chunk(mesh.size(), dim)
    rank = mesh.get_local_rank()
    empty = whole.narrow(dim, 0, 0)
    local = (pieces[rank] if rank < len(pieces) else empty).clone()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
    )


def state_of(kind: str, mesh: Any, whole: torch.Tensor, step: int) -> dict[str, Any]:
    cuts = {
        "rows": lambda: shard(whole, mesh, 0),
        "columns": lambda: shard(whole, mesh, 1),
        "copies": lambda: DTensor.from_local(whole.clone(), mesh, [Replicate()], run_check=False),
        "whole": lambda: whole.clone(),
    }
    return {"nested": [{"weight": cuts[kind]()}], "step": step}


def local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def save_all(workers: list[Checkpointer], kind: str, step: int, *, wait: str = "memory") -> None:
    handles = []
    for rank, worker in enumerate(workers):
        with as_rank(rank, len(workers)) as mesh:
            handles.append(
                worker.save(state_of(kind, mesh, value_of(step), step), step=step, block=rank == 0)
            )
    for handle in handles:
        handle.wait(wait, timeout=60)  # type: ignore[arg-type]


def load_all(nodes: Nodes, kind: str, expected: int | None) -> list[str | None]:
    """All ranks load in threads of their own: none gets its bytes before all have said what they need."""
    workers = nodes.workers()
    states = []
    for rank in range(len(workers)):
        with as_rank(rank, len(workers)) as mesh:
            states.append(state_of(kind, mesh, torch.full(SHAPE, -1.0), -1))
    got = nodes.load_together(workers, states)
    assert got == [expected] * len(workers)
    for rank, state in enumerate(states if expected is not None else ()):
        with as_rank(rank, len(workers)) as mesh:
            right = state_of(kind, mesh, value_of(expected or 0), expected or 0)
        assert torch.equal(local(state["nested"][0]["weight"]), local(right["nested"][0]["weight"]))
        assert state["step"] == expected
    return [worker.restored_from for worker in workers]


@pytest.mark.parametrize(
    ("saved", "ranks", "wanted", "now"),
    [
        ("rows", 2, "rows", 3),
        ("rows", 3, "columns", 2),
        ("columns", 2, "whole", 1),
        ("whole", 1, "rows", 5),
        ("copies", 3, "columns", 4),
        ("rows", 4, "copies", 2),
        ("rows", 2, "columns", 2),
        ("whole", 2, "rows", 2),
        ("columns", 1, "rows", 1),
    ],
)
def test_every_cut_becomes_every_other_from_memory_and_from_storage(
    nodes: Nodes, saved: str, ranks: int, wanted: str, now: int
) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=ranks)
    assert load_all(nodes, saved, None) == [None] * ranks
    save_all(nodes.checkpointers, saved, 1, wait="durable")
    nodes.begin(2, [node], ranks=now, progress=True)
    assert load_all(nodes, wanted, 1) == ["memory"] * now
    node.kill()
    other = nodes.start()
    nodes.begin(1, [other], ranks=now, progress=True)
    assert load_all(nodes, wanted, 1) == ["disk"] * now
    save_all(nodes.checkpointers, wanted, 2)
    nodes.begin(2, [other], ranks=now, progress=True)
    assert load_all(nodes, wanted, 2) == ["memory"] * now
