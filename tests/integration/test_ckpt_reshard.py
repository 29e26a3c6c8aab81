"""Steps that another number of ranks saved, or that were cut in another way: from memory, a peer and storage.

Ranks live in the test's process, one after the other; their shards are DTensors of a process group that only
knows numbers (torch's own "fake" backend), so that every cut is tried without starting anything.
"""

from __future__ import annotations

import random
import threading
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
from easyckpt.errors import Misuse, SaveNotDone, StateMismatch
from easyckpt.rng import RNG
from tests.ckpt_nodes import Nodes, make_nodes, wait_until

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


def test_two_nodes_become_one_and_three_with_pieces_of_a_peer_and_of_storage(nodes: Nodes) -> None:
    first, second, third = (nodes.start(tcp=True) for _ in range(3))
    nodes.begin(1, [first, second])
    load_all(nodes, "rows", None)
    save_all(nodes.checkpointers, "rows", 1, wait="durable")
    save_all(nodes.checkpointers, "rows", 2, wait="replicated")
    second.kill()
    nodes.begin(2, [first], progress=True)
    assert load_all(nodes, "columns", 2) == ["memory"]  # of both ranks: its own, and the copy that it kept
    wait_until(lambda: first.status().durable_step == 2, "the step goes to storage as two ranks saved it")
    nodes.begin(3, [third, first], ranks=2, progress=True)
    assert load_all(nodes, "rows", 2) == ["peer", "peer", "memory", "memory"]
    first.kill()
    fourth = nodes.start(tcp=True)
    nodes.begin(4, [third, fourth], progress=True)
    assert load_all(nodes, "whole", 2) == ["disk", "disk"]
    save_all(nodes.checkpointers, "whole", 3, wait="replicated")
    wait_until(lambda: third.status().durable_step == 3, "saving goes on")


