"""Drives `framework_cells.py`: one process that has imported the frameworks once, and forks the ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from easyckpt.bootstrap import LINGER_S
from tests.extensions import DEEPSPEED

CELL_TIMEOUT_S = 240
REPOSITORY = Path(__file__).parents[2]


@dataclass
class Cells:
    """Cells of one folder. Each checkpoint folder and each job's name is used by one kind of source only."""

    folder: Path
    process: subprocess.Popen[str]
    loads: int = 0
    held: dict[str, float] = field(default_factory=dict)
    """When each source's saver was last in use: one that is left alone lingers for a while, and ends."""
    """When the ranks of each source's saver were last seen: a saver that is left alone lingers for a
    while."""

    def run(self, **cell: Any) -> None:
        """One cell; what its ranks said is the error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(cell) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the process that runs the cells has ended"
        error = json.loads(line)
        assert not error, f"{cell}\n{error}"

    def source(self, kind: str, ranks: int, dtype: str = "float32") -> dict[str, Any]:
        """A checkpoint that these ranks saved, made at the first use; it is in memory and on storage."""
        name = f"{kind}.{ranks}.{dtype}"
        source = {
            "root": str(self.folder / "ckpt" / name),
            "expect": str(self.folder / f"{name}.pt"),
            "dtype": dtype,
        }
        if name not in self.held:
            self.run(do="save", kind=kind, ranks=ranks, job=name, steps=2, **source)
            self.held[name] = time.monotonic()
        return {**source, "memory_job": name}

    def load(
        self,
        kind: str,
        ranks: int,
        *,
        of: dict[str, Any],
        tier: str,
        dtype: str = "",
        last: bool = False,
    ) -> None:
        """Load a source into other ranks or another framework, and compare every logical tensor.

        Args:
            kind: the framework.
            ranks: how many.
            of: what `source` gave.
            tier: ``memory``, of the saver that the source's ranks left, or ``disk``.
            dtype: of the weights, if it is another one.
            last: whether the saver that has it in memory may end.
        """
        self.loads += 1
        job = of["memory_job"] if tier == "memory" else f"disk{self.loads}"
        cell = {
            **of,
            "dtype": dtype or of["dtype"],
            "job": job,
            "tier": tier,
            "close": last or tier == "disk",
        }
        name = cell.pop("memory_job")
        until = self.held[name] + LINGER_S
        self.run(do="load", kind=kind, ranks=ranks, seed=7, lingers_until=until, **cell)
        if tier == "memory":
            self.held[name] = time.monotonic()

    def continues(
        self, kind: str, ranks: int, *, dtype: str, rng: random.Random, steps: int = 5
    ) -> list[str]:
        """Train straight through, and with a SIGKILL of a random rank in a random step; what differs then."""
        self.loads += 1
        names = [f"{how}{self.loads}" for how in ("straight", "broken")]
        straight, broken = (
            {
                "job": name,
                "root": str(self.folder / "ckpt" / name),
                "expect": str(self.folder / f"{name}.pt"),
                "kind": kind,
                "dtype": dtype,
                "ranks": ranks,
                "steps": steps,
                "close": True,
                "do": "run",
            }
            for name in names
        )
        self.run(**straight)
        self.run(**broken, kill=rng.randrange(1, steps), victim=rng.randrange(ranks))
        self.run(**broken)
        one, other = (torch.load(cell["expect"], weights_only=True) for cell in (straight, broken))
        return sorted(
            name for name in {*one, *other} if name not in one or not torch.equal(one[name], other[name])
        )


@contextmanager
def run_cells(folder: Path) -> Iterator[Cells]:
    """The process, ended with the block."""
    with (folder / "cells.err").open("w") as trouble:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.framework_cells", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=trouble,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, **DEEPSPEED},
        )
    try:
        yield Cells(folder=folder, process=process)
    finally:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.wait(CELL_TIMEOUT_S)
        process.stdout.close()
