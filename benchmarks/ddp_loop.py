"""A small DDP training on CPU tensors, the same under every launcher: what the benchmarks start.

It uses nothing of this project. Environment:

* ``BENCH_LOG``: rank r appends a JSON line per step to ``$BENCH_LOG.<r>``; rank 0 keeps a checkpoint there.
* ``BENCH_STEPS``: steps until the end.
* ``BENCH_WIDTH``, ``BENCH_BATCH``: how much a step computes.
* ``BENCH_PAUSE_S``: sleep after each step.
* ``BENCH_TIMES``: if set, no lines and no checkpoints: the duration of every step is written to
  ``$BENCH_TIMES.<r>`` at the end, so that the loop itself does nothing but train.
"""

from __future__ import annotations

import gc
import json
import os
import time

BEGIN = time.time()

import torch  # noqa: E402 - the time of this import is part of what is measured
import torch.distributed as dist  # noqa: E402


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    width, batch = int(os.environ.get("BENCH_WIDTH", "64")), int(os.environ.get("BENCH_BATCH", "8"))
    steps, pause_s = int(os.environ.get("BENCH_STEPS", "400")), float(os.environ.get("BENCH_PAUSE_S", "0.1"))
    layers = [torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, width)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times_path, log_path = os.environ.get("BENCH_TIMES"), os.environ.get("BENCH_LOG")
    checkpoint = f"{log_path}.checkpoint"
    step = 0
    if not times_path and os.path.exists(checkpoint):
        saved = torch.load(checkpoint, weights_only=True)
        step = saved["step"]
        model.load_state_dict(saved["model"])
    log = None if times_path else open(f"{log_path}.{rank}", "a", buffering=1)  # noqa: SIM115 - until the end
    times = []
    while step < steps:
        begin = time.perf_counter()
        loss = model(torch.randn(batch, width)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        times.append(time.perf_counter() - begin)
        if log:
            if rank == 0:
                torch.save({"step": step, "model": model.state_dict()}, f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)
            line = {"wall_s": time.time(), "step": step, "pid": os.getpid(), "boot_s": time.time() - BEGIN}
            log.write(json.dumps(line) + "\n")
        if pause_s:
            time.sleep(pause_s)
    if times_path:
        with open(f"{times_path}.{rank}", "w") as file:
            json.dump(times, file)
    # The reducer of DDP must not be the last to hold the process group: it would end it with the GIL held,
    # for which the thread of gloo may be waiting (seen once in 50 ends with torch 2.13).
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
