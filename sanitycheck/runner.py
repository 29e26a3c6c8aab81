"""The engine: start the probes, end what does not answer, judge what came back.

One loop in the calling thread; no threads of its own, no signal handlers, nothing global, so that it may be
called from a thread of a process that does other things. Probes of the light lane run side by side; a
measuring probe waits until they are done and for the others of its lane, so that it has the node to itself.

Whatever ends the run (time, ``cancel``, KeyboardInterrupt), no probe is left running behind it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sanitycheck.catalogue import CHECKS, choose
from sanitycheck.check import Check, Lane
from sanitycheck.errors import UsageError
from sanitycheck.judge import judge
from sanitycheck.options import Options
from sanitycheck.outcome import Hung, NotRun, Outcome
from sanitycheck.process import ProbeProcess
from sanitycheck.result import Level, Report, Result

__all__ = ["LEVEL_TIMEOUT_S", "OnResult", "OnStart", "run", "run_checks"]

LEVEL_TIMEOUT_S: Mapping[Level, float] = {
    Level.INSTANT: 2.0,
    Level.QUICK: 60.0,
    Level.STANDARD: 300.0,
    Level.DEEP: 1800.0,
}
"""For the whole run, starting and ending included."""

INSTANT_DEADLINE_S = 1.4
"""Of one probe at *instant*: what is left of two seconds when starting and ending are taken off."""
END_RESERVE_S = 0.6
"""Probes are told to end this long before the run's own time is up."""
LANE_WIDTH: Mapping[Lane, int] = {Lane.LIGHT: 8, Lane.CPU: 1, Lane.DEVICE: 1, Lane.STORAGE: 1}
TICK_S = 0.05
"""How late an end is noticed that no descriptor tells of."""

