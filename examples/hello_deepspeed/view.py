"""Live progress of a job, read from the step logs that its ranks append.

On a terminal the view redraws itself; anywhere else it prints a plain line per event and every few steps.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

PLAIN_EVERY_STEPS = 20
EVENTS_SHOWN = 8


class StepReader:
    """Follows the step logs of a run: each call of `read` returns what is new."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """Complete lines since the last call."""
        new = []
        for path in sorted(self._folder.glob("rank*.jsonl")):
            with open(path, "rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            new += [json.loads(line) for line in whole.splitlines()]
        return new


@dataclass(slots=True)
class RankState:
    """What a rank said last."""

    step: int = 0
    loss: float = 0.0
    node: str = ""
    generation: int = 0


class View(AbstractContextManager["View"]):
    """Shows where every rank is, and what has happened."""

    def __init__(self, *, title: str, steps: int, ranks: int) -> None:
        self._title, self._steps = title, steps
        self._ranks = {rank: RankState() for rank in range(ranks)}
        self._events: list[str] = []
        self._begin = time.monotonic()
        self._console = Console()
        self._live = Live(console=self._console, auto_refresh=False) if sys.stdout.isatty() else None
        self._printed = 0

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        self.event(self._title)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def event(self, text: str) -> None:
        """Something happened that a reader wants to know."""
        line = f"{time.monotonic() - self._begin:6.1f} s  {text}"
        self._events.append(line)
        if self._live:
            self._redraw()
        else:
            print(line, flush=True)

    def update(self, lines: list[dict[str, Any]]) -> None:
        """Take in new lines of the step logs."""
        for line in lines:
            state = self._ranks.setdefault(line["rank"], RankState())
            state.step, state.loss = line["step"], line["loss"]
            state.node, state.generation = line.get("node") or "", line["generation"]
        if self._live:
            self._redraw()
            return
        step = min(state.step for state in self._ranks.values())
        if step // PLAIN_EVERY_STEPS > self._printed:
            self._printed = step // PLAIN_EVERY_STEPS
            loss = self._ranks[0].loss
            print(
                f"{time.monotonic() - self._begin:6.1f} s  step {step}/{self._steps}, loss {loss:.3f}",
                flush=True,
            )

    def _redraw(self) -> None:
        assert self._live is not None
        table = Table.grid(padding=(0, 2))
        for rank, state in sorted(self._ranks.items()):
            table.add_row(
                f"rank {rank}",
                state.node or "–",
                ProgressBar(total=self._steps, completed=state.step, width=40),
                f"step {state.step}/{self._steps}",
                f"loss {state.loss:.3f}" if state.step else "",
                f"generation {state.generation}" if state.step else "",
            )
        self._live.update(Group(table, *map(Text, self._events[-EVENTS_SHOWN:])), refresh=True)
