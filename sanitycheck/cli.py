"""The command ``sanitycheck``: ``run``, ``list``, ``explain``.

argparse, not a larger library: ``sanitycheck list`` is called from shell loops and prologs and answers at
once.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import traceback
import types
from collections.abc import Mapping, Sequence
from importlib import metadata

from sanitycheck.catalogue import CHECKS, by_id, choose
from sanitycheck.errors import BadFileError, SanitycheckError
from sanitycheck.options import Options
from sanitycheck.outcome import Outcome
from sanitycheck.result import Level, Report
from sanitycheck.runner import LEVEL_TIMEOUT_S, run

__all__ = ["EXIT_CODES", "EXIT_INTERRUPTED", "EXIT_OWN_BUG", "main"]

EXIT_INTERRUPTED = 130
EXIT_OWN_BUG = 70
EXIT_CODES: Mapping[int, str] = {
    0: "all checks passed (warnings allowed)",
    2: "usage: unknown option, check or file",
    3: "a check failed",
    4: "none failed, but one is unknown",
    70: "an error of sanitycheck itself",
    130: "interrupted",
}


def _epilog() -> str:
    return "exit codes:\n" + "\n".join(f"  {code:<4} {text}" for code, text in EXIT_CODES.items())


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 86_400:
        raise argparse.ArgumentTypeError("must be above 0 and below 86400 seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _ids(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for value in values for part in value.split(",") if part)


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="sanitycheck", description="Is this node fit to train?", epilog=_epilog(), formatter_class=raw
    )
    try:
        version = metadata.version("aimaster-ft")
    except metadata.PackageNotFoundError:
        version = "not installed"
    parser.add_argument("--version", action="version", version=f"sanitycheck {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{run,list,explain}")
    one = commands.add_parser("run", help="check this node", epilog=_epilog(), formatter_class=raw)
    limits = ", ".join(f"{level.value} {limit:g}" for level, limit in LEVEL_TIMEOUT_S.items())
    add = one.add_argument
    add(
        "--level",
        choices=[level.value for level in Level],
        default=Level.QUICK.value,
        help="how deep (default: quick)",
    )
    add(
        "--only",
        action="append",
        default=[],
        metavar="ID[,ID]",
        help="only these checks, whatever their level",
    )
    add("--skip", action="append", default=[], metavar="ID[,ID]", help="leave these checks out")
    add("--expect-gpus", type=_count, metavar="N", help="the node must show N NVIDIA devices")
    add("--ckpt-path", metavar="PATH|URL", help="where checkpoints will be written")
    add("--ckpt-bytes", type=_count, metavar="N", help="size of one checkpoint there")
    add("--workers", type=_count, default=1, metavar="N", help="training processes on this node (default: 1)")
    add("--nnodes", type=_count, default=1, metavar="N", help="nodes of the job (default: 1)")
    add("--clock-peer", metavar="HOST[:PORT]", help="compare the clock with this SNTP server")
    add("--fingerprint", metavar="FILE", help="JSON object of versions that this node must have")
    add(
        "--baseline",
        metavar="FILE",
        help="JSON object of figures this node once gave, such as cpu.gemm.gflops",
    )
    add("--timeout", type=_positive, metavar="SECONDS", help=f"for the whole run (default: {limits})")
    add(
        "--json",
        metavar="FILE|-",
        help="write the report as JSON; '-' writes it to stdout instead of the text",
    )
    add("--drill", metavar="FILE", help="take the facts from a file instead of this machine (YAML or JSON)")
    listing = commands.add_parser("list", help="all checks")
    listing.add_argument("--json", action="store_true", help="as JSON")
    explain = commands.add_parser("explain", help="what a check does and may say")
    explain.add_argument("id", metavar="ID")
    return parser


def _json_object(path: str | None) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise BadFileError(path, problem=str(error)) from error
    if not isinstance(data, dict):
        raise BadFileError(path, problem="a JSON object is expected")
    return data


def _options(args: argparse.Namespace) -> Options:
    fingerprint, baseline = _json_object(args.fingerprint), _json_object(args.baseline)
    if not all(isinstance(value, str) for value in fingerprint.values()):
        raise BadFileError(args.fingerprint, problem="every version must be a string")
    figures = {
        name: float(value)
        for name, value in baseline.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    if len(figures) != len(baseline):
        raise BadFileError(args.baseline, problem="every figure must be a number")
    return Options(
        only=_ids(args.only),
        skip=_ids(args.skip),
        expect_gpus=args.expect_gpus,
        local_workers=args.workers,
        nnodes=args.nnodes,
        ckpt_path=args.ckpt_path,
        ckpt_bytes=args.ckpt_bytes,
        clock_peer=args.clock_peer,
        fingerprint={name: str(value) for name, value in fingerprint.items()},
        baseline=figures,
    )


def _run(args: argparse.Namespace) -> int:
    options = _options(args)
    drill = None
    if args.drill is not None:
        from sanitycheck.drill import load

        drill = load(args.drill)
    report = _watched(args, options, drill)
    if args.json == "-":
        from sanitycheck.render.json import render as render_json

        print(render_json(report))
        return report.exit_code
    if args.json is not None:
        from sanitycheck.render.json import write

        try:
            write(report, args.json)
        except OSError as error:
            raise BadFileError(
                args.json, problem=f"the report cannot be written: {error.strerror}"
            ) from error
    from sanitycheck.render.text import render

    print(render(report))
    return report.exit_code


def _watched(args: argparse.Namespace, options: Options, drill: Mapping[str, Outcome] | None) -> Report:
    """Run with a live table when a terminal is there to show it."""
    level = Level(args.level)
    stream = sys.stderr if args.json == "-" else sys.stdout
    if drill is not None or not stream.isatty():
        return run(level=level, options=options, timeout_s=args.timeout, drill=drill)
    from rich.console import Console

    from sanitycheck.render.live import LiveTable

    checks = choose(level, only=options.only, skip=options.skip)
    with LiveTable(checks, Console(file=stream)) as table:
        return run(
            level=level,
            options=options,
            timeout_s=args.timeout,
            on_start=table.start,
            on_result=table.result,
        )


def _list(args: argparse.Namespace) -> int:
    if args.json:
        rows = [{"id": c.id, "level": c.level.value, "scope": c.scope, "title": c.title} for c in CHECKS]
        print(json.dumps({"schema": 1, "checks": rows}, indent=2))
        return 0
    for check in CHECKS:
        print(f"{check.id:<20} {check.level.value:<8} {check.scope:<5} {check.title}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from sanitycheck.render.sentences import template
    from sanitycheck.render.texts import NOTHING

    check = by_id(args.id)
    print(f"{check.id}: {check.title}\n")
    print(textwrap.fill(check.about, width=96))
    hang = f"{check.if_hung.value} (it had {check.deadline_s:g} s)"
    print(f"\nlevel {check.level.value}, scope {check.scope}; if its probe hangs: {hang}\n\nit may say:")
    for reason in check.reasons:
        found, step = template(reason)
        print(
            textwrap.fill(f"{reason.value}: {found}", width=96, initial_indent="  ", subsequent_indent="    ")
        )
        if step != NOTHING:
            print(textwrap.fill(f"-> {step}", width=96, initial_indent="    ", subsequent_indent="       "))
    return 0


def _interrupt(signum: int, frame: types.FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    before = signal.signal(signal.SIGTERM, _interrupt)
    commands = {"run": _run, "list": _list, "explain": _explain}
    try:
        return commands[args.command](args)
    except KeyboardInterrupt:
        print("sanitycheck: interrupted; all probes are ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Somebody reads only the first lines (| head): that is no trouble, and nothing may be said at exit.
        sys.stderr.close()
        return 0
    except SanitycheckError as error:
        print(f"sanitycheck: {error}", file=sys.stderr)
        return error.exit_code
    # The outer loop: an error of our own must not look like the verdict about a node.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        print(f"sanitycheck: our own error, please report it: {error!r}", file=sys.stderr)
        return EXIT_OWN_BUG
    finally:
        signal.signal(signal.SIGTERM, before)
