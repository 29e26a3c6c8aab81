"""How often the failure detector is wrong, by how bad network and machine are: in virtual time.

    python benchmarks/suspicion.py [--nodes 50] [--hours 4]

`aimaster.simulation.suspicion` says what beats are like. *fixed* is the same detector without its statistics:
a node is judged by the configured times alone. Both judge the same beats. A rate of which nothing was seen is
given as a bound: with 95 % confidence it is below three divided by the hours (the "rule of three": J. A.
Hanley and A. Lippman-Hand, JAMA 249, 1983).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from aimaster.core.detector import DetectorConfig
from aimaster.simulation.suspicion import CONDITIONS, Wrong, judge

ADAPTIVE = DetectorConfig()
DETECTORS = (("adaptive", ADAPTIVE), ("fixed", replace(ADAPTIVE, deviations=0.0, stretch_max=1.0)))


def rate(seen: int, hours: float) -> str:
    """Per node and hour."""
    return f"{seen / hours:.2g}" if seen else f"< {3 / hours:.2g}"


def row(name: str, detector: str, found: Sequence[Wrong]) -> str:
    hours = sum(one.hours for one in found)
    suspected, given_up = sum(one.suspected for one in found), sum(one.given_up for one in found)
    delays = [one.delay_s for one in found if one.delay_s is not None]
    late = f"{statistics.median(delays):.1f} s, at most {max(delays):.1f} s" if delays else "–"
    return f"| {name} | {detector} | {rate(suspected, hours)} | {rate(given_up, hours)} | {late} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=50)
    parser.add_argument("--hours", type=float, default=4.0)
    arguments = parser.parse_args()
    begin = time.process_time()
    print("| conditions | detector | wrong suspicions | wrongly given up | a lost node is given up after |")
    print("| --- | --- | --- | --- | --- |")
    for conditions in CONDITIONS:
        for name, config in DETECTORS:
            found = [
                judge(config, conditions, hours=arguments.hours, seed=seed) for seed in range(arguments.nodes)
            ]
            print(row(conditions.name, name, found), flush=True)
    hours = arguments.nodes * arguments.hours
    print(f"\nper node and hour, {hours:g} hours each, {time.process_time() - begin:.0f} s of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
