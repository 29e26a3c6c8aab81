"""What watching costs: training step time under ``aimaster run`` divided by that under ``torchrun``.

    python benchmarks/step_overhead.py --rounds 8

Each round starts torchrun, aimaster and torchrun again, in an order that alternates, and takes the median
step of each launch. The ratio aimaster/torchrun is worth nothing without the ratio torchrun/torchrun beside
it, measured in the same rounds: its interval is what the machine alone does. Intervals are 95 % bootstrap
intervals of the median ratio over rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from launchers import end, end_on_sigterm, start

WARM_UP_STEPS = 20
BOOTSTRAPS = 2000


def median_step_s(name: str, *, steps: int, width: int, batch: int, limit_s: float) -> float:
    """The median step time of rank 0 in one launch."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        times, output = Path(folder) / "times", Path(folder) / "output"
        environment = {
            "BENCH_TIMES": str(times),
            "BENCH_STEPS": str(steps + WARM_UP_STEPS),
            "BENCH_WIDTH": str(width),
            "BENCH_BATCH": str(batch),
            "BENCH_PAUSE_S": "0",
        }
        process = start(name, environment, output)
        try:
            code = process.wait(limit_s)
        finally:
            end(process, ())
        if code != 0:
            raise RuntimeError(
                f"{name} ended with code {code}:\n{output.read_text(errors='replace')[-1500:]}"
            )
        return statistics.median(json.loads(Path(f"{times}.0").read_text())[WARM_UP_STEPS:])


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
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=224)
    parser.add_argument("--limit_s", type=float, default=300.0)
    arguments = parser.parse_args()
    end_on_sigterm()
    size = {key: getattr(arguments, key) for key in ("steps", "width", "batch", "limit_s")}
    against: list[float] = []
    alone: list[float] = []
    bases: list[float] = []
    for number in range(arguments.rounds):
        begin = time.monotonic()
        order = ["torchrun", "aimaster", "torchrun again"]
        found = {
            key: median_step_s(key.split()[0], **size) for key in (order if number % 2 == 0 else order[::-1])
        }
        base = (found["torchrun"] + found["torchrun again"]) / 2
        bases.append(base)
        against.append(found["aimaster"] / base)
        alone.append(found["torchrun again"] / found["torchrun"])
        line = {name: round(value * 1000, 3) for name, value in found.items()}
        print(
            json.dumps({"round": number, "step_ms": line, "took_s": round(time.monotonic() - begin, 1)}),
            flush=True,
        )
    print(f"step under torchrun: {statistics.median(bases) * 1000:.2f} ms")
    for label, ratios in (("aimaster / torchrun", against), ("torchrun / torchrun", alone)):
        low, high = interval(ratios)
        print(f"{label}: median {statistics.median(ratios):.4f}, 95 % interval {low:.4f} to {high:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
