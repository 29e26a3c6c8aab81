"""One incident as a story: what, who first, evidence, rule, decision, downtime, what to do. A plain object.

Text and JSON of `aimaster explain` are made of it. Everything in it comes from the journal and the rules;
nothing is asked of anybody, so that the story of a job can be told long after its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from aimaster.core.commands import Reason
from aimaster.core.diagnosis import Blame, Failure, Finding, Retry, Rule, first_cause
from aimaster.core.goodput import Span
from aimaster.core.sentences import sentence
from aimaster.journal.incidents import Incident, IncidentKind
from aimaster.journal.times import downtime

__all__ = ["Phase", "Story", "tell"]

EVIDENCE_LINES_MAX = 12
OUTPUT_LINES_MAX = 4
"""Lines of output that nothing connects with the incident."""
_WARNING = re.compile(r":\d+: \w*Warning: |^(\[rank\d+\]:\s?)?\[W\d{3,}")
"""As Python prints warnings, and as torch's C++ code does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of the downtime."""

    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One incident, understood."""

    incident: Incident
    what: str
    who: str
    cause: str
    rule: str
    """Name of the row that fired; empty where none did."""
    source: str
    blame: Blame
    retry: Retry | None
    do: str
    evidence: tuple[str, ...]
    echoes: tuple[str, ...]
    """What else failed, and why that is no cause."""
    decision: str
    not_milder: str
    not_harder: str
    downtime: tuple[Phase, ...]


def tell(incident: Incident, rules: Sequence[Rule], known: Sequence[Span] = ()) -> Story:
    """The story of one incident.

    Args:
        incident: Which one.
        rules: Causes, in the order in which they are tried.
        known: Where the job's time went (`aimaster.journal.times.spans`).
    """
    findings = first_cause(rules, _failures(incident))
    cause = findings[0] if findings else None
    rule = cause.rule if cause else None
    return Story(
        incident=incident,
        what=_what(incident),
        who=_who(incident, cause),
        cause=rule.cause if rule else "not known: no rule fits what was said",
        rule=rule.name if rule else "",
        source=rule.source if rule else "",
        blame=rule.blame if rule else Blame.UNKNOWN,
        retry=rule.retry if rule else None,
        do=rule.do
        if rule
        else "add a rule of your own with --rules; aimaster/rules/diagnosis.yaml shows how",
        evidence=(*_evidence(incident, cause), *_checked(incident)),
        echoes=tuple(_echo(finding) for finding in findings[1:]),
        decision=_decision(incident),
        not_milder=_not_milder(incident),
        not_harder=_not_harder(incident, rule),
        downtime=tuple(_downtime(incident, known)),
    )


def _failures(incident: Incident) -> Iterator[Failure]:
    kinds = {incident.kind.value}
    if incident.hang is not None:
        kinds.add(incident.hang.kind.value)
    yield Failure(
        kinds=frozenset(kinds),
        node=incident.node,
        rank=incident.rank,
        exit_code=incident.exit_code,
        signal=incident.signal,
        text=incident.error,
        at_s=incident.detected_at_s,
    )
    for also in incident.also_failed:
        yield Failure(
            kinds=frozenset({also.kind.value}),
            node=also.node,
            rank=also.rank,
            exit_code=also.exit_code,
            signal=also.signal,
            text=also.error,
            at_s=also.at_s,
        )


def _what(incident: Incident) -> str:
    step = f" after step {incident.last_step}" if incident.last_step is not None else ""
    if incident.hang is not None:
        return f"no rank made a step for {incident.hang.stalled_s:.1f} s{step} ({incident.hang.kind.value})"
    how = ""
    if incident.signal is not None:
        how = f" by signal {incident.signal}"
    elif incident.exit_code is not None:
        how = f" with exit code {incident.exit_code}"
    return f"{incident.kind.value.replace('_', ' ')}{how}{step}"


def _who(incident: Incident, cause: Finding | None) -> str:
    if incident.hang is not None:
        blamed = ", ".join(str(rank) for rank in incident.hang.culprits)
        return f"rank {blamed} on {incident.node}" if blamed else "nobody can be blamed by what was seen"
    node = cause.failure.node if cause else incident.node
    rank = cause.failure.rank if cause else incident.rank
    return f"node {node}" if rank is None else f"rank {rank} on {node}"


def _checked(incident: Incident) -> Iterator[str]:
    """What the node check found where a suspicion fell."""
    for look in incident.checked:
        found = look.findings or (f"nothing found by {look.looked} checks",)
        yield from (f"node {look.node} was checked: {line}" for line in found)


def _evidence(incident: Incident, cause: Finding | None) -> Iterator[str]:
    if incident.hang is not None:
        for group in incident.hang.groups:
            inside = "" if group.collective.startswith("after ") else "in "
            waits = f", {inside}{group.collective}" if group.collective else ""
            yield f"rank {group.ranks}: {group.activity.value}, waits: {group.wait.value}{waits}"
            yield from (f"    {line}" for line in group.stack.splitlines()[:EVIDENCE_LINES_MAX])
        yield f"limit {incident.hang.limit_s:g} s"
        return
    if (cause.failure.signal if cause else incident.signal) is not None:
        yield from _before_a_signal(cause.failure.text if cause else incident.error, cause)
    else:
        lines = (cause.failure.text if cause else incident.error).strip().splitlines()
        yield from lines[:EVIDENCE_LINES_MAX]
        if len(lines) > EVIDENCE_LINES_MAX:
            yield f"… and {len(lines) - EVIDENCE_LINES_MAX} more lines"
    if incident.identified_s:
        yield f"known {incident.identified_s:.1f} s after the first sign"


def _before_a_signal(text: str, cause: Finding | None) -> Iterator[str]:
    """A signal leaves no last words: only what the rule went by is evidence, the rest was there before."""
    lines = text.strip().splitlines()
    pattern = cause.rule.text if cause else None
    if pattern is not None:
        yield from [line for line in lines if pattern.search(line)][:EVIDENCE_LINES_MAX] or lines[
            :EVIDENCE_LINES_MAX
        ]
        return
    said = _without_warnings(lines)[-OUTPUT_LINES_MAX:]
    if said:
        yield "its last output, which need not have to do with it:"
        yield from (f"    {line}" for line in said)


def _without_warnings(lines: Sequence[str]) -> list[str]:
    """Lines that are no warning of Python's or torch's, nor the source line that Python shows below one."""
    kept: list[str] = []
    below = False
    for line in lines:
        warns = _WARNING.search(line) is not None
        if not warns and not (below and line[:1].isspace()) and line.strip():
            kept.append(line)
        below = warns
    return kept


def _echo(finding: Finding) -> str:
    failure = finding.failure
    who = f"node {failure.node}" if failure.rank is None else f"rank {failure.rank}"
    return f"{who}: {finding.rule.cause} ({finding.rule.name})"


def _decision(incident: Incident) -> str:
    if incident.ended_job:
        return f"the job was ended: {sentence(incident.reason, incident.facts)}"
    if incident.attempt is None:
        return "all workers were stopped; no attempt has followed yet"
    used, limit = incident.facts.get("used"), incident.facts.get("limit")
    budget = f", {used} of {limit} of its budget used" if used is not None and limit is not None else ""
    who = "all workers were started again"
    unit = incident.facts.get("unit")
    if unit is not None and unit == incident.node:
        who = f"the workers of {unit} were started again while the others went on"
    elif unit is not None:
        who = f"{unit} took the place of {incident.node} while the others went on"
    below = incident.facts.get("below")
    aside = f"; checkpoints from step {below} on were set aside" if below is not None else ""
    return f"{who}, as attempt {incident.attempt}{budget}{aside}"


def _not_milder(incident: Incident) -> str:
    if incident.ended_job:
        return _WHY_ENDED.get(incident.reason, "another attempt would have met the same")
    if "unit" in incident.facts:
        return "the ranks of a node share process groups; --restart-scope node says that nobody else does"
    return (
        "ranks share process groups, and a rank inside a collective cannot wait for another one to come back"
    )


_WHY_ENDED = {
    Reason.SAME_ERROR_TWICE: "the retry failed with the same traceback at the same step",
    Reason.NO_PROGRESS: "attempts in a row got no further; more of them burn machines",
    Reason.BUDGET_SPENT: "so many restarts in that time are more than the budget allows",
    Reason.NO_HEALTHY_NODES: "fewer nodes are left than the job needs at least",
    Reason.EXIT_HUNG: "the training had come to its end on the other ranks: nothing was left to do again",
}


def _not_harder(incident: Incident, rule: Rule | None) -> str:
    if incident.ended_job:
        return ""
    if "same_fault" in incident.facts:
        nodes = incident.facts["same_fault"]
        return f"the same fault on {nodes} nodes is no node's fault; none was set aside for it"
    if incident.kind in (IncidentKind.NODE_LOST, IncidentKind.NODE_LEFT):
        return "the node is used again once it is back and passes its check"
    if rule is not None and rule.blame in (Blame.NODE, Blame.DEVICE):
        return "one failure is no proof against a node; it comes last in the choice of members from now on"
    return "nothing that was seen speaks against a node"


def _downtime(incident: Incident, known: Sequence[Span]) -> Iterator[Phase]:
    if "unit" not in incident.facts:
        for phase, seconds in downtime(incident, known):
            yield Phase(name=phase.value.replace("_", " "), seconds=seconds)
    elif incident.restarted_s is not None:  # the job went on meanwhile: the node's own times
        yield Phase(name="stop", seconds=incident.restarted_s)
        if incident.recovered_s is not None:
            yield Phase(name="start", seconds=max(0.0, incident.recovered_s - incident.restarted_s))
