"""``sanitycheck baseline record | show | compare``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from sanitycheck.baseline import (
    Baseline,
    compare,
    default_path,
    identity_of_node,
    read_baseline,
    recorded,
    save_baseline,
)
from sanitycheck.errors import BadFileError
from sanitycheck.facts.rdma import collect_counters, ports_of
from sanitycheck.facts.request import Request
from sanitycheck.result import EXIT_FAILED, EXIT_OK, EXIT_UNKNOWN, Level, Report
from sanitycheck.runner import run
from sanitycheck.thresholds import GEMM_FAIL_SHARE, GEMM_WARN_SHARE, NOISE_MADS

__all__ = ["baseline"]


def _report(args: argparse.Namespace) -> Report:
    if args.report is None:
        return run(level=Level(args.level))
    try:
        if args.report == "-":
            return Report.from_json(sys.stdin.read())
        with open(args.report, encoding="utf-8") as file:
            return Report.from_json(file.read())
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(args.report, problem=str(error)) from error


def baseline(args: argparse.Namespace) -> int:
    """Do what was asked for; the exit code of ``compare`` is that of a check."""
    path = args.file or str(default_path())
    known = read_baseline(path) if os.path.exists(path) else Baseline()
    identity = identity_of_node()
    if args.action == "show":
        return _show(args, known, identity)
    report = _report(args)
    if args.action == "record":
        counters = collect_counters(Request(check="net.rdma_counters")).counters if ports_of() else {}
        save_baseline(recorded(known, report, identity=identity, counters=counters), path)
        print(f"recorded in {path}")
        return EXIT_OK
    rows = compare(known.standing(identity), report)
    if args.json:
        print(json.dumps({"schema": 1, "identity": identity, "figures": rows}, indent=2))
    else:
        print(f"{'figure':<28} {'value':>10} {'median':>10} {'share':>6} {'MADs':>6}")
        for row in rows:
            cells = [_cell(row["value"]), _cell(row["median"]), _cell(row["share"]), _cell(row["mads"])]
            print(f"{row['figure']:<28} {cells[0]:>10} {cells[1]:>10} {cells[2]:>6} {cells[3]:>6}")
    return _verdict(rows)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}"


def _verdict(rows: list[dict[str, Any]]) -> int:
    """Failed where a figure is far below its record and outside its noise; unknown without any record."""
    judged = [row for row in rows if row["share"] is not None]
    slow = [row for row in judged if row["share"] < GEMM_WARN_SHARE and abs(row["mads"] or 99.0) > NOISE_MADS]
    if any(row["share"] < GEMM_FAIL_SHARE for row in slow):
        return EXIT_FAILED
    return EXIT_OK if judged else EXIT_UNKNOWN


def _show(args: argparse.Namespace, known: Baseline, identity: str) -> int:
    if args.json:
        print(json.dumps({**known.to_dict(), "identity": identity}, indent=2))
        return EXIT_OK
    if not known.entries:
        print("nothing is recorded yet; sanitycheck baseline record")
        return EXIT_OK
    for name, entry in known.entries.items():
        standing = known.standing(name)
        print(f"{'this node now' if name == identity else 'earlier'}: {name}")
        for figure, values in sorted(entry.figures.items()):
            middle, spread = standing.medians[figure], standing.mads[figure]
            print(f"  {figure:<28} {middle:>10.4g}  MAD {spread:.3g}, {len(values)} runs")
    return EXIT_OK
