"""All cells of "saved by these ranks, loaded by those": frameworks x numbers of ranks x tiers, bit by bit.

    python -m benchmarks.reshard_matrix                    all 725 cells; about an hour on two quiet cores
    python -m benchmarks.reshard_matrix --ranks 2,3        fewer numbers of ranks
    python -m benchmarks.reshard_matrix --continue 20      instead: so many random kills for each kind

Prints one line a failed cell and a table at the end; exits with 1 if any failed. It needs DeepSpeed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from tests.integration.framework_client import Cells, run_cells

KINDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CONTINUED = (
    ("ddp", 1, "float32"),
    ("ddp", 2, "float32"),
    ("fsdp2", 2, "float32"),
    *((f"zero{stage}", 2, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")),
)


def matrix(cells: Cells, ranks: list[int]) -> dict[str, list[int]]:
    """Row per source: cells that were right, and cells that were tried."""
    found: dict[str, list[int]] = {}
    for saved in KINDS:
        for then in ranks:
            # A launcher of one rank shares no saver with its own later, wider attempts.
            targets = [
                (kind, now, tier)
                for tier in ("memory", "disk")
                for kind in KINDS
                for now in ranks
                if tier == "disk" or then > 1 or now == 1
            ]
            source = cells.source(saved, then)
            row = found.setdefault(f"{saved} x {then}", [0, 0])
            for number, (kind, now, tier) in enumerate(targets):
                last = number + 1 == len(targets) or (tier, targets[number + 1][2]) == ("memory", "disk")
                row[1] += 1
                try:
                    cells.load(kind, now, of=source, tier=tier, last=last)
                    row[0] += 1
                except AssertionError as error:
                    print(f"{saved} x {then} -> {kind} x {now} from {tier}: {error}", flush=True)
    return found


def continuation(cells: Cells, count: int, seed: int) -> dict[str, list[int]]:
    """Row per kind: runs that went on bit-equal, and runs that were tried."""
    rng = random.Random(seed)
    found: dict[str, list[int]] = {}
    for kind, ranks, dtype in CONTINUED:
        row = found.setdefault(f"{kind} x {ranks} {dtype}", [0, 0])
        for _ in range(count):
            row[1] += 1
            try:
                differ = cells.continues(kind, ranks, dtype=dtype, rng=rng)
            except AssertionError as error:
                differ = [str(error)]
            row[0] += not differ
            if differ:
                print(f"{kind} x {ranks} {dtype}: {differ}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks")
    parser.add_argument("--continue", dest="count", type=int, default=0, help="kills per kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, run_cells(Path(folder)) as cells:
        if options.count:
            found = continuation(cells, options.count, options.seed)
        else:
            found = matrix(cells, [int(text) for text in options.ranks.split(",")])
    for name, (right, tried) in found.items():
        print(f"{name:24} {right:4} of {tried} bit-equal")
    return 0 if all(right == tried for right, tried in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
