"""Reports as text and JSON. Judges nothing: what it prints stands in the report.

Colour and redrawing only where stdout or stderr is a terminal; a progress bar on stderr after the first
second of a long read.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from easyckpt.errors import EasyckptError

__all__ = [
    "answer",
    "console",
    "difference",
    "inspection",
    "print_json",
    "progress",
    "pruned",
    "steps",
    "trouble",
    "verdicts",
]

Report = dict[str, Any]

PROGRESS_AFTER_S = 1.0
"""Shorter work shows no bar."""

ROWS_MAX = 1000
"""Of tensors in the text of `inspect`; JSON has all."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(count: int) -> str:
    """A number of bytes for people."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def print_json(report: Report) -> None:
    """One object, on stdout."""
    json.dump(report, sys.stdout, indent=1, allow_nan=False)
    sys.stdout.write("\n")


def console(width: int | None = None) -> Console:
    """Stdout, for results."""
    # Piped output is not cut to a width that nobody has.
    return Console(file=sys.stdout, highlight=False, width=width or (None if sys.stdout.isatty() else 200))


def _err() -> Console:
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def trouble(error: EasyckptError) -> None:
    """An error, on stderr: what, where, what to do next."""
    _err().print(f"easyckpt: {error}", markup=False)


def _note(text: str) -> None:
    _err().print(text, markup=False)


def _table(*columns: tuple[str, str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True)
    return table


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, if that is a terminal and the work takes long enough.

    Args:
        label: what is being done.
    """
    if not sys.stderr.isatty():
        yield lambda done, wanted: None
        return
    began = time.monotonic()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=_err(), transient=True)
    task = bar.add_task(label, total=None)

    def on_bytes(done: int, wanted: int) -> None:
        if time.monotonic() - began > PROGRESS_AFTER_S:
            bar.start()
        bar.update(task, completed=done, total=wanted)

    try:
        yield on_bytes
    finally:
        bar.stop()


def _age(seconds: float | None) -> str:
    """How long ago, in the largest unit that fits."""
    if seconds is None:
        return "?"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def _verified(row: Report) -> str:
    if row["verified"] is None:
        return "-"
    return f"{row['verified']['verdict']} {row['verified']['at'][:10]}"


def steps(report: Report) -> None:
    """`ls`."""
    states = {row["state"] for row in report["steps"]}
    table = _table(
        ("step", "right"),
        ("gen", "right"),
        ("ranks", "right"),
        ("size", "right"),
        ("saved", "left"),
        ("age", "right"),
        ("tier", "left"),
        ("verified", "left"),
    )
    if states - {"offered"}:
        table.add_column("state", no_wrap=True)
        table.add_column("detail")
    for row in report["steps"]:
        cells = [
            str(row["step"]),
            str(row["generation"]),
            "?" if row["world_size"] is None else str(row["world_size"]),
            size(row["bytes"]),
            (row["saved_at"] or "?").replace("T", " ").replace("+00:00", " UTC"),
            _age(row["age_s"]),
            "disk" if report["store"] == "local" else report["store"].rpartition("+")[2],
            _verified(row) + (" · pinned" if row["pinned"] else ""),
        ]
        if states - {"offered"}:
            cells += [row["state"].replace("_", " "), escape(row["detail"])]
        table.add_row(*cells)
    if report["steps"]:
        console().print(table)
    else:
        _note("no step can be loaded")
    if report["not_shown"]:
        _note(f"{report['not_shown']} more that cannot be loaded: --all shows them")
    for item in report["troubles"]:
        _note(f"{item['path']}: {item['detail']}")


