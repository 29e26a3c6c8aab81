"""``sanitycheck run``: the checks, a live table on a terminal, and every form of the report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

from sanitycheck.catalogue import choose
from sanitycheck.cli.options import group_place, make_options
from sanitycheck.durable import write_whole
from sanitycheck.errors import BadFileError, UsageError
from sanitycheck.options import Options
from sanitycheck.outcome import Outcome
from sanitycheck.result import Level, Report
from sanitycheck.runner import LEVEL_TIMEOUT_S, OnResult, OnStart, run

__all__ = ["load_drill", "run_and_show"]


def load_drill(path: str | None) -> Mapping[str, Outcome] | None:
    """The drill of a file; None without one."""
    if path is None:
        return None
    from sanitycheck.drill import load

    return load(path)


def run_and_show(args: argparse.Namespace) -> int:
    """Run, write the files that were asked for, print the report; returns the exit code."""
    report = _watched(args, make_options(args))
    _write_files(args, report)
    if args.json == "-":
        from sanitycheck.render.json import render as render_json

        print(render_json(report))
    else:
        from sanitycheck.render.text import render

        print(render(report))
    return report.exit_code


def _write_files(args: argparse.Namespace, report: Report) -> None:
    from sanitycheck.render import json, junit, prometheus

    for path, render in (
        (args.json if args.json != "-" else None, json.render),
        (args.junit, junit.render),
        (args.prometheus, prometheus.render),
    ):
        if path is not None:
            try:
                write_whole(path, render(report) + "\n")
            except OSError as error:
                raise BadFileError(path, problem=f"the report cannot be written: {error.strerror}") from error


def _watched(args: argparse.Namespace, options: Options) -> Report:
    """Run with a live table when a terminal is there to show it."""
    level = Level(args.level)
    drill = load_drill(args.drill)
    if drill is not None:
        if args.rdzv_endpoint is not None:
            raise UsageError("a drill has no group: leave out --rdzv-endpoint or --drill")
        return run(level=level, options=options, timeout_s=args.timeout, drill=drill)
    stream = sys.stderr if args.json == "-" else sys.stdout
    if not stream.isatty():
        return _run(args, level, options)
    from rich.console import Console

    from sanitycheck.render.live import LiveTable

    checks = choose(level, only=options.only, skip=options.skip)
    limit_s = LEVEL_TIMEOUT_S[level] if args.timeout is None else args.timeout
    with LiveTable(checks, Console(file=stream), level=level, limit_s=limit_s) as table:
        return _run(args, level, options, on_start=table.start, on_result=table.result)


def _run(
    args: argparse.Namespace,
    level: Level,
    options: Options,
    *,
    on_start: OnStart | None = None,
    on_result: OnResult | None = None,
) -> Report:
    place = group_place(args)
    if place is None:
        return run(
            level=level, options=options, timeout_s=args.timeout, on_start=on_start, on_result=on_result
        )
    from sanitycheck.group import run_group

    return run_group(
        place,
        level=level,
        options=options,
        timeout_s=args.timeout,
        on_start=on_start,
        on_result=on_result,
    )
