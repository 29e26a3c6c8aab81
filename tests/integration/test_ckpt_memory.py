"""Two slots and not more: what savers and workers hold in memory, and that it stays so save after save.

Shared memory is counted once, by the memory file and not by who maps it: the resident size of a saver and of
its worker would both show the same slot. What a saver takes beyond its slots is its private memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from easyckpt.api import Checkpointer
from easyckpt.saver.holdings import SLOTS_PER_RANK
from tests.ckpt_nodes import Nodes, make_nodes, wait_until

MIB = 1 << 20
SAVER_SHARE = 2.2
"""Of a rank's state, with its two slots and all else that the saver takes for it."""
SAVES = 200
SETTLED = 40
"""Saves after which everything is there that a run needs."""
GROWTH_BYTES = 8 * MIB
"""Of a saver's private memory from then on: the allocator's own ups and downs, not 55 kB for each save."""

THREADS_MAX = 24
"""Of one process. Pools get their threads as work comes, each up to its own limit."""
FEW = 8
"""Descriptors that come and go with connections and files; a leak would show once for each save."""
SLOTS = 2 * SLOTS_PER_RANK
"""Of a node with one rank that keeps its peer's; and of two ranks in one process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one process holds."""

    slots: dict[int, int]
    """Memory file, by its inode → bytes that are really there."""
    slot_maps: int
    descriptors: int
    threads: int
    private: int
    """Bytes."""


def held(pid: int) -> Held:
    """Look at a process."""
    slots: dict[int, int] = {}
    names = os.listdir(f"/proc/{pid}/fd")
    for name in names:
        path = f"/proc/{pid}/fd/{name}"
        try:
            if os.readlink(path).startswith("/memfd:easyckpt-slot"):
                found = os.stat(path)
                slots[found.st_ino] = found.st_blocks * 512
        except OSError:  # closed meanwhile
            continue
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Held(
        slots=slots,
        slot_maps=sum("/memfd:easyckpt-slot" in line for line in maps),
        descriptors=len(names),
        threads=int(status["Threads"]),
        private=int(status["RssAnon"].split()[0]) * 1024,
    )


def state_of(rank: int, step: int, size: int) -> dict[str, torch.Tensor]:
    """Different for every rank, so that each needs its peer."""
    return {"weight": torch.full((size // 4,), float(1000 * rank + step))}


def save_all(workers: list[Checkpointer], step: int, size: int, *, wait: str) -> None:
    handles = [
        worker.save(state_of(rank, step, size), step=step, block=True) for rank, worker in enumerate(workers)
    ]
    for handle in handles:
        handle.wait(wait, timeout=60)  # type: ignore[arg-type]


@pytest.fixture
def nodes(tmp_path: Path, clean_env: pytest.MonkeyPatch) -> Iterator[Nodes]:
    with make_nodes(tmp_path, clean_env) as made:
        yield made


def test_a_saver_takes_two_slots_and_hardly_more(nodes: Nodes) -> None:
    size = 64 * MIB
    node = nodes.start()
    nodes.begin(1, [node])
    (worker,) = nodes.workers()
    save_all([worker], 1, 4096, wait="durable")  # all that a saver needs for a state of any size
    before = held(node.process.pid)
    for step in range(2, 8):
        save_all([worker], step, size, wait="durable")
        now = held(node.process.pid)
        assert len(now.slots) <= SLOTS_PER_RANK
        taken = sum(now.slots.values()) + now.private - before.private
        assert taken <= SAVER_SHARE * size, f"step {step}: {taken / size:.2f} × the state, {now}"
    assert set(held(os.getpid()).slots) <= set(now.slots), "what grew was let go"


def test_two_hundred_saves_with_peer_copies_leave_everything_as_it_was(nodes: Nodes) -> None:
    size = MIB
    first, second = nodes.start(tcp=True), nodes.start(tcp=True)
    nodes.begin(1, [first, second])
    workers = nodes.workers(disk_interval=20)
    pids = {"lead": first.process.pid, "member": second.process.pid, "worker": os.getpid()}
    for step in range(1, SETTLED + 1):
        save_all(workers, step, size, wait="durable" if step % 20 == 0 else "replicated")
    settled = {name: held(pid) for name, pid in pids.items()}
    for step in range(SETTLED + 1, SAVES + 1):
        save_all(workers, step, size, wait="durable" if step % 20 == 0 else "replicated")
    for name, pid in pids.items():
        then = settled[name]

        def is_as_before(pid: int = pid, then: Held = then, is_saver: bool = name != "worker") -> bool:
            now = held(pid)
            return (
                len(now.slots) <= SLOTS
                and now.slot_maps <= SLOTS
                and sum(now.slots.values()) <= SAVER_SHARE * 2 * size
                and now.threads <= THREADS_MAX
                and now.descriptors - then.descriptors <= FEW
                and (not is_saver or now.private - then.private <= GROWTH_BYTES)
            )

        wait_until(is_as_before, f"{name} holds no more than after {SETTLED} saves, when it held {then}")