def inspection(report: Report) -> None:
    """`inspect`."""
    out = console()
    saved = (report["saved_at"] or "?").replace("T", " ").replace("+00:00", " UTC")
    resumed = (
        "a new beginning" if report["resumed_step"] is None else f"resumed from step {report['resumed_step']}"
    )
    out.print(f"step {report['step']}, generation {report['generation']} ({resumed}), saved {saved}")
    out.print(f"run {escape(report['run_id'])}, {report['world_size']} ranks, {size(report['bytes'])}")
    for name, value in report["metrics"].items():
        out.print(f"{escape(name)} = {value}")
    pieces = _table(("rank", "right"), ("node", "right"), ("size", "right"), ("file", "left"))
    for piece in report["pieces"]:
        pieces.add_row(
            str(piece["rank"]), str(piece["node_rank"]), size(piece["bytes"]), escape(piece["file"])
        )
    out.print()
    out.print(pieces)
    tensors = _table(
        ("type", "left"), ("shape", "left"), ("chunks", "right"), ("size", "right"), ("tensor", "left")
    )
    for tensor in report["tensors"][:ROWS_MAX]:
        tied = f" (tied to {tensor['tied_to']})" if tensor["tied_to"] else ""
        cells = (tensor["dtype"], escape(str(tensor["shape"])), str(tensor["chunks"]), size(tensor["bytes"]))
        tensors.add_row(*cells, escape(tensor["name"] + tied))
    out.print()
    out.print(tensors)
    if len(report["tensors"]) > ROWS_MAX:
        _note(f"{len(report['tensors']) - ROWS_MAX} more tensors: --json shows them")


def verdicts(report: Report) -> None:
    """`verify`."""
    out = console()
    for row in report["verdicts"]:
        proved = f"{size(row['bytes_proved'])} of {size(row['bytes_total'])} read back"
        verdict = row["verdict"].replace("_", " ")
        out.print(f"step {row['step']} (generation {row['generation']}): {verdict}, {proved}")
        for finding in row["findings"]:
            out.print(
                f"  {finding['kind']}: {escape(finding['detail'])}\n    {escape(finding['where'])}",
                soft_wrap=True,
            )


def answer(report: Report) -> None:
    """`why`."""
    out = console()
    out.print(f"step {report['step']} {'can' if report['loadable'] else 'cannot'} be loaded")
    for reason in report["reasons"]:
        generation = f" (generation {reason['generation']})" if reason["generation"] is not None else ""
        kind = reason["kind"].replace("_", " ")
        out.print(
            f"  {kind}{generation}: {escape(reason['detail'])}\n    {escape(reason['where'])}", soft_wrap=True
        )
    if not report["loadable"]:
        near = ", ".join(map(str, report["others"][:10])) or "none"
        out.print(f"steps that are offered: {near}")


def difference(report: Report) -> None:
    """`diff`."""
    out = console()
    for item in report["differences"]:
        ranks = f" (ranks {', '.join(map(str, item['ranks'][:10]))})" if item["ranks"] else ""
        kind = item["kind"].replace("_", " ")
        out.print(f"{kind}: {escape(item['name'])}: {escape(item['detail'])}{ranks}", soft_wrap=True)
    sides = f"step {report['a']['step']} and step {report['b']['step']}"
    count = f"{report['tensors_equal']} tensors equal, {size(report['bytes_compared'])} compared"
    word = "bit-equal" if report["bit_equal"] else f"different in {len(report['differences'])} places"
    out.print(f"{sides} are {word} ({count})")


def pruned(report: Report) -> None:
    """`prune`."""
    out = console()
    would = "would go" if report["dry_run"] else "gone"
    for item in report["removed"]:
        kind = item["kind"].replace("_", " ")
        out.print(f"{would}: {escape(item['path'])} ({kind}, {size(item['bytes'])})", soft_wrap=True)
    kept = ", ".join(str(item["step"]) for item in report["kept"]) or "none"
    out.print(f"kept: {kept}; {size(report['freed_bytes'])} {'to free' if report['dry_run'] else 'freed'}")
    if not report["dry_run"] and any(item["kind"] == "taken_back" for item in report["removed"]):
        _note("steps that were taken back keep their bytes for the grace time; the next prune deletes them")
    for item in report["damaged"]:
        _note(f"step {item['step']} is damaged, and counts for nothing; more by:")
        _note(f"easyckpt why {report['root']} {item['step']}")
