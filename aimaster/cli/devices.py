"""How many workers `--nproc-per-node` means on this machine, found without torch.

NVML is asked in a child process with a deadline: a sick driver may never answer, and a launcher that hangs
without a word is worse than an error. What the child counts is what CUDA would show: `CUDA_VISIBLE_DEVICES`
hides devices, and ends at its first entry that is not one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from aimaster.errors import SetupError, UsageError

__all__ = ["visible_gpus", "workers_for"]

NVML_TIMEOUT_S = 20.0
"""A healthy driver answers in well under a second; loading it for the first time may take several."""

_COUNT = """
import pynvml
try:
    pynvml.nvmlInit()
except pynvml.NVMLError:
    print(0)
else:
    print(pynvml.nvmlDeviceGetCount())
"""


def workers_for(text: str, *, env: Mapping[str, str]) -> int:
    """Number of workers that `--nproc-per-node` asks for: a number, `cpu`, `gpu` or `auto`.

    Raises:
        UsageError: Another word. `xpu` and the names of plug-in devices need torch to count them.
        SetupError: `gpu` on a machine that shows none, or a driver that does not answer.
    """
    try:
        return int(text)
    except ValueError:
        pass
    if text == "cpu":
        return _processors()
    if text == "auto":
        return visible_gpus(env) or _processors()
    if text == "gpu":
        count = visible_gpus(env)
        if not count:
            raise SetupError(
                "--nproc-per-node gpu: no GPU is visible on this node",
                where=f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '(not set)')}",
                next_step="give a number, or cpu, or look with: sanitycheck run --expect-gpus N",
            )
        return count
    raise UsageError(
        "--nproc-per-node needs a number, auto, cpu or gpu",
        where=f"{text!r} was given",
        next_step="give the number of devices" if text == "xpu" else "",
    )


def visible_gpus(env: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a worker with these variables would see."""
    if env.get("CUDA_VISIBLE_DEVICES", "x") in ("", "-1"):
        return 0
    return _visible(_nvml_count(env), env.get("CUDA_VISIBLE_DEVICES"))


def _visible(count: int, listed: str | None) -> int:
    """Devices left of `count` behind `CUDA_VISIBLE_DEVICES`."""
    if listed is None or count == 0:
        return count
    seen: set[str] = set()
    for entry in (part.strip() for part in listed.split(",")):
        named = entry.startswith(("GPU-", "MIG-"))
        if not named and not (entry.isdigit() and int(entry) < count):
            break
        if entry in seen:
            return 0  # CUDA shows nothing at all if a device is named twice
        seen.add(entry)
    return len(seen)


def _nvml_count(env: Mapping[str, str]) -> int:
    try:
        child = subprocess.run(
            [sys.executable, "-c", _COUNT],
            capture_output=True,
            text=True,
            timeout=NVML_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env=dict(env),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SetupError(
            f"the NVIDIA driver did not answer within {NVML_TIMEOUT_S:g} s",
            next_step="give --nproc-per-node as a number, and look at the node with: sanitycheck run",
        ) from None
    return int(child.stdout) if child.stdout.strip().isdigit() else 0


def _processors() -> int:
    return len(os.sched_getaffinity(0))
