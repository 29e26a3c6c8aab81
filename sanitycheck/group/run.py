"""A node's checks inside a group: join, check this node, take part, judge what everybody found."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sanitycheck.catalogue import by_id
from sanitycheck.catalogue.fleet import FLEET_CHECKS
from sanitycheck.errors import UsageError
from sanitycheck.facts.fleet import GroupFacts
from sanitycheck.facts.reach import split_target
from sanitycheck.group.lead import Lead, Schedule
from sanitycheck.group.member import Member
from sanitycheck.judge import judge
from sanitycheck.localise.evidence import Limits
from sanitycheck.options import Options
from sanitycheck.outcome import Answered, Outcome
from sanitycheck.result import Level, Report, Result
from sanitycheck.runner import LEVEL_TIMEOUT_S, OnResult, OnStart, run

__all__ = ["GroupPlace", "run_group"]

LOCAL_SLACK_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """This node's place in a group.

    Attributes:
        endpoint: ``host:port`` at which node rank 0 leads.
        group: Name that all nodes of the group give; keeps two groups on one endpoint apart.
        limits: What counts as slow.
    """

    nnodes: int
    rank: int
    endpoint: str
    group: str = "sanitycheck"
    limits: Limits = field(default_factory=Limits)
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if self.nnodes < 2:
            raise UsageError("a group has at least two nodes (--nnodes)")
        if not 0 <= self.rank < self.nnodes:
            raise UsageError(f"the node rank must be 0 to {self.nnodes - 1}, got {self.rank}")
        self.address()

    def address(self) -> tuple[str, int]:
        """(host, port) of the endpoint."""
        try:
            return split_target(self.endpoint)
        except ValueError as error:
            raise UsageError(f"--rdzv-endpoint: {error}") from error


def alone_figure(report: Report) -> float | None:
    """What this node does by itself: products on its slowest device, else on its processors."""
    for check, name in (("perf.gemm", "rate"), ("cpu.gemm", "gflops")):
        for result in report.results:
            figures = [finding.facts[name] for finding in result.findings if name in finding.facts]
            if result.check == check and figures:
                return float(min(figures))
    return None


def _versions(report: Report) -> Mapping[str, str]:
    for result in report.results:
        if result.check == "sw.fingerprint":
            for finding in result.findings:
                versions = finding.facts.get("versions")
                if isinstance(versions, Mapping):
                    return {str(key): str(value) for key, value in versions.items()}
    return {}


def run_group(
    place: GroupPlace,
    *,
    level: Level,
    options: Options,
    timeout_s: float | None = None,
    on_start: OnStart | None = None,
    on_result: OnResult | None = None,
) -> Report:
    """Check this node and, with the others, the group. Blocks its thread, which must live until it returns.

    Raises:
        GroupError: Node rank 0 cannot open the endpoint.
        UsageError: As :func:`sanitycheck.runner.run`.
    """
    lead: Lead | None = None
    member: Member | None = None
    local_s = LEVEL_TIMEOUT_S[level] if timeout_s is None else timeout_s
    schedule = replace(place.schedule, report_s=local_s + LOCAL_SLACK_S)
    fleet_ids = tuple(check.id for check in FLEET_CHECKS)
    if not set(options.only) - set(fleet_ids) and options.only:
        raise UsageError(
            "--only must name at least one check of the node itself; those of the group run anyway"
        )
    try:
        if place.rank == 0:
            lead = Lead(place.address(), nnodes=place.nnodes, group=place.group, schedule=schedule)
            lead.limit(pair_share=place.limits.pair_share, alone_share=place.limits.alone_share)
            lead.start()
        member = Member(place.address(), rank=place.rank, group=place.group, join_s=schedule.join_s)
        report = run(
            level=level,
            options=replace(options, skip=(*options.skip, *fleet_ids)),
            timeout_s=timeout_s,
            on_start=on_start,
            on_result=on_result,
        )
        said: dict[str, Any] = {
            "alone": alone_figure(report),
            "blocking": report.blocking,
            "versions": dict(_versions(report)),
        }
        whole_s = schedule.join_s + schedule.report_s + schedule.whole_s
        outcome = member.take_part(said, limit_s=whole_s, stopped=threading.Event().is_set)
    finally:
        if member is not None:
            member.close()
        if lead is not None:
            lead.stop()
            lead.join()
    return _with_group(report, options, outcome)


def _with_group(report: Report, options: Options, outcome: Outcome) -> Report:
    """The report of the node and what the group found."""
    results = [
        Result(
            check=check.id,
            level=check.level,
            scope=check.scope,
            findings=judge(by_id(check.id), options, outcome=outcome),
        )
        for check in FLEET_CHECKS
        if check.id not in options.skip
    ]
    missing: tuple[str, ...] = ()
    if isinstance(outcome, Answered) and isinstance(outcome.facts, GroupFacts):
        missing = tuple(f"node rank {rank}" for rank in outcome.facts.missing)
    return replace(report, results=(*report.results, *results), missing=missing)
