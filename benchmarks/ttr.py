"""Time to recover: SIGKILL of one of two ranks → the next step that nobody had finished before.

    python benchmarks/ttr.py --repeats 5

The launchers take turns, so that a slow minute of the machine hurts both, and what counts is the ratio of the
medians. Also measured: from the start of the launcher to the first finished step.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launchers import COMMANDS, end, end_on_sigterm, start

STEPS_BEFORE = 40
POLL_S = 0.01


def lines(log: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has logged so far, in all its lives."""
    path = Path(f"{log}.{rank}")
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def measure(name: str, *, limit_s: float) -> dict[str, Any]:
    """One launch: start, kill rank 1 after some steps, wait for the next new step of rank 0."""
    with tempfile.TemporaryDirectory(prefix="ttr-") as folder:
        log, output = Path(folder) / "log", Path(folder) / "output"
        begin = time.time()
        process = start(name, {"BENCH_LOG": str(log), "BENCH_STEPS": "100000"}, output)
        pids: set[int] = set()
        try:
            while len(lines(log, 1)) < STEPS_BEFORE:
                if process.poll() is not None or time.time() - begin > limit_s:
                    return {"name": name, "error": output.read_text(errors="replace")[-1500:]}
                time.sleep(POLL_S)
            first = lines(log, 0)[0]["wall_s"] - begin
            victim = lines(log, 1)[-1]["pid"]
            killed = time.time()
            os.kill(victim, signal.SIGKILL)
            old = {line["pid"] for rank in (0, 1) for line in lines(log, rank)}
            new: list[dict[str, Any]] = []
            while not new and time.time() - killed < limit_s and process.poll() is None:
                time.sleep(POLL_S)
                seen = lines(log, 0)
                reached = max(line["step"] for line in seen if line["pid"] in old)
                new = [line for line in seen if line["pid"] not in old and line["step"] > reached]
            if not new:
                return {"name": name, "error": f"no new step within {limit_s:.0f} s"}
            return {
                "name": name,
                "start_s": round(first, 3),
                "recover_s": round(new[0]["wall_s"] - killed, 3),
                "recomputed": reached + 1 - next(line for line in seen if line["pid"] not in old)["step"],
            }
        finally:
            pids |= {line["pid"] for rank in (0, 1) for line in lines(log, rank)}
            end(process, pids)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launchers", nargs="+", default=["torchrun", "aimaster"], choices=sorted(COMMANDS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit_s", type=float, default=120.0)
    arguments = parser.parse_args()
    end_on_sigterm()
    results: list[dict[str, Any]] = []
    for _ in range(arguments.repeats):
        for name in arguments.launchers:
            results.append(measure(name, limit_s=arguments.limit_s))
            print(json.dumps(results[-1]), flush=True)
    failed = [result for result in results if "error" in result]
    baseline = arguments.launchers[0]
    for key in ("start_s", "recover_s"):
        medians = {
            name: statistics.median(
                [one[key] for one in results if one["name"] == name and key in one] or [float("nan")]
            )
            for name in arguments.launchers
        }
        for name, median in medians.items():
            ratio = median / medians[baseline]
            print(f"{key:10} {name:14} median {median:7.3f} s   ratio to {baseline} {ratio:.3f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
