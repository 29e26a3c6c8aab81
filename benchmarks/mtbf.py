"""What failures cost trainings of 1,024 and 16,384 GPUs, by how they are seen and restarted: in virtual time.

    python benchmarks/mtbf.py [--failures 10] [--seeds 1] [--gpus 1024 16384]

The master's own decisions, simulated (`aimaster.simulation.fleet`), on nodes of 8 GPUs with 2 % spares. How
often something fails is what was reported of Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs,
one in 3.1 hours; for 1,024 GPUs the same rate per GPU. What fails is the mix of
`aimaster.simulation.scenario`. Each run is as long as so many failures take on average, so that a small job
sees as many as a large one; the same seed strikes every way at the same moments.

Two ways to live with it:

* *warm*: a checkpoint in memory at every step, a lost node is given up after 60 s, a hang is found after 5 s,
  workers make their first step 10 s after they were started;
* *cold*: a checkpoint on disk every 30 minutes, a hang is found after 10 minutes (a collective's time-out),
  and 5 minutes from start to first step (imports, rendezvous, load).

The figures of the second way are assumptions about a usual set-up, not measurements of anybody's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from random import Random

from aimaster.core.detector import DetectorConfig
from aimaster.simulation.faults import Fault, FaultKind
from aimaster.simulation.fleet import Fleet, Outcome, train
from aimaster.simulation.scenario import draw_by_mtbf

GPUS_PER_NODE = 8
INTERRUPTIONS, DAYS, GPUS = 419, 54, 16_384
MTBF_PER_GPU_S = DAYS * 86_400 * GPUS / INTERRUPTIONS
STEP_S = 10.0
SPARE_SHARE = 0.02
SLOW_BEAT = DetectorConfig(heartbeat_interval_s=10.0, suspect_s=30.0, dead_s=60.0)


@dataclass(frozen=True)
class Way:
    """How failures are lived with."""

    name: str
    hang_s: float
    first_step_s: float
    commit_every: int


WAYS = (
    Way(name="warm", hang_s=5.0, first_step_s=10.0, commit_every=1),
    Way(name="cold", hang_s=600.0, first_step_s=300.0, commit_every=180),
)


def faults_of(seed: int, *, nodes: int, hours: float, way: Way) -> tuple[Fault, ...]:
    """The same faults for every way; only a hang is found sooner or later."""
    mtbf_s = MTBF_PER_GPU_S / (nodes * GPUS_PER_NODE)
    drawn = draw_by_mtbf(Random(seed), nodes=nodes, horizon_s=hours * 3600, mtbf_s=mtbf_s)
    return tuple(
        replace(fault, lasts_s=way.hang_s) if fault.kind is FaultKind.HANG_WORKERS else fault
        for fault in drawn
    )


def run(gpus: int, way: Way, *, hours: float, seed: int) -> Outcome:
    nodes = gpus // GPUS_PER_NODE
    return train(
        Fleet(
            nodes=nodes,
            spares=max(1, round(nodes * SPARE_SHARE)),
            minutes=hours * 60,
            seed=seed,
            step_s=STEP_S,
            first_step_s=way.first_step_s,
            commit_every=way.commit_every,
            detector=SLOW_BEAT,
            faults=faults_of(seed, nodes=nodes, hours=hours, way=way),
        )
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--failures", type=float, default=10.0, help="expected in each run")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 16_384])
    arguments = parser.parse_args()
    print("| GPUs | mean time between failures | way | hours | faults | goodput | lost GPU-hours per day |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    begin = time.process_time()
    for gpus in arguments.gpus:
        mtbf_h = MTBF_PER_GPU_S / gpus / 3600
        hours = arguments.failures * mtbf_h
        for way in WAYS:
            found = [run(gpus, way, hours=hours, seed=seed) for seed in range(arguments.seeds)]
            goodput = statistics.fmean(outcome.goodput for outcome in found)
            faults = sum(outcome.faults for outcome in found)
            lost = gpus * 24 * (1 - goodput)
            print(
                f"| {gpus:,} | {mtbf_h:.1f} h | {way.name} | {hours * arguments.seeds:,.0f} "
                f"| {faults} | {goodput:.2%} | {lost:,.0f} |",
                flush=True,
            )
    print(f"\n{time.process_time() - begin:.0f} s of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
