"""A table that fills while the checks run; only for a terminal. The plain report follows it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sanitycheck.check import Check
from sanitycheck.render.sentences import describe
from sanitycheck.result import Level, Result, Verdict

__all__ = ["LiveTable"]

_STYLES = {
    Verdict.PASS: "green",
    Verdict.WARN: "yellow",
    Verdict.FAIL: "bold red",
    Verdict.UNKNOWN: "magenta",
    Verdict.SKIPPED: "dim",
}
REFRESH_PER_S = 8


class LiveTable:
    """Context manager; hand :meth:`start` and :meth:`result` to the engine."""

    def __init__(self, checks: Sequence[Check], console: Console, *, level: Level, limit_s: float) -> None:
        self._checks = checks
        self._level = level
        self._ends = time.monotonic() + limit_s
        self._begun: dict[str, float] = {}
        self._results: dict[str, Result] = {}
        self._live = Live(
            console=console, get_renderable=self._table, refresh_per_second=REFRESH_PER_S, transient=True
        )

    def __enter__(self) -> LiveTable:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def start(self, check: Check) -> None:
        """A probe starts."""
        self._begun[check.id] = time.monotonic()

    def result(self, result: Result) -> None:
        """A check has its result."""
        self._results[result.check] = result

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column("check", no_wrap=True)
        table.add_column("verdict", no_wrap=True, min_width=8)
        table.add_column("what", overflow="ellipsis", no_wrap=True)
        for check in self._checks:
            result = self._results.get(check.id)
            if result is not None:
                verdict = Text(result.verdict.value, style=_STYLES[result.verdict])
                table.add_row(check.id, verdict, Text(describe(result.findings[0])))
            elif check.id in self._begun:
                left = max(0.0, check.deadline_at(self._level) - (time.monotonic() - self._begun[check.id]))
                shown = Text(f"{left:.0f} s left", style="dim")
                table.add_row(check.id, shown, Text(check.title, style="dim"))
            else:
                table.add_row(check.id, Text("-", style="dim"), Text(check.title, style="dim"))
        done = f"{len(self._results)} of {len(self._checks)}"
        left = max(0.0, self._ends - time.monotonic())
        table.add_row(Text(done, style="dim"), Text(f"{left:.0f} s left", style="dim"), Text(""))
        return table
