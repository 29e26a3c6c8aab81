"""How often the proof of a save finds a tensor that was changed behind the fence, by the kind of the change.

    python benchmarks/witness.py --trials 200

Each trial takes the witness of a tensor, changes it in one way at a random place, copies it as a save would
have, and asks the witness. Printed are the shares of changes that were found with ``verify="sample"`` (the
default) and ``verify="full"``, as a table and as one line of JSON. Nothing is timed, so a busy machine does
no harm.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import random
from collections.abc import Callable

import torch

from easyckpt.layout import ChunkSpec, build_layout
from easyckpt.overlap.plan import CopyPlan
from easyckpt.overlap.witness import Verify, make_witness
from easyckpt.state import LiveTensor

ROWS, COLUMNS = 1024, 512

Change = Callable[[torch.Tensor, random.Random], object]

CHANGES: dict[str, Change] = {
    "torch, in place, all of it": lambda t, draw: t.add_(1),
    "torch, in place, one row (an embedding)": lambda t, draw: t[draw.randrange(ROWS)].add_(1),
    "torch, in place, one element": lambda t, draw: t.view(-1)[draw.randrange(t.numel())].add_(1),
    ".data, all of it": lambda t, draw: t.data.add_(1),
    ".data, half of the rows": lambda t, draw: _half(t.data, draw).add_(1),
    ".data, one row": lambda t, draw: t.data[draw.randrange(ROWS)].add_(1),
    ".data, one element": lambda t, draw: t.data.view(-1)[draw.randrange(t.numel())].add_(1),
    "NumPy, all of it": lambda t, draw: t.numpy().__iadd__(1),
    "NumPy, one row": lambda t, draw: t.numpy()[draw.randrange(ROWS)].__iadd__(1),
    "a foreign kernel, 64 KiB": lambda t, draw: ctypes.memset(
        t.data_ptr() + draw.randrange(t.numel() * 4 - (64 << 10)), 0x5A, 64 << 10
    ),
    "a foreign kernel, all of it": lambda t, draw: ctypes.memset(t.data_ptr(), 0x5A, t.numel() * 4),
}


def _half(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    begin = draw.randrange(ROWS // 2)
    return tensor[begin : begin + ROWS // 2]


def found(change: Change, verify: Verify, draw: random.Random) -> bool:
    """Whether one change is found."""
    tensor = torch.randn(ROWS, COLUMNS)
    spec = ChunkSpec(
        name="t", dtype="float32", global_shape=(ROWS, COLUMNS), offsets=(0, 0), sizes=(ROWS, COLUMNS)
    )
    layout = build_layout([spec], state_bytes=64)
    plan = CopyPlan(layout, [LiveTensor(spec=spec, tensor=tensor, original=tensor, fenced=True)])
    witness = make_witness(plan.later, verify)
    witness.take()
    change(tensor, draw)
    slot = torch.zeros(layout.body_bytes, dtype=torch.uint8)
    for _, _, piece in plan.pieces(slot):
        piece()
    return bool(witness.changed(slot))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    torch.manual_seed(arguments.seed)
    kinds: tuple[Verify, ...] = ("sample", "full")
    rates = {
        name: {
            kind: sum(found(change, kind, draw) for _ in range(arguments.trials)) / arguments.trials
            for kind in kinds
        }
        for name, change in CHANGES.items()
    }
    print(f"{'change of a tensor of 2 MiB behind the fence':46} {'sample':>8} {'full':>8}")
    for name, rate in rates.items():
        print(f"{name:46} {rate['sample']:8.0%} {rate['full']:8.0%}")
    print(json.dumps({"schema": 1, "trials": arguments.trials, "rates": rates}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