def test_a_flipped_byte_in_one_piece_sends_only_that_piece_to_the_next_tier(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    load_all(nodes, "rows", None)
    save_all(nodes.checkpointers, "rows", 1, wait="durable")
    link = nodes.checkpointers[1]._link
    assert link is not None
    slot, _ = link._maps[link._granted]
    slot[8192] ^= 1
    nodes.begin(2, [node], ranks=1, progress=True)
    assert load_all(nodes, "whole", 1) == ["disk"]
    assert "changed after it was sealed" in nodes.log()
    assert "memory (1 ranks), disk (2 ranks)" in nodes.log()


def test_damage_on_storage_falls_back_to_an_older_step_for_all_ranks(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    load_all(nodes, "rows", None)
    for step in (1, 2):
        save_all(nodes.checkpointers, "rows", step, wait="durable")
    node.kill()
    (body,) = (nodes.folder / "ckpt").glob("data/g*/s*2/node*/rank00001.safetensors")
    damaged = bytearray(body.read_bytes())
    damaged[4096] ^= 1
    body.write_bytes(damaged)
    nodes.begin(1, [nodes.start()], ranks=3, progress=True)
    assert load_all(nodes, "columns", 1) == ["disk"] * 3
    assert "differ from their hash" in nodes.log()


def test_a_rank_that_cannot_take_the_step_stops_all_and_each_is_told(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=1)
    load_all(nodes, "whole", None)
    save_all(nodes.checkpointers, "whole", 1)
    nodes.begin(2, [node], ranks=2, progress=True)
    states = [{"nested": [{"weight": torch.zeros(3)}], "step": -1} for _ in range(2)]
    states[1] = {"nested": [{"weight": torch.zeros(SHAPE)}], "step": -1}
    with pytest.raises(StateMismatch, match=r"float32\[3\] here, float32\[7, 5\] saved"):
        nodes.load_together(nodes.workers(), states)
    assert states[1]["step"] == -1
    nodes.begin(3, [node], ranks=2, progress=True)
    assert load_all(nodes, "rows", 1) == ["memory"] * 2


def test_random_numbers_begin_anew_and_differ_by_rank_at_another_world_size(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=1)
    (worker,) = nodes.workers()
    worker.load({"rng": RNG()})
    worker.save({"rng": RNG()}, step=1).wait("memory", 60)
    drawn = []
    one_at_a_time = threading.Lock()  # both ranks are threads here, and share the process's generators
    for generation in (2, 3):
        nodes.begin(generation, [node], ranks=2, progress=True)
        mine: list[float] = []

        class Drawing(RNG):
            def reseed(self, seed: int, rank: int, found: list[float] = mine) -> None:
                with one_at_a_time:
                    super().reseed(seed, rank)
                    found.append(random.random())

        nodes.load_together(nodes.workers(), [{"rng": Drawing()}, {"rng": Drawing()}])
        drawn.append(sorted(mine))
    assert len(set(drawn[0])) == 2
    assert drawn[0] == drawn[1]


class Drawn(RNG):
    """Its random numbers are the rank's own; says whether they began anew."""

    def __init__(self, rank: int) -> None:
        self.rank, self.reseeded = rank, False

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self.rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rank = state["rank"]

    def reseed(self, seed: int, rank: int) -> None:
        self.reseeded = True


def replicated_state(rank: int, step: int) -> dict[str, Any]:
    return {"weight": value_of(step), "step": step, "rng": Drawn(rank)}


def save_replicas(nodes: Nodes, step: int) -> None:
    handles = [
        worker.save(replicated_state(rank, step), step=step, block=rank == 0)
        for rank, worker in enumerate(nodes.checkpointers)
    ]
    for handle in handles:
        handle.wait("memory", timeout=60)


@pytest.mark.parametrize("now", [2, 1])
def test_a_lost_node_without_a_peer_copy_is_covered_by_ranks_with_equal_tensors(
    nodes: Nodes, now: int
) -> None:
    first, second, spare = (nodes.start(tcp=True) for _ in range(3))
    nodes.begin(1, [first, second], ranks=2, replicas=0)
    workers = nodes.workers(disk_interval=1_000_000)
    nodes.load_together(workers, [replicated_state(rank, -1) for rank in range(4)])
    save_replicas(nodes, 1)
    wait_until(lambda: first.status().durable_step == 1, "the first step is always durable")
    for step in (2, 3):
        save_replicas(nodes, step)
    second.kill()
    for generation in (2, 3):  # the second time without a save between
        nodes.begin(generation, [spare, first][-now:], ranks=2, progress=True, replicas=0)
        states = [replicated_state(9, -1) for _ in range(2 * now)]
        workers = nodes.workers(disk_interval=1_000_000)
        assert nodes.load_together(workers, states) == [3] * 2 * now
        assert {worker.restored_from for worker in workers} == (
            {"memory"} if now == 1 else {"peer", "memory"}
        )
        for rank, state in enumerate(states):
            assert torch.equal(state["weight"], value_of(3))
            assert state["step"] == 3
            own = now == 2 and rank < 2
            assert state["rng"].reseeded is not own
            assert state["rng"].rank == (rank if own else 9), "it began anew"
        assert "but for the pieces of ranks [2, 3]" in nodes.log()
    for worker in workers:  # at once: nobody waits for a step that cannot be made durable
        with pytest.raises(SaveNotDone, match="pieces of step 3 are lost"):
            worker.close()
    assert first.status().durable_step is None
    nodes.begin(4, [spare, first][-now:], ranks=2, progress=True, replicas=0)
    workers = nodes.workers()
    states = [replicated_state(9, -1) for _ in range(2 * now)]
    assert nodes.load_together(workers, states) == [3] * 2 * now
    save_replicas(nodes, 4)
    wait_until(lambda: first.status().durable_step == 4, "the next one is whole again")


def test_ranks_whose_tensors_differ_are_not_covered_by_others(nodes: Nodes) -> None:
    both = [nodes.start(tcp=True), nodes.start(tcp=True)]
    nodes.begin(1, both, replicas=0)
    load_all(nodes, "rows", None)
    save_all(nodes.checkpointers, "rows", 1, wait="durable")
    save_all(nodes.checkpointers, "rows", 2)
    wait_until(lambda: both[0].status().durable_step == 2, "storage has it")
    both[1].kill()
    nodes.begin(2, [both[0]], progress=True, replicas=0)
    assert load_all(nodes, "rows", 2) == ["disk"]


def test_only_loads_what_is_selected(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node])
    (worker,) = nodes.workers()

    def made(value: float) -> dict[str, Any]:
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(value)
        return {"model": net, "ema": torch.full((3,), value), "step": int(value)}

    worker.load(made(0))
    worker.save(made(7), step=7).wait("memory", 60)
    for only, right in (
        ("model", [7, 7, 7, 7, 0, 0]),
        (["model.0"], [7, 7, 0, 0, 0, 0]),
        (["*.bias", "step"], [0, 7, 0, 7, 0, 7]),
        (["ema"], [0, 0, 0, 0, 7, 0]),
    ):
        state = made(0)
        assert worker.load(state, only=only) == 7
        values = [*state["model"].parameters(), state["ema"], torch.tensor([float(state["step"])])]
        assert [value.flatten()[0].item() for value in values] == right, only
    state = {**made(0), "new": torch.zeros(1)}
    assert worker.load(state, only=["model"]) == 7  # what is not selected is not compared
    with pytest.raises(StateMismatch, match="nothing in the checkpoint is selected"):
        worker.load(made(0), only=["modle"])
    with pytest.raises(Misuse, match="selects nothing"):
        worker.load(made(0), only=[])
