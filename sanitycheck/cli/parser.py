"""What the command line takes.

argparse, not a larger library: ``sanitycheck list`` is called from shell loops and prologs and answers at
once.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import metadata

from sanitycheck.localise.evidence import Limits
from sanitycheck.result import Level
from sanitycheck.runner import LEVEL_TIMEOUT_S

__all__ = ["EXIT_CODES", "EXIT_INTERRUPTED", "EXIT_OWN_BUG", "HOOKS", "make_parser"]

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
HOOKS: Mapping[str, str] = {
    "slurm-prolog": "Prolog: non-zero drains the node; only what blocks training does that",
    "slurm-health": "HealthCheckProgram: drains the node through scontrol when a check fails",
    "npd": "node-problem-detector plug-in: 0 healthy, 1 problem, 2 unknown, one line of at most 80 bytes",
    "k8s-init": "init container: non-zero keeps the pod from starting; only what blocks training does that",
}
_RAW = argparse.RawDescriptionHelpFormatter


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


def _nodes(text: str) -> int:
    """A number, or 0 for "what the scheduler says"."""
    return 0 if text == "auto" else _count(text)


def _add_what(parser: argparse.ArgumentParser, *, level: Level) -> None:
    add = parser.add_argument
    add(
        "--level",
        choices=[one.value for one in Level],
        default=level.value,
        help=f"how deep (default: {level.value})",
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
    add("--mig", choices=["on", "off"], help="devices must (not) be partitioned")
    add("--rdma-ports", type=_count, metavar="N", help="so many RDMA ports must be up")
    add("--ckpt-path", metavar="PATH|URL", help="where checkpoints will be written")
    add("--ckpt-bytes", type=_count, metavar="N", help="size of one checkpoint there")
    add("--workers", type=_count, default=1, metavar="N", help="training processes on this node (default: 1)")
    add("--clock-peer", metavar="HOST[:PORT]", help="compare the clock with this SNTP server")
    add("--reach", action="append", default=[], metavar="HOST:PORT", help="this machine must be reachable")
    add("--fingerprint", metavar="FILE", help="JSON object of versions that this node must have")
    add(
        "--baseline",
        metavar="FILE",
        help="record of this node's own figures, as `baseline record` keeps it, or a JSON object of figures; "
        "without it the node's usual record is used where there is one",
    )
    limits = ", ".join(f"{one.value} {limit:g}" for one, limit in LEVEL_TIMEOUT_S.items())
    add("--timeout", type=_positive, metavar="SECONDS", help=f"for the whole run (default: {limits})")


def _add_group(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("several nodes, run on each of them").add_argument
    usual = Limits()
    add(
        "--nnodes",
        type=_nodes,
        default=1,
        metavar="N|auto",
        help="nodes of the job (default: 1); auto: what Slurm says, with rank and endpoint",
    )
    add("--node-rank", type=_count, metavar="R", help="index of this node, 0 leads")
    add(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="where node rank 0 leads; with it the nodes are checked together",
    )
    add("--rdzv-id", default="sanitycheck", metavar="ID", help="name of the group, the same on all nodes")
    add(
        "--join-timeout", type=_positive, default=60.0, metavar="SECONDS", help="wait for nodes (default: 60)"
    )
    add(
        "--round-timeout",
        type=_positive,
        default=30.0,
        metavar="SECONDS",
        help="after which a pair is given up (default: 30)",
    )
    add(
        "--pair-share",
        type=float,
        default=usual.pair_share,
        metavar="X",
        help="slow pair: below X of the median",
    )
    add(
        "--alone-share", type=float, default=usual.alone_share, metavar="X", help="slow node: likewise, alone"
    )


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--json",
        metavar="FILE|-",
        help="write the report as JSON; '-' writes it to stdout instead of the text",
    )
    add("--junit", metavar="FILE", help="write the report as JUnit XML, one test case per check")
    add("--prometheus", metavar="FILE", help="write the report for a node exporter's textfile collector")
    add("--drill", metavar="FILE", help="take the facts from a file instead of this machine (YAML or JSON)")


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="sanitycheck", description="Is this node fit to train?", epilog=_epilog(), formatter_class=_RAW
    )
    try:
        version = metadata.version("aimaster-ft")
    except metadata.PackageNotFoundError:
        version = "not installed"
    parser.add_argument("--version", action="version", version=f"sanitycheck {version}")
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{run,list,explain,localise,baseline,hook}"
    )
    one = commands.add_parser("run", help="check this node", epilog=_epilog(), formatter_class=_RAW)
    _add_what(one, level=Level.QUICK)
    _add_group(one)
    _add_outputs(one)
    listing = commands.add_parser("list", help="all checks")
    listing.add_argument("--json", action="store_true", help="as JSON")
    explain = commands.add_parser("explain", help="what a check does and may say")
    explain.add_argument("id", metavar="ID")
    localise = commands.add_parser(
        "localise", help="which node is bad, from tests that something else has run"
    )
    localise.add_argument(
        "file", metavar="FILE", help="JSON: nodes, alone, rounds (see the docs); '-': stdin"
    )
    localise.add_argument("--json", action="store_true", help="as JSON")
    baseline = commands.add_parser("baseline", help="record this node's own figures, show them, compare")
    baseline.add_argument("action", choices=["record", "show", "compare"])
    baseline.add_argument("--file", metavar="FILE", help="where the record is (default: the state folder)")
    baseline.add_argument(
        "--report", metavar="FILE|-", help="take this JSON report instead of running checks"
    )
    baseline.add_argument("--json", action="store_true", help="as JSON")
    baseline.add_argument("--level", choices=[one.value for one in Level], default=Level.QUICK.value)
    hook = commands.add_parser(
        "hook",
        help="run as a part of a scheduler, with its exit codes",
        epilog="\n".join(f"  {name:<13} {text}" for name, text in HOOKS.items()),
        formatter_class=_RAW,
    )
    hook.add_argument("kind", choices=list(HOOKS))
    _add_what(hook, level=Level.QUICK)
    hook.add_argument("--drill", metavar="FILE", help="take the facts from a file instead of this machine")
    return parser
