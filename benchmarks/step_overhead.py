"""What watching costs: training step time under ``aimaster run`` divided by that under ``torchrun``.

    python benchmarks/step_overhead.py --rounds 8

The two run at the same time, one rank each, each with all that its launcher starts on a core of its own, and
then once more with the cores exchanged: what else the machine does meets both. A round's ratio is the
geometric mean of the two. It is worth nothing without the ratio torchrun/torchrun beside it, measured in the
same way in the same round: its interval is what the machine alone does. Intervals are 95 % bootstrap
intervals of the median ratio over rounds. Needs two cores and `taskset`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from launchers import end, end_on_sigterm, start

WARM_UP_STEPS = 20
BOOTSTRAPS = 2000


@dataclass(frozen=True)
class Size:
    """How long a launch trains, and what a step computes."""

    steps: int
    width: int
    batch: int
    limit_s: float


def median_step_s(name: str, core: int, size: Size) -> float:
    """The median step time of a launch on one core."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        times, output = Path(folder) / "times", Path(folder) / "output"
        environment = {
            "BENCH_TIMES": str(times),
            "BENCH_STEPS": str(size.steps + WARM_UP_STEPS),
            "BENCH_WIDTH": str(size.width),
            "BENCH_BATCH": str(size.batch),
            "BENCH_PAUSE_S": "0",
        }
        process = start(name, environment, output, ranks=1, core=core)
        try:
            code = process.wait(size.limit_s)
        finally:
            end(process, ())
        if code != 0:
            raise RuntimeError(
                f"{name} ended with code {code}:\n{output.read_text(errors='replace')[-1500:]}"
            )
        return statistics.median(json.loads(Path(f"{times}.0").read_text())[WARM_UP_STEPS:])


def ratio(one: str, other: str, size: Size, cores: tuple[int, int]) -> tuple[float, float]:
    """Step time of one launcher / that of the other, side by side on either core; and the other's, in s."""
    squared, base = 1.0, 0.0
    with ThreadPoolExecutor(2) as pool:
        for mine, its in (cores, cores[::-1]):
            first = pool.submit(median_step_s, one, mine, size)
            second = pool.submit(median_step_s, other, its, size)
            squared *= first.result() / second.result()
            base += second.result() / 2
    return math.sqrt(squared), base


def interval(ratios: list[float], seed: int = 1) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(seed)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS))
    return medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS)]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=224)
    parser.add_argument("--limit_s", type=float, default=300.0)
    arguments = parser.parse_args()
    end_on_sigterm()
    size = Size(**{field.name: getattr(arguments, field.name) for field in fields(Size)})
    first, second = sorted(os.sched_getaffinity(0))[:2]
    against: list[float] = []
    alone: list[float] = []
    bases: list[float] = []
    for number in range(arguments.rounds):
        begin = time.monotonic()
        found, base = ratio("aimaster", "torchrun", size, (first, second))
        against.append(found)
        alone.append(ratio("torchrun", "torchrun", size, (first, second))[0])
        bases.append(base)
        line = {
            "step_ms": round(base * 1000, 3),
            "aimaster": round(found, 4),
            "torchrun": round(alone[-1], 4),
        }
        print(json.dumps({"round": number, **line, "took_s": round(time.monotonic() - begin, 1)}), flush=True)
    print(f"step under torchrun: {statistics.median(bases) * 1000:.2f} ms")
    for label, ratios in (("aimaster / torchrun", against), ("torchrun / torchrun", alone)):
        low, high = interval(ratios)
        print(f"{label}: median {statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
