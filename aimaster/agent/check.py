"""The node check before a node joins: sanitycheck in a thread, its verdict turned into join or refusal.

Only a finding that means that training would fail or compute wrongly refuses a node; everything else is said
in a line and the node joins. A machine that trains under torchrun must train here: a check that cannot look,
or an engine that breaks, refuses nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from dataclasses import replace
from pathlib import Path

import sanitycheck
from aimaster.agent.spoken import say
from aimaster.config import CheckLevel, CheckMode, RunConfig
from aimaster.errors import NodeRefused
from sanitycheck.render.text import coverage_line, result_lines

NVIDIA_CONTROL = Path("/dev/nvidiactl")
"""Exists where NVIDIA's kernel driver is loaded and visible to us."""
QUICK_LIMIT_S = 20.0
"""What *quick* may add before the first generation. Only a store that has not answered by then is asked once
more, with all the time of its check: the training would wait for it, too."""
STORE = "store.ckpt_path"
MORE = "look closer with: sanitycheck run --level quick"


async def check_node(config: RunConfig, node: str) -> sanitycheck.Report | None:
    """Check this node at the level that fits the job.

    Returns:
        The report; None where the check is off or could not be made.

    Raises:
        NodeRefused: Training would fail or be wrong here, and nobody said to go on all the same.
    """
    if config.check.mode is CheckMode.OFF:
        return None
    level = _level(config)
    if level is CheckLevel.QUICK:
        say(f"node {node}: checking the node before it joins (level quick, once)")
    report = await _run(config, level, node)
    if report is None:
        return None
    _say_findings(node, report, show_coverage=level is CheckLevel.QUICK)
    if report.blocking and config.check.mode is CheckMode.ENFORCE:
        blocking = [result for result in report.results if result.blocking]
        raise NodeRefused(
            f"node {node} is refused: training would fail or be wrong here",
            where=", ".join(result.check for result in blocking),
            next_step=f"{MORE}; to train here all the same: --sanity-check warn",
            facts={"checks": ",".join(result.check for result in blocking)},
        )
    return report


def _level(config: RunConfig) -> CheckLevel:
    if config.check.level is not None:
        return config.check.level
    alone = config.nodes.max == 1
    return CheckLevel.INSTANT if alone and not NVIDIA_CONTROL.exists() else CheckLevel.QUICK


_UNSETTLED = frozenset({sanitycheck.Reason.TIMED_OUT, sanitycheck.Reason.NO_TIME_LEFT})


async def _run(config: RunConfig, level: CheckLevel, node: str) -> sanitycheck.Report | None:
    options = sanitycheck.Options(
        local_workers=config.nodes.nproc,
        nnodes=config.nodes.max,
        ckpt_path=config.checkpoint.ckpt_dir,
    )
    cancel = threading.Event()

    def show(result: sanitycheck.Result) -> None:
        # A person who waits sees what is done; a log gets the summary alone.
        if level is CheckLevel.QUICK and os.isatty(2):
            say(f"node {node}: {result.check} {result.verdict.value} ({result.duration_s:.1f} s)")

    def run() -> sanitycheck.Report:
        if level is not CheckLevel.QUICK:
            return sanitycheck.run(level=level.value, options=options, cancel=cancel, on_result=show)
        report = sanitycheck.run(
            level=level.value, options=options, timeout_s=QUICK_LIMIT_S, cancel=cancel, on_result=show
        )
        if cancel.is_set() or not any(
            one.check == STORE and one.reason in _UNSETTLED for one in report.results
        ):
            return report
        say(f"node {node}: the checkpoint folder has not answered yet; asking once more")
        store = replace(options, only=(STORE,))
        return _with(report, sanitycheck.run(level=level.value, options=store, cancel=cancel, on_result=show))

    # A thread of its own, since probes end with the thread that started them.
    task = asyncio.get_running_loop().run_in_executor(None, run)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancel.set()
        with contextlib.suppress(Exception):  # it is being given up; only its end is of interest
            await task
        raise
    except (sanitycheck.SanitycheckError, OSError) as error:
        say(f"the node check could not be made ({error}); going on without it")
        return None


def _with(report: sanitycheck.Report, again: sanitycheck.Report) -> sanitycheck.Report:
    """A report in which these checks have their newer results."""
    newer = {result.check: result for result in again.results}
    results = tuple(newer.get(result.check, result) for result in report.results)
    return replace(report, results=results, duration_s=report.duration_s + again.duration_s)


def _say_findings(node: str, report: sanitycheck.Report, *, show_coverage: bool) -> None:
    if show_coverage:
        say(f"node {node}: {coverage_line(report)}")
    verdicts = (sanitycheck.Verdict.FAIL, sanitycheck.Verdict.WARN)
    for result in report.with_verdict(*verdicts):
        say("\n".join(result_lines(result)))
