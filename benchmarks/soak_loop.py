"""What `benchmarks/soak.py` trains: DDP on gloo with easyckpt, honest pauses, and real faults now and then.

What happens at a step is drawn from the seed and the step alone, so that all ranks agree on it, and a step
that is made again after a restart has the same pause. A fault happens once: whoever makes it writes it down
first, and who finds it written down goes on. Environment:

* ``SOAK_FOLDER``: where faults and steps are written down.
* ``SOAK_SEED``; ``SOAK_END``: wall time, in seconds, at which the training ends well.
* ``SOAK_PAUSE_EACH``, ``SOAK_FAULT_EACH``: mean number of steps between honest pauses, and between faults.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import easyckpt

FOLDER = Path(os.environ["SOAK_FOLDER"])
SEED, END = os.environ["SOAK_SEED"], float(os.environ["SOAK_END"])
PAUSE_EACH, FAULT_EACH = float(os.environ["SOAK_PAUSE_EACH"]), float(os.environ["SOAK_FAULT_EACH"])
STEP_S = 0.08
FIRST_FAULT_STEP = 60
SAVE_EACH = 5
COMPILE_S = 60.0
FAULTS = ("stop", "recv", "gil", "kill", "exit", "loader")
PAUSES = ("evaluation", "saving", "upload", "accumulation", "slower", "late data")


class Locked(torch.utils.data.Dataset[int]):
    """Items behind a lock that nobody in the worker that is forked now will open again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        with self.lock:
            return index


def compute(seconds: float) -> None:
    """Work that nothing can be told of from outside but that it is work."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        torch.randn(64, 64) @ torch.randn(64, 64)
        time.sleep(0.02)


def upload(seconds: float) -> None:
    """Blocked in a socket until the server answers."""
    here, there = socket.socketpair()
    timer = threading.Timer(seconds, there.send, (b"x",))
    timer.start()
    here.recv(1)
    timer.join()
    here.close()
    there.close()


def save_slowly(seconds: float) -> None:
    """As `torch.save` to a slow disk: a bit is written, and it takes its time."""
    end = time.monotonic() + seconds
    with open(FOLDER / "slow", "wb") as file:
        while time.monotonic() < end:
            file.write(os.urandom(1 << 16))
            file.flush()
            os.fsync(file.fileno())
            time.sleep(0.3)


def pause(kind: str, seconds: float, *, model: torch.nn.Module, rank: int) -> None:
    """One honest pause. What one rank does alone the others wait for in the next collective."""
    if kind == "accumulation":
        end = time.monotonic() + seconds
        with model.no_sync():  # type: ignore[operator]
            while time.monotonic() < end:
                model(torch.randn(8, 64)).sum().backward()
                time.sleep(0.1)
    elif kind == "late data" and rank == 1:
        time.sleep(min(seconds, 8.0))
    elif rank == 0 and kind in ("evaluation", "saving", "upload"):
        {"evaluation": compute, "saving": save_slowly, "upload": upload}[kind](seconds)


def fault(kind: str, *, step: int, rank: int) -> None:
    """Break this rank, once."""
    path = FOLDER / f"fault-{step}.json"
    try:
        with open(path, "x") as file:
            json.dump({"kind": kind, "step": step, "rank": rank, "wall_s": time.time()}, file)
    except FileExistsError:
        return
    if kind == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "exit":
        os._exit(7)
    elif kind == "gil":
        ctypes.PyDLL(None).sleep(3600)
    elif kind == "recv":
        dist.recv(torch.zeros(4), src=(rank + 1) % dist.get_world_size())
    elif kind == "loader":
        next(iter(torch.utils.data.DataLoader(Locked(), num_workers=1)))


def due(step: int, rank: int, world_size: int) -> tuple[str, float, str]:
    """Honest pause and its seconds, and the fault of this rank; empty for none."""
    dice = random.Random(f"{SEED}:{step}")
    kind = dice.choice(PAUSES) if dice.random() < 1 / PAUSE_EACH else ""
    seconds = min(40.0, dice.lognormvariate(2.0, 0.8))
    broken = step >= FIRST_FAULT_STEP and dice.random() < 1 / FAULT_EACH
    victim, how = dice.randrange(world_size), dice.choice(FAULTS)
    return kind, seconds, how if broken and victim == rank else ""


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    layers = [torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "rng": easyckpt.RNG()}
    checkpointer = easyckpt.Checkpointer(str(FOLDER / "ckpt"), disk_interval=100)
    step = checkpointer.load(state) or 0
    if step == 0:
        compute(COMPILE_S)  # a first step that compiles
    noise = random.Random()
    slower_until, over = 0, torch.zeros(1)
    while not over:
        kind, seconds, broken = due(step, rank, world_size)
        if broken:
            fault(broken, step=step, rank=rank)
        if kind == "slower":
            slower_until = step + 100
        elif kind:
            pause(kind, seconds, model=model, rank=rank)
        loss = model(torch.randn(8, 64)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % SAVE_EACH == 0:
            checkpointer.save(state, step=step)
        over.fill_(time.time() > END)
        dist.all_reduce(over)
        growth = 1 + 3 * max(0, slower_until - step) / 100
        time.sleep(STEP_S * growth * min(10.0, noise.paretovariate(2.5)))
    checkpointer.close()
    if rank == 0:
        (FOLDER / "steps").write_text(str(step))
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
