"""One rank of the checkpoint benchmark: trains, saves with one tool, loads, and measures.

Started by `checkpoint.py`. A step computes, has one collective, and updates every byte of the
state, as training does. *Lost* is what a save costs training: the time of the call, and how much
longer the steps took until the save was durable, against steps before and after. Ranks stay
together: as long as one of them waits for its save, all go on making steps.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import mmap
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from ckpt_tools import TOOLS, Tool
from torch import nn

STEPS = 6
"""Steps in a stretch without a save."""
MADV_POPULATE_WRITE = 23
BLOCK_BYTES = 8 << 20


class Training:
    """A model whose state takes ``gigabytes``: weights and two moments; another one on each rank."""

    def __init__(self, *, rank: int, gigabytes: float, tensors: int) -> None:
        self.rank = rank
        torch.manual_seed(rank)
        length = max(int(gigabytes * 1e9 / 4 / 3 / tensors), 1)
        self.model = nn.Module()
        for index in range(tensors):
            self.model.register_parameter(f"rank{rank}_layer{index}", nn.Parameter(torch.randn(length)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6, fused=True)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self._weights = torch.randn(768, 768)

    def tree(self) -> dict[str, dict[str, torch.Tensor]]:
        """The tensors of the state, by name."""
        moments = {
            f"{name}.{key}": value
            for name, parameter in self.model.named_parameters()
            for key, value in self.optimizer.state[parameter].items()
        }
        return {"model": {name: p.detach() for name, p in self.model.named_parameters()}, "optim": moments}

    def step(self, *, waiting: bool) -> tuple[float, bool]:
        """One step. Returns its time, and whether any rank waits."""
        begin = time.perf_counter()
        x = self._weights
        for _ in range(12):
            x = torch.tanh(x @ self._weights)
        flag = torch.tensor([float(waiting)])
        dist.all_reduce(x)
        dist.all_reduce(flag)
        self.optimizer.step()
        return time.perf_counter() - begin, flag.item() > 0

    def stretch(self, still: Callable[[], bool] = lambda: False) -> list[float]:
        """At least `STEPS` steps, and on while any rank waits. Returns their times."""
        times: list[float] = []
        while True:
            seconds, more = self.step(waiting=still())
            times.append(seconds)
            if len(times) >= STEPS and not more:
                return times

    def digest(self) -> str:
        """Of every byte of the state."""
        found = hashlib.blake2b()
        for part in self.tree().values():
            for name in sorted(part):
                found.update(part[name].contiguous().view(-1).view(torch.uint8).numpy())
        return found.hexdigest()

    def wipe(self) -> None:
        """So that a load that does nothing is seen."""
        for part in self.tree().values():
            for tensor in part.values():
                tensor.zero_()


def most(value: float) -> float:
    """The largest of all ranks."""
    all_of = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(all_of, op=dist.ReduceOp.MAX)
    return float(all_of.item())


def timed(work: Callable[[], object]) -> float:
    """Wall seconds of the slowest rank, begun together."""
    dist.barrier()
    begin = time.perf_counter()
    work()
    return most(time.perf_counter() - begin)


def one_save(training: Training, tool: Tool, step: int, *, before: list[float]) -> dict[str, float]:
    """The save with the steps until it is durable, then steps without. ``before``: steps without."""
    at: dict[str, float] = {}
    errors: list[BaseException] = []

    def watch() -> None:
        try:
            tool.in_memory()
            at["memory"] = time.perf_counter() - begin
            tool.durable()
            at["durable"] = time.perf_counter() - begin
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for this one
            errors.append(error)

    begin = time.perf_counter()
    tool.save(step)
    call = time.perf_counter() - begin
    watcher = threading.Thread(target=watch)
    watcher.start()
    during = training.stretch(watcher.is_alive)
    watcher.join()
    if errors:
        raise errors[0]
    after = training.stretch()
    quiet = (statistics.fmean(before) + statistics.fmean(after)) / 2
    return {
        "call_s": most(call),
        "memory_s": most(at["memory"]),
        "durable_s": most(at["durable"]),
        "lost_s": most(call + sum(during) - len(during) * quiet),
        "step_s": most(statistics.median(before)),
    }


def load_back(training: Training, tool: Tool, step: int, wanted: str) -> float | None:
    """Seconds that a load took; None if the tool cannot, or if what came back is not what was saved."""
    training.wipe()
    loaded: list[bool] = []
    seconds = timed(lambda: loaded.append(tool.load(step)))
    if not loaded[0]:
        return None
    right = most(float(training.digest() != wanted)) == 0
    if not right:
        print(f"load: what {type(tool).__name__} gave back is not what was saved", file=sys.stderr)
    return seconds if right else None


def drop_cache(folder: Path) -> None:
    """Have the kernel forget the files, so that the disk is read."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def limits(folder: Path, *, rank: int, size: int) -> dict[str, float]:
    """What this machine can do at all, all ranks at once. Wall seconds, or processor seconds by name."""
    import xxhash

    size = size // BLOCK_BYTES * BLOCK_BYTES
    fresh = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(fresh))
    libc = ctypes.CDLL(None, use_errno=True)
    populate = timed(
        lambda: libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
    )
    target = torch.frombuffer(fresh, dtype=torch.uint8)
    source = torch.ones(size, dtype=torch.uint8)
    target.copy_(source)
    busy = time.process_time()
    copy = timed(lambda: target.copy_(source))
    view = memoryview(fresh)
    digest = timed(lambda: xxhash.xxh3_128_digest(view))
    path = folder / f"limit.{rank}"
    write = timed(lambda: _direct(path, os.O_CREAT | os.O_WRONLY, view))
    busy = time.process_time() - busy
    read = timed(lambda: _direct(path, os.O_RDONLY, view))
    path.unlink()
    return {
        "bytes": size,
        "populate_s": populate,
        "memcpy_s": copy,
        "digest_s": digest,
        "direct_write_s": write,
        "direct_read_s": read,
        "copy_digest_write_cpu_s": most(busy),
    }


