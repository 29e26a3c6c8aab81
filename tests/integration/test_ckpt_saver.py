"""One node and several: save, lose something, load again. Real saver processes, sockets and files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from easyckpt.api import Checkpointer
from easyckpt.errors import (
    Misuse,
    NothingToLoad,
    SaveAbandoned,
    SaveSkipped,
    StaleGeneration,
)
from tests.ckpt_nodes import Nodes, make_nodes, wait_until


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        yield made


def state_at(rank: int, step: int, size: int = 3000) -> dict[str, object]:
    """Different for every rank and step."""
    return {"weight": torch.full((size,), float(step * 100 + rank)), "step": step, "rank": rank}


def blank(size: int = 3000) -> dict[str, object]:
    return {"weight": torch.zeros(size), "step": -1, "rank": -1}


def save_all(workers: list[Checkpointer], step: int, *, wait: str = "memory") -> None:
    handles = [
        worker.save(state_at(rank, step), step=step, block=rank == 0) for rank, worker in enumerate(workers)
    ]
    for handle in handles:
        handle.wait(wait, timeout=60)  # type: ignore[arg-type]


def load_all(
    workers: list[Checkpointer], expected: int | None, *, step: int | None = None
) -> list[str | None]:
    """All ranks load the same step, each its own values; returns the tiers."""
    tiers = []
    for rank, worker in enumerate(workers):
        state = blank()
        assert worker.load(state, step=step) == expected
        if expected is not None:
            assert state["step"] == expected
            assert state["rank"] == rank
            assert torch.equal(state["weight"], state_at(rank, expected)["weight"])  # type: ignore[arg-type]
        tiers.append(worker.restored_from)
    return tiers


def test_one_node_restores_from_memory_then_from_disk(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    workers = nodes.workers()
    assert load_all(workers, None) == [None, None]
    save_all(workers, 1)
    save_all(workers, 2, wait="durable")
    nodes.begin(2, [node], ranks=2, progress=True)
    assert load_all(nodes.workers(), 2) == ["memory", "memory"]
    node.kill()
    other = nodes.start()
    nodes.begin(1, [other], ranks=2, progress=True)
    assert load_all(nodes.workers(), 2) == ["disk", "disk"]
    assert other.status().restored == ((0, 2, "disk"), (1, 2, "disk"))


def test_a_lost_node_comes_back_from_its_peer(nodes: Nodes) -> None:
    first, second, spare = (nodes.start(tcp=True) for _ in range(3))
    nodes.begin(1, [first, second])
    workers = nodes.workers(disk_interval=1_000_000)
    load_all(workers, None)
    save_all(workers, 5, wait="durable")
    for step in (6, 7):
        save_all(workers, step, wait="replicated")
    second.kill()
    nodes.begin(2, [first, spare], progress=True)
    assert load_all(nodes.workers(), 7) == ["memory", "peer"]
    wait_until(lambda: first.status().replicated_step == 7, "the restored step is copied to the new peer")
    first.kill()
    third = nodes.start(tcp=True)
    nodes.begin(3, [spare, third], progress=True)
    # Rank 0 is now on the spare, which kept its copy; rank 1's only copy went with the first node's memory.
    workers = nodes.workers()
    assert load_all(workers, 7) == ["memory", "peer"]


def test_the_lead_is_lost_and_another_node_leads(nodes: Nodes) -> None:
    first, second, spare = (nodes.start(tcp=True) for _ in range(3))
    nodes.begin(1, [first, second])
    workers = nodes.workers(disk_interval=1_000_000)
    load_all(workers, None)
    save_all(workers, 1, wait="durable")
    save_all(workers, 2, wait="replicated")
    first.kill()
    nodes.begin(2, [spare, second], progress=True)
    assert load_all(nodes.workers(), 2) == ["peer", "memory"]


def test_a_step_that_is_not_complete_everywhere_is_never_restored(nodes: Nodes) -> None:
    first, second = nodes.start(tcp=True), nodes.start(tcp=True)
    nodes.begin(1, [first, second])
    workers = nodes.workers()
    load_all(workers, None)
    save_all(workers, 1)
    handle = workers[0].save(state_at(0, 2), step=2, block=True)  # rank 1 dies before it saves step 2
    nodes.begin(2, [first, second], progress=True)
    with pytest.raises(SaveAbandoned):
        handle.wait("memory", timeout=60)
    load_all(nodes.workers(), 1)


def test_history_that_was_left_behind_never_comes_back(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node])
    (worker,) = nodes.workers()
    worker.load(blank())
    worker.save(state_at(0, 1), step=1, block=True).wait("durable", 60)
    worker.save(state_at(0, 2), step=2, block=True).wait("durable", 60)
    nodes.begin(2, [node])
    (worker,) = nodes.workers()
    assert worker.load(blank(), step=1) == 1
    nodes.begin(3, [node])
    (worker,) = nodes.workers()
    assert worker.load(blank()) == 1  # not 2, although it is on storage and was in memory


def test_of_steps_that_are_set_aside_the_newest_older_one_is_restored_else_the_oldest(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node])
    (worker,) = nodes.workers()
    worker.load(blank())
    worker.save(state_at(0, 1), step=1, block=True).wait("durable", 60)
    for step in (2, 3):
        worker.save(state_at(0, step), step=step, block=True).wait("memory", 60)
    for generation, below, step, tier in ((2, 3, 2, "memory"), (3, 2, 1, "disk"), (4, 1, 1, "memory")):
        nodes.begin(generation, [node], progress=True, restore_below=below)
        (worker,) = nodes.workers()
        assert (worker.load(blank()), worker.restored_from) == (step, tier)
    nodes.begin(5, [node], progress=True)
    (worker,) = nodes.workers()
    assert worker.load(blank()) == 1, "what was set aside does not come back"


def test_a_flipped_byte_in_memory_is_found_and_the_next_tier_is_taken(nodes: Nodes) -> None:
    first, second = nodes.start(tcp=True), nodes.start(tcp=True)
    nodes.begin(1, [first, second])
    workers = nodes.workers()
    load_all(workers, None)
    save_all(workers, 1, wait="replicated")
    flip_last_slot(workers[0])
    nodes.begin(2, [first, second], progress=True)
    assert load_all(nodes.workers(), 1) == ["peer", "memory"]
    assert "changed after it was sealed" in nodes.log()


def test_a_flipped_byte_without_another_copy_falls_back_for_all_ranks(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    workers = nodes.workers(disk_interval=1_000_000)
    load_all(workers, None)
    save_all(workers, 1, wait="durable")
    save_all(workers, 2)
    save_all(workers, 3)
    flip_last_slot(workers[1])
    nodes.begin(2, [node], ranks=2, progress=True)
    assert load_all(nodes.workers(), 2) == ["memory", "memory"]


def flip_last_slot(worker: Checkpointer) -> None:
    """Change one byte of the piece that was saved last, behind everyone's back."""
    link = worker._link
    assert link is not None
    slot, _ = link._maps[link._granted]
    slot[8192] ^= 1


