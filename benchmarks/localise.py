"""Finding faulty nodes in simulated fleets: the search of sanitycheck beside two other ways, on equal seeds.

    python benchmarks/localise.py [--seeds 5] [--first-seed 0] [--nodes 100,1000,10000]

Prints a table: precision and recall over all seeds, rounds of tests, and the time they would take where a
round takes 10 s to start and 20 s to measure. The other ways are written from their published descriptions:
neighbour pairs, then the fastest with the slowest (DLRover), and bisection with a test of every remaining
suspect beside a good node (Azure).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from sanitycheck.localise.evidence import Limits
from sanitycheck.localise.search import conclude, plan
from sanitycheck.localise.world import World, make_world

ROUND_S = 30.0
STRAGGLER_SHARE = 0.75
BISECT_STOP = 3

Answer = tuple[set[str], int]


def tournament(world: World) -> Answer:
    """The search of sanitycheck."""
    evidence = world.start()
    while pairs := plan(evidence):
        evidence = evidence.with_round(world.round(pairs))
    verdicts = conclude(evidence)
    return {culprit.first for culprit in verdicts.nodes}, 1 + verdicts.rounds


def repairing(world: World) -> Answer:
    """Neighbours, then the fastest with the slowest; bad twice is faulty."""
    bad_before: set[str] = set()
    order = list(world.nodes)
    bad: set[str] = set()
    for attempt in range(2):
        outcomes = world.round([(order[i], order[i + 1]) for i in range(0, len(order) - 1, 2)])
        scores = [outcome.score or 0.0 for outcome in outcomes]
        floor = STRAGGLER_SHARE * statistics.median(scores)
        found = {
            node
            for outcome, score in zip(outcomes, scores, strict=True)
            if score < floor
            for node in (outcome.first, outcome.second)
        }
        if attempt:
            bad = found & bad_before
        bad_before = found
        ranked = sorted(zip(scores, outcomes, strict=True), key=lambda item: item[0])
        slow_first = [node for _, outcome in ranked for node in (outcome.first, outcome.second)]
        half = len(slow_first) // 2
        order = [
            node
            for pair in zip(slow_first[:half], reversed(slow_first[half:]), strict=False)
            for node in pair
        ]
    return bad, 2


def bisection(world: World) -> Answer:
    """Halves, and halves of those that are bad; the rest beside a node that passed."""
    todo: list[list[str]] = [list(world.nodes)]
    suspects: list[str] = []
    good: list[str] = []
    rounds = 0
    while todo:
        rounds += 1
        deeper: list[list[str]] = []
        for members in todo:
            score = world.group(members)
            if score is not None and score >= STRAGGLER_SHARE:
                good.extend(members)
            elif len(members) <= BISECT_STOP:
                suspects.extend(members)
            else:
                deeper += [members[: len(members) // 2], members[len(members) // 2 :]]
        todo = deeper
    if not good:
        return set(), rounds
    bad = set()
    for place, node in enumerate(suspects):
        score = world.group((node, good[place % len(good)]))
        if score is None or score < STRAGGLER_SHARE:
            bad.add(node)
    waves = -(-len(suspects) // len(good))
    return bad, rounds + waves


WAYS: dict[str, Callable[[World], Answer]] = {
    "tournament": tournament,
    "neighbours": repairing,
    "bisection": bisection,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A kind of fleet."""

    name: str
    faulty_share: float
    rack: int = 0
    intermittent: float = 0.0
    bad_links: int = 0


SCENARIOS = (
    Scenario(name="none faulty", faulty_share=0.0),
    Scenario(name="0.5 %", faulty_share=0.005),
    Scenario(name="2 %", faulty_share=0.02),
    Scenario(name="5 %", faulty_share=0.05),
    Scenario(name="2 %, whole racks", faulty_share=0.02, rack=16),
    Scenario(name="2 %, half come and go", faulty_share=0.02, intermittent=0.5),
    Scenario(name="5 %, racks, come and go", faulty_share=0.05, rack=16, intermittent=0.3),
    Scenario(name="1 %, 10 bad links", faulty_share=0.01, bad_links=10),
    Scenario(name="30 %", faulty_share=0.30),
)


def measured(scenario: Scenario, count: int, *, way: str, seeds: range) -> tuple[float, float, float]:
    """(precision, recall, rounds) over all seeds."""
    right = called = faulty = rounds = 0
    for seed in seeds:
        world = make_world(
            count,
            seed=1000 * seed + count,
            faulty_share=scenario.faulty_share,
            rack=scenario.rack,
            intermittent=scenario.intermittent,
            bad_links=scenario.bad_links,
        )
        bad, used = WAYS[way](world)
        right += len(bad & set(world.faults))
        called += len(bad)
        faulty += len(world.faults)
        rounds += used
    return right / called if called else 1.0, right / faulty if faulty else 1.0, rounds / len(seeds)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0, help="others than last time prove more")
    parser.add_argument("--nodes", default="100,1000,10000")
    args = parser.parse_args()
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    print(f"{args.seeds} seeds from {args.first_seed}")
    print(f"a round of pairs takes {ROUND_S:g} s; limits {Limits()}\n")
    print("| nodes | faulty | way | precision | recall | rounds | minutes |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    begin = time.process_time()
    for count in (int(part) for part in args.nodes.split(",")):
        for scenario in SCENARIOS:
            for way in WAYS:
                precision, recall, rounds = measured(scenario, count, way=way, seeds=seeds)
                minutes = rounds * ROUND_S / 60
                print(
                    f"| {count} | {scenario.name} | {way} | {precision:.3f} | {recall:.3f} | {rounds:.1f} "
                    f"| {minutes:.1f} |"
                )
    print(f"\ncomputed in {time.process_time() - begin:.1f} s of one processor")


if __name__ == "__main__":
    main()