def _direct(path: Path, flags: int, view: memoryview) -> None:
    """Write or read a file block by block, past the page cache."""
    fd = os.open(path, flags | os.O_DIRECT, 0o600)
    try:
        for at in range(0, len(view), BLOCK_BYTES):
            block = view[at : at + BLOCK_BYTES]
            if flags & os.O_WRONLY:
                os.pwrite(fd, block, at)
            else:
                os.preadv(fd, [block], at)
        if flags & os.O_WRONLY:
            os.fsync(fd)
    finally:
        os.close(fd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", required=True, choices=sorted(TOOLS))
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument(
        "--tensors", type=int, default=16, help="parameters; each has three more tensors of state"
    )
    parser.add_argument("--saves", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    training = Training(rank=rank, gigabytes=arguments.gigabytes, tensors=arguments.tensors)
    training.stretch()
    size = sum(tensor.nbytes for part in training.tree().values() for tensor in part.values())
    free, least = psutil.virtual_memory().available, psutil.virtual_memory().available
    tool = TOOLS[arguments.tool](training, arguments.folder)
    saves = []
    for step in range(1, arguments.saves + 1):
        before = training.stretch()
        wanted = training.digest() if step == arguments.saves else ""
        saves.append(one_save(training, tool, step, before=before))
        least = min(least, psutil.virtual_memory().available)
    load_s = load_back(training, tool, arguments.saves, wanted)
    tool.close()
    drop_cache(arguments.folder)
    dist.barrier()
    tool = TOOLS[arguments.tool](training, arguments.folder)  # from here on only the disk can help
    load_cold_s = load_back(training, tool, arguments.saves, wanted)
    tool.close()
    result = {
        "tool": arguments.tool,
        "load_s": load_s,
        "load_cold_s": load_cold_s,
        "ranks": world,
        "bytes_per_rank": size,
        "tensors_per_rank": 4 * arguments.tensors,
        "saves": saves,
        "host_bytes": int(most(free - least)),
        "limits": limits(arguments.folder, rank=rank, size=size),
    }
    if rank == 0:
        print(json.dumps(result))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