OnStart = Callable[[Check], None]
OnResult = Callable[[Result], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watchers:
    """Who is told what happens, in the calling thread. An exception from one ends the run (and every
    probe)."""

    on_start: OnStart | None = None
    on_result: OnResult | None = None


def run(
    *,
    level: Level | str = Level.QUICK,
    options: Options | None = None,
    timeout_s: float | None = None,
    on_result: OnResult | None = None,
    on_start: OnStart | None = None,
    cancel: threading.Event | None = None,
    drill: Mapping[str, Outcome] | None = None,
) -> Report:
    """Check this node.

    Synchronous; may be called in any thread, also of a process that has threads and gRPC: probes are
    exec'ed, never bare forks. The thread must not end before this returns (probes are bound to its life).

    Args:
        level: How deep to look.
        options: What is expected of the node, and which checks.
        timeout_s: For the whole run; default by level (``LEVEL_TIMEOUT_S``).
        on_result: Called with every result as it comes, in this thread.
        on_start: Called when a probe starts, in this thread.
        cancel: When set, the probes are ended and the remaining checks are *unknown*.
        drill: Outcomes by id instead of probes; checks that are not named are skipped.

    Returns:
        The report. A failing node is not an exception.

    Raises:
        UsageError: A level or an id that does not exist, or a limit that cannot be kept.
    """
    options = options or Options()
    try:
        depth = Level(level)
    except ValueError as error:
        raise UsageError(
            f"there is no level {level!r}; levels: {', '.join(one.value for one in Level)}"
        ) from error
    limit_s = LEVEL_TIMEOUT_S[depth] if timeout_s is None else timeout_s
    if not limit_s > 0:
        raise UsageError(f"the time limit must be above 0 seconds, got {limit_s}")
    checks = choose(depth, only=options.only, skip=options.skip)
    watchers = _Watchers(on_start=on_start, on_result=on_result)
    started_unix_s, begin = time.time(), time.monotonic()
    if drill is not None:
        results = _drilled(checks, options, drill, watchers)
    else:
        loop = _Loop(checks, options, level=depth, watchers=watchers)
        results = loop.run(ends=begin + limit_s, cancel=cancel or threading.Event())
    return Report(
        node=socket.gethostname(),
        level=depth,
        results=tuple(results[check.id] for check in checks),
        started_unix_s=started_unix_s,
        duration_s=time.monotonic() - begin,
        nccl_overrides={key: value for key, value in sorted(os.environ.items()) if key.startswith("NCCL_")},
    )


def run_checks(
    checks: Sequence[Check], options: Options, *, timeout_s: float, cancel: threading.Event | None = None
) -> tuple[Result, ...]:
    """Run checks that need not be in the catalogue; for tests of the engine and for checks of one's own."""
    loop = _Loop(tuple(checks), options, level=Level.QUICK, watchers=_Watchers())
    results = loop.run(ends=time.monotonic() + timeout_s, cancel=cancel or threading.Event())
    return tuple(results[check.id] for check in checks)


def _result(check: Check, options: Options, outcome: Outcome) -> Result:
    return Result(
        check=check.id,
        level=check.level,
        scope=check.scope,
        findings=judge(check, options, outcome=outcome),
        duration_s=outcome.duration_s,
    )


def _drilled(
    checks: Sequence[Check], options: Options, drill: Mapping[str, Outcome], watchers: _Watchers
) -> dict[str, Result]:
    known = {check.id for check in CHECKS}
    strange = sorted(set(drill) - known)
    if strange:
        raise UsageError(f"the drill names {strange[0]!r}, which is no check (see 'sanitycheck list')")
    results = {}
    for check in checks:
        results[check.id] = _result(check, options, drill.get(check.id) or NotRun(why="drill"))
        if watchers.on_result is not None:
            watchers.on_result(results[check.id])
    return results


class _Loop:
    """State of one run."""

    def __init__(
        self, checks: Sequence[Check], options: Options, *, level: Level, watchers: _Watchers
    ) -> None:
        self._waiting = list(checks)
        self._running: list[ProbeProcess] = []
        self._results: dict[str, Result] = {}
        self._options = options
        self._level = level
        self._thorough = level is not Level.INSTANT
        self._watchers = watchers
        self._cancelled = False

    def run(self, *, ends: float, cancel: threading.Event) -> dict[str, Result]:
        """Until every check has a result."""
        probes_end = max(ends - END_RESERVE_S, time.monotonic() + 0.1)
        try:
            while self._waiting or self._running:
                now = time.monotonic()
                if cancel.is_set() or now >= probes_end:
                    self._give_up("cancelled" if cancel.is_set() else "time")
                self._start_what_may()
                self._listen(TICK_S)
                self._step(probes_end)
        finally:
            self._end_all()
        return self._results

    def _give_up(self, why: str) -> None:
        for check in self._waiting:
            self._finish(check, NotRun(why=why))
        self._waiting.clear()
        if why == "cancelled":
            self._cancelled = True
            for probe in self._running:
                probe.kill()

    def _start_what_may(self) -> None:
        for check in list(self._waiting):
            busy = sum(probe.check.lane is check.lane for probe in self._running)
            light = any(c.lane is Lane.LIGHT for c in (*self._waiting, *(p.check for p in self._running)))
            if busy >= LANE_WIDTH[check.lane] or (check.lane is not Lane.LIGHT and light and self._thorough):
                continue
            self._waiting.remove(check)
            if self._watchers.on_start is not None:
                self._watchers.on_start(check)
            deadline_s = check.deadline_at(self._level)
            level = check.level if self._thorough and check.level.includes(self._level) else self._level
            if not self._thorough:
                deadline_s = min(deadline_s, INSTANT_DEADLINE_S)
            self._running.append(ProbeProcess(check, self._options, level=level, deadline_s=deadline_s))

    def _listen(self, timeout_s: float) -> None:
        fds = [fd for probe in self._running for fd in probe.fds()]
        poll = select.poll()
        for fd in fds:
            poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
        for probe in self._running:
            probe.read()

    def _step(self, probes_end: float) -> None:
        for probe in list(self._running):
            if probe.step(time.monotonic(), run_ends=probes_end):
                self._running.remove(probe)
                outcome = probe.outcome()
                if isinstance(outcome, Hung) and self._cancelled:
                    outcome = NotRun(why="cancelled")
                elif isinstance(outcome, Hung) and not self._thorough:
                    # Two seconds prove nothing: a cold mount or driver takes longer.
                    outcome = Hung(
                        phase=outcome.phase,
                        after_s=outcome.after_s,
                        full_time=False,
                        unkillable=outcome.unkillable,
                        pid=outcome.pid,
                    )
                self._finish(probe.check, outcome)

    def _finish(self, check: Check, outcome: Outcome) -> None:
        self._results[check.id] = result = _result(check, self._options, outcome)
        if self._watchers.on_result is not None:
            self._watchers.on_result(result)

    def _end_all(self) -> None:
        """After an exception: end every probe before it goes on up."""
        for probe in self._running:
            probe.kill()
        while self._running:
            self._listen(TICK_S)
            for probe in list(self._running):
                if probe.step(time.monotonic(), run_ends=time.monotonic()):
                    self._running.remove(probe)
                    probe.outcome()