def test_progress_that_cannot_be_loaded_is_an_error(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], progress=True)
    (worker,) = nodes.workers()
    with pytest.raises(NothingToLoad, match="no step of it can be loaded"):
        worker.load(blank())


def test_saving_over_earlier_training_without_a_load_is_an_error(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node])
    (worker,) = nodes.workers()
    worker.save(state_at(0, 1), step=1).wait("durable", 60)  # an empty folder needs no load
    nodes.begin(2, [node])
    (worker,) = nodes.workers()
    with pytest.raises(Misuse, match="load\\(\\) was not called"):
        worker.save(state_at(0, 1), step=1)


def test_a_worker_of_an_older_generation_changes_nothing(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node])
    (old,) = nodes.workers()
    old.load(blank())
    old.save(state_at(0, 1), step=1).wait("memory", 60)
    nodes.begin(2, [node])
    with pytest.raises(StaleGeneration):
        old.save(state_at(0, 2), step=2)
    (worker,) = nodes.workers()
    assert worker.load(blank()) == 1


def test_a_skip_is_the_same_on_all_ranks(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    workers = nodes.workers()
    load_all(workers, None)
    one = workers[0].save(state_at(0, 1), step=1)
    two = workers[0].save(state_at(0, 2), step=2)  # rank 1 still has to copy step 1
    assert two.skipped
    assert "step 1 is in flight" in two.reason
    other = workers[1].save(state_at(1, 1), step=1)
    late = workers[1].save(state_at(1, 2), step=2)  # step 1 may be complete by now: decided all the same
    assert late.skipped
    assert late.reason == two.reason
    for handle in (one, other):
        handle.wait("memory", 60)
    with pytest.raises(SaveSkipped):
        two.wait("memory", 60)


def test_ranks_that_ask_for_different_steps_are_told(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    workers = nodes.workers()
    load_all(workers, None)
    save_all(workers, 1, wait="durable")
    nodes.begin(2, [node], ranks=2)
    workers = nodes.workers()
    assert workers[0].load(blank(), step=1) == 1
    with pytest.raises(Misuse, match="asks for the newest"):
        workers[1].load(blank())


def test_two_folders_in_one_job_are_an_error(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    first = nodes.checkpointer(0)
    first.load(blank())
    other = nodes.checkpointer(1)
    other._root = str(nodes.folder / "elsewhere")
    other._open_options = type(other._open_options)(root=other._root)
    with pytest.raises(Misuse, match="another rank of this node"):
        other.load(blank())


def test_a_restored_step_can_be_loaded_again_later(nodes: Nodes) -> None:
    node = nodes.start()
    nodes.begin(1, [node], ranks=2)
    workers = nodes.workers()
    load_all(workers, None)
    save_all(workers, 1, wait="durable")
    save_all(workers, 2)
    load_all(workers, 2)
    save_all(workers, 3)
    load_all(workers, 1, step=1)
    save_all(workers, 2, wait="durable")
    load_all(workers, 2)


def test_a_rank_that_comes_late_after_a_restart_can_save_again(nodes: Nodes) -> None:
    """The lead writes the restored step as soon as one rank has loaded, wherever the others are."""
    both = [nodes.start(tcp=True), nodes.start(tcp=True)]
    nodes.begin(1, both)
    workers = nodes.workers(disk_interval=1000)
    load_all(workers, None)
    save_all(workers, 1, wait="durable")
    save_all(workers, 2)
    assert both[0].status().durable_step == 1
    nodes.drop_workers()
    nodes.begin(2, both)
    early = nodes.checkpointer(1)
    assert early.load(blank()) == 2
    wait_until(lambda: both[1].status().durable_step == 2, "the restored step on storage")
    workers = [nodes.checkpointer(0), early]
    assert workers[0].load(blank()) == 2
    for step in range(3, 7):
        save_all(workers, step)
    assert "not durable" not in nodes.log()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_requeued_job_that_counts_its_generations_anew_goes_on(nodes: Nodes, number: int) -> None:
    """Its agents find the savers of the job's last life, which was in generation 2."""
    both = [nodes.start(tcp=True), nodes.start(tcp=True)]
    nodes.begin(2, both, life="first")
    workers = nodes.workers(disk_interval=1000)
    load_all(workers, None)
    for step in (1, 2, 3):
        save_all(workers, step)
    nodes.drop_workers()
    nodes.begin(number, both, life="second")
    workers = nodes.workers(disk_interval=1000)
    load_all(workers, 3)
    for step in (4, 5):
        save_all(workers, step)
    nodes.drop_workers()
    nodes.begin(number + 1, both, life="second")
    workers = nodes.workers()
    load_all(workers, 5)
    assert "not durable" not in nodes.log()


def replica_at(rank: int, step: int, size: int = 300_000) -> dict[str, object]:
    """Equal tensors on every rank, and a plain state of its own: data parallelism."""
    return {"weight": torch.arange(size, dtype=torch.float32) + step, "step": step, "rank": rank}


@pytest.mark.parametrize("count", [1, 2])
def test_equal_bytes_are_stored_once(nodes: Nodes, count: int) -> None:
    """On one node, and on two that share the folder."""
    first = [nodes.start(tcp=True) for _ in range(count)]
    nodes.begin(1, first, ranks=2 // count)
    workers = nodes.workers()
    for worker in workers:
        assert worker.load(blank()) is None
    for step in (1, 2):
        handles = [
            worker.save(replica_at(rank, step), step=step, block=rank == 0)
            for rank, worker in enumerate(workers)
        ]
        for handle in handles:
            handle.wait("durable", timeout=60)
    sizes = sorted(
        path.stat().st_size for path in Path(workers[0].root).glob("data/*/s000000000002/*/*.safetensors")
    )
    assert len(sizes) == 2
    assert sizes[0] < 100_000 < 4 * 300_000 <= sizes[1], "one has the tensors, the other its state alone"
    for node in first:
        node.kill()
    nodes.begin(1, [nodes.start(tcp=True) for _ in range(count)], ranks=2 // count, progress=True)
    for rank, worker in enumerate(nodes.workers()):
        state = {"weight": torch.zeros(300_000), "step": -1, "rank": -1}
        assert worker.load(state) == 2
        assert worker.restored_from == "disk"
        assert (state["step"], state["rank"]) == (2, rank)
        assert torch.equal(state["weight"], replica_at(rank, 2)["weight"])  # type: ignore[arg-type]
