"""Processor time of planning a resharded load: layouts into a catalog, and each new rank's plan, by number
of ranks.

    python -m benchmarks.reshard_plan              up to 2,048 saved ranks x 1,000 tensors
    python -m benchmarks.reshard_plan --ranks 512

A node pays for the catalog once and for the plans of its own ranks. Linear means that the time per stored
chunk stays the same as ranks grow."""

from __future__ import annotations

import argparse
import time

from easyckpt.assembly import place
from easyckpt.catalog import Catalog, Planner
from easyckpt.layout import ChunkSpec

TENSORS = 1000
ROWS_PER_RANK = 4
WIDTH = 64


def rows_of(rank: int, ranks: int, names: list[str]) -> list[tuple[object, ...]]:
    """A rank's layout, as it travels."""
    shape, size = (ranks * ROWS_PER_RANK, WIDTH), ROWS_PER_RANK * WIDTH * 4
    first = rank * ROWS_PER_RANK
    return [
        (
            name,
            name,
            "box",
            "float32",
            shape,
            (first, 0),
            (ROWS_PER_RANK, WIDTH),
            at * size,
            (at + 1) * size,
            None,
        )
        for at, name in enumerate(names)
    ]


def measure(ranks: int) -> tuple[float, float]:
    """Seconds of processor time: for the catalog, and for one new rank's plan."""
    names = [f"layers.{number}.weight" for number in range(TENSORS)]
    catalog = Catalog()
    spent = 0.0
    for rank in range(ranks):
        rows = rows_of(rank, ranks, names)
        began = time.process_time()
        catalog.add(rows, ranks=(rank,))
        spent += time.process_time() - began
    planner = Planner(catalog, dict.fromkeys(range(ranks), 0))
    now = ranks // 2 + 1
    plans = []
    for rank in (0, now // 2):
        low, high = (number * ranks * ROWS_PER_RANK // now for number in (rank, rank + 1))
        wanted = [
            ChunkSpec(
                name=name,
                dtype="float32",
                global_shape=(ranks * ROWS_PER_RANK, WIDTH),
                offsets=(low, 0),
                sizes=(high - low, WIDTH),
            )
            for name in names
        ]
        began = time.process_time()
        planner.assemble(wanted, begins=place(wanted)[0])
        plans.append(time.process_time() - began)
    return spent + plans[0] - plans[1], plans[1]  # the first plan sorts the catalog's names


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2048)
    largest = parser.parse_args().ranks
    print(f"{'saved ranks':>12} {'catalog s':>10} {'us a chunk':>11} {'a plan s':>9}")
    for ranks in (largest // 4, largest // 2, largest):
        catalog, plan = measure(ranks)
        print(f"{ranks:12} {catalog:10.2f} {catalog / ranks / TENSORS * 1e6:11.2f} {plan:9.3f}")


if __name__ == "__main__":
    main()
