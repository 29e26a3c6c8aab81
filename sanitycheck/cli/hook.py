"""``sanitycheck hook``: the verdict as each scheduler wants to hear it.

What may take a node away is narrow: Prolog and init container obey what *blocks* training alone, the health
program and the problem detector what *fails*. *Unknown* never drains, and neither does an error of our own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys

from sanitycheck.cli.options import options_without_group
from sanitycheck.cli.running import load_drill
from sanitycheck.render.sentences import describe
from sanitycheck.result import Level, Report, Verdict
from sanitycheck.runner import run

__all__ = ["drain_reason", "hook", "npd_answer"]

REASON_PREFIX = "sanitycheck:"
"""Of a drain reason of ours, so that others' reasons are never touched."""
REASON_CHARS_MAX = 200
NPD_CHARS_MAX = 80
"""node-problem-detector cuts a plug-in's output there (max_output_length)."""
SCONTROL_TIMEOUT_S = 20.0
NPD_OK, NPD_PROBLEM, NPD_UNKNOWN = 0, 1, 2


def drain_reason(report: Report) -> str:
    """One line: the worst check and what it found."""
    results = [one for one in report.results if one.blocking] or list(report.with_verdict(Verdict.FAIL))
    if not results:
        return ""
    worst = results[0]
    more = f" (+{len(results) - 1} more)" if len(results) > 1 else ""
    text = f"{REASON_PREFIX} {worst.check}{more}: {describe(worst.findings[0])}"
    return " ".join(text.split())[:REASON_CHARS_MAX]


def npd_answer(report: Report) -> tuple[int, str]:
    """(exit code, line) by the convention of node-problem-detector's custom plug-ins."""
    if report.verdict is Verdict.FAIL:
        return NPD_PROBLEM, drain_reason(report).removeprefix(REASON_PREFIX).strip()[:NPD_CHARS_MAX]
    if report.verdict is Verdict.UNKNOWN:
        unseen = ", ".join(result.check for result in report.with_verdict(Verdict.UNKNOWN))
        return NPD_UNKNOWN, f"not looked at: {unseen or 'anything'}"[:NPD_CHARS_MAX]
    return NPD_OK, f"node is fit ({report.coverage()['looked']} checks)"


def hook(args: argparse.Namespace) -> int:
    """Run the checks and answer as the scheduler expects."""
    report = run(
        level=Level(args.level),
        options=options_without_group(args),
        timeout_s=args.timeout,
        drill=load_drill(args.drill),
    )
    if args.kind == "npd":
        code, line = npd_answer(report)
        print(line)
        return code
    reason = drain_reason(report)
    if args.kind == "slurm-health":
        return _slurm_health(report, reason)
    if report.blocking:
        # Slurm takes a Prolog's words for the job from lines that begin with "print".
        print(f"print {reason}" if args.kind == "slurm-prolog" else reason)
        print(reason, file=sys.stderr)
        return 1
    return 0


def _slurm_health(report: Report, reason: str) -> int:
    """Slurm does not look at the code of a health program: the program drains the node itself.

    A node that somebody else has drained keeps their reason, and one that we drained is not resumed: whether
    it is repaired, we cannot know.
    """
    if report.verdict is not Verdict.FAIL:
        return 0
    print(reason, file=sys.stderr)
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        print("sanitycheck: scontrol is not on the path, so that the node is not drained", file=sys.stderr)
        return 1
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname().split(".")[0]
    try:
        shown = subprocess.run(
            [scontrol, "show", "node", node, "--oneliner"],
            capture_output=True,
            text=True,
            check=False,
            timeout=SCONTROL_TIMEOUT_S,
        )
        if "DRAIN" in shown.stdout:
            return 0
        done = subprocess.run(
            [scontrol, "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"],
            capture_output=True,
            text=True,
            check=False,
            timeout=SCONTROL_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"sanitycheck: the node could not be drained: {error}", file=sys.stderr)
        return 1
    if done.returncode:
        print(f"sanitycheck: the node could not be drained: {done.stderr.strip()}", file=sys.stderr)
    return done.returncode
