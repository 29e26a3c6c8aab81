"""All cells of "saved by these ranks, loaded by those": frameworks x numbers of ranks x tiers, bit by bit.

    python -m benchmarks.reshard_matrix                    all 725 cells; about an hour on two quiet cores
    python -m benchmarks.reshard_matrix --ranks 2,3        fewer numbers of ranks
    python -m benchmarks.reshard_matrix --continue 20      instead: so many random kills for each kind

With ``--results FILE`` every cell is written down when it is done, and cells that were right are not tried
again: what was cut off, or stopped by ``--minutes``, goes on with the same command. ``--slice 2/5`` runs the
second fifth. A kill is drawn from the seed and the cell's name alone, so that it does not depend on what ran
before.

Prints one line a failed cell and a table at the end; exits with 1 if any failed. It needs DeepSpeed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.integration.framework_client import Cells, run_cells

KINDS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
CONTINUED = (
    ("ddp", 1, "float32"),
    ("ddp", 2, "float32"),
    ("fsdp2", 2, "float32"),
    *((f"zero{stage}", 2, dtype) for stage in (1, 2, 3) for dtype in ("float32", "bfloat16")),
)


@dataclass
class Record:
    """What was found, by row and cell; written down line by line where a file was named.

    Args:
        file: of earlier and later results, or None.
        until: moment of the monotonic clock after which no cell is begun.
    """

    file: Path | None
    until: float
    found: dict[str, dict[str, str]] = field(default_factory=dict)
    """Row → cell → error, empty if it was right."""

    def __post_init__(self) -> None:
        if self.file is not None and self.file.exists():
            for line in self.file.read_text().splitlines():
                entry = json.loads(line)
                self.found.setdefault(entry["row"], {})[entry["cell"]] = entry["error"]

    def wants(self, row: str, cell: str) -> bool:
        """Whether the cell is still to be tried, and there is time for it."""
        return self.found.get(row, {}).get(cell) != "" and time.monotonic() < self.until

    def attempt(self, row: str, cell: str, work: Callable[[], object]) -> None:
        """Run one cell if it is wanted; it is right if it raises nothing and returns nothing."""
        if not self.wants(row, cell):
            return
        try:
            wrong = work()
            error = f"differ: {wrong}" if wrong else ""
        except AssertionError as failure:
            error = str(failure)
        self.found.setdefault(row, {})[cell] = error
        if error:
            print(f"{row} {cell}: {error}", flush=True)
        if self.file is not None:
            with self.file.open("a") as out:
                out.write(json.dumps({"row": row, "cell": cell, "error": error}) + "\n")

    def table(self) -> bool:
        """Print it; whether all that was tried was right."""
        for row, cells in sorted(self.found.items()):
            print(f"{row:24} {sum(not error for error in cells.values()):4} of {len(cells)} bit-equal")
        return all(not error for cells in self.found.values() for error in cells.values())


def matrix(cells: Cells, record: Record, *, ranks: list[int], part: tuple[int, int]) -> None:
    """Row per source, a cell for each target that has not been right yet."""
    sources = [(saved, then) for saved in KINDS for then in ranks]
    for saved, then in sources[part[0] - 1 :: part[1]]:
        row = f"{saved} x {then} ->"
        for tier in ("memory", "disk"):
            # A launcher of one rank shares no saver with its own later, wider attempts.
            targets = [
                (kind, now)
                for kind in KINDS
                for now in ranks
                if (tier == "disk" or then > 1 or now == 1) and record.wants(row, f"{kind} x {now}, {tier}")
            ]
            for number, (kind, now) in enumerate(targets):
                last = number + 1 == len(targets)
                load = partial(_load, cells, (saved, then), kind, now=now, tier=tier, last=last)
                record.attempt(row, f"{kind} x {now}, {tier}", load)


def _load(cells: Cells, source: tuple[str, int], kind: str, *, now: int, tier: str, last: bool) -> None:
    cells.load(kind, now, of=cells.source(*source), tier=tier, last=last)


def continuation(cells: Cells, record: Record, *, count: int, seed: int) -> None:
    """Row per kind, a cell for each kill. The kinds take turns, so that a short run has some of each."""
    for number in range(count):
        for kind, ranks, dtype in CONTINUED:
            row, cell = f"{kind} x {ranks} {dtype}", f"kill {seed}.{number}"
            rng = random.Random(f"{row} {cell}")
            record.attempt(row, cell, partial(cells.continues, kind, ranks, dtype=dtype, rng=rng))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", default="1,2,3,4", help="numbers of ranks")
    parser.add_argument("--continue", dest="count", type=int, default=0, help="kills per kind")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="where results are kept, and found again")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell later than this")
    parser.add_argument("--slice", default="1/1", help="I/N: the I-th of N parts of the sources")
    options = parser.parse_args()
    first, _, parts = options.slice.partition("/")
    record = Record(file=options.results, until=time.monotonic() + options.minutes * 60)
    with tempfile.TemporaryDirectory() as folder, run_cells(Path(folder)) as cells:
        if options.count:
            continuation(cells, record, count=options.count, seed=options.seed)
        else:
            ranks = [int(text) for text in options.ranks.split(",")]
            matrix(cells, record, ranks=ranks, part=(int(first), int(parts)))
    return 0 if record.table() else 1


if __name__ == "__main__":
    sys.exit(main())
