"""``coll.pair``, ``coll.all``, ``coll.localise`` and ``sw.fleet``: what several nodes say together.

Every node of a group gets the same facts and comes to the same findings; only on the node that is called bad
do they block. A node that never came, or went away, is *unknown* and never bad.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sanitycheck.facts.fleet import GroupFacts
from sanitycheck.localise.evidence import Evidence, Limits, PairOutcome, Verdicts
from sanitycheck.localise.search import conclude
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Verdict

__all__ = ["evidence_of", "judge_all", "judge_fleet_software", "judge_localise", "judge_pair", "limits_of"]

DIFFERENCES_MAX = 64
PACKAGES_IN_LINE = 6


def limits_of(facts: GroupFacts) -> Limits:
    """The limits that the group was run with."""
    return Limits(pair_share=facts.pair_share, alone_share=facts.alone_share)


def evidence_of(facts: GroupFacts) -> Evidence:
    """The facts as the search reads them."""
    alone = {
        member.name: None if member.failed_alone else member.alone
        for member in facts.members
        if member.failed_alone or member.alone is not None
    }
    rounds: dict[int, list[PairOutcome]] = {}
    for meeting in facts.meetings:
        rounds.setdefault(meeting.round, []).append(
            PairOutcome(first=meeting.first, second=meeting.second, score=meeting.mb_s)
        )
    return Evidence(
        nodes=tuple(member.name for member in facts.members),
        alone=alone,
        rounds=tuple(tuple(rounds[number]) for number in sorted(rounds)),
    )


def _incomplete(facts: GroupFacts) -> list[Finding]:
    found = []
    if facts.missing:
        ranks = ", ".join(f"rank {rank}" for rank in facts.missing)
        named: dict[str, Any] = {"count": len(facts.members), "expected": facts.expected, "missing": ranks}
        found.append(Finding(verdict=Verdict.UNKNOWN, reason=Reason.GROUP_MISSING, facts=named))
    for member in facts.members:
        if member.left:
            named = {"rank": member.rank}
            found.append(
                Finding(verdict=Verdict.UNKNOWN, reason=Reason.GROUP_LEFT, subject=member.name, facts=named)
            )
    if facts.ended:
        named = {"why": facts.ended}
        found.append(Finding(verdict=Verdict.UNKNOWN, reason=Reason.GROUP_ENDED, facts=named))
    return found


def judge_localise(facts: GroupFacts, options: Options) -> tuple[Finding, ...]:
    """Which node or link is bad; see :mod:`sanitycheck.localise`."""
    verdicts = conclude(evidence_of(facts), limits=limits_of(facts))
    found = _incomplete(facts)
    if verdicts.common_cause:
        named = {
            "count": len(facts.members),
            "differences": _differences_line(facts) or "no difference found",
        }
        found.append(Finding(verdict=Verdict.FAIL, reason=Reason.COMMON_CAUSE, facts=named))
        return tuple(found)
    found += _culprits(facts, verdicts)
    found += [
        Finding(verdict=Verdict.WARN, reason=Reason.NODE_DOUBTFUL, subject=node, facts={})
        for node in verdicts.watch
    ]
    if len(facts.members) > 1 and verdicts.untested and not facts.missing:
        named = {"nodes": ", ".join(verdicts.untested)}
        found.append(Finding(verdict=Verdict.UNKNOWN, reason=Reason.GROUP_UNTESTED, facts=named))
    if found:
        return tuple(found)
    named = {"count": len(facts.members), "rounds": verdicts.rounds}
    return (Finding(verdict=Verdict.PASS, reason=Reason.FLEET_CLEAR, facts=named),)


def _culprits(facts: GroupFacts, verdicts: Verdicts) -> list[Finding]:
    left = {member.name for member in facts.members if member.left}
    found = []
    for culprit in verdicts.nodes:
        if culprit.first in left:
            continue  # it went away by itself: nobody knows why
        named: dict[str, Any] = {
            "why": culprit.why.value.replace("_", " "),
            "score": "nothing" if culprit.score is None else round(culprit.score, 1),
            "typical": "unknown" if culprit.typical is None else round(culprit.typical, 1),
            "witnesses": ", ".join(culprit.witnesses) or "none needed",
        }
        found.append(
            Finding(
                verdict=Verdict.FAIL,
                reason=Reason.NODE_BAD,
                subject=culprit.first,
                facts=named,
                blocking=culprit.first == facts.me,
            )
        )
    for culprit in verdicts.links:
        named = {"first": culprit.first, "second": culprit.second}
        found.append(
            Finding(
                verdict=Verdict.FAIL,
                reason=Reason.LINK_BAD,
                subject=f"{culprit.first}-{culprit.second}",
                facts=named,
            )
        )
    return found


def judge_pair(facts: GroupFacts, options: Options) -> tuple[Finding, ...]:
    """Every pair that failed or was far below the others. Whose fault it is, ``coll.localise`` says."""
    scores = sorted(meeting.mb_s for meeting in facts.meetings if meeting.mb_s is not None)
    typical = scores[len(scores) // 2] if scores else 0.0
    found = []
    for meeting in facts.meetings:
        subject = f"{meeting.first}-{meeting.second}"
        if meeting.mb_s is None:
            named: dict[str, Any] = {"problem": meeting.problem or "no answer"}
            found.append(
                Finding(verdict=Verdict.WARN, reason=Reason.PAIR_FAILED, subject=subject, facts=named)
            )
        elif meeting.mb_s < facts.pair_share * typical:
            named = {"rate_mb_s": meeting.mb_s, "typical_mb_s": typical}
            found.append(Finding(verdict=Verdict.WARN, reason=Reason.PAIR_SLOW, subject=subject, facts=named))
    if found:
        return tuple(found)
    if not facts.meetings:
        return (Finding(verdict=Verdict.SKIPPED, reason=Reason.PAIR_NONE),)
    named = {"count": len(facts.meetings), "rate_mb_s": typical}
    return (Finding(verdict=Verdict.PASS, reason=Reason.PAIRS, facts=named),)


def judge_all(facts: GroupFacts, options: Options) -> tuple[Finding, ...]:
    """The good nodes together."""
    together = facts.together
    if together is None:
        return (Finding(verdict=Verdict.SKIPPED, reason=Reason.ALL_NOT_RUN),)
    named: dict[str, Any] = {"nodes": together.nodes}
    if together.mb_s is None:
        named["problem"] = together.problem or "no answer"
        return (Finding(verdict=Verdict.FAIL, reason=Reason.ALL_FAILED, facts=named),)
    named["rate_mb_s"] = together.mb_s
    return (Finding(verdict=Verdict.PASS, reason=Reason.ALL_TOGETHER, facts=named),)


def _differences(facts: GroupFacts) -> dict[str, dict[str, tuple[str, str]]]:
    """Node → package → (its version, the majority's), where they differ."""
    packages = sorted({package for member in facts.members for package in member.versions})
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for package in packages:
        counts = Counter(member.versions.get(package, "none") for member in facts.members if member.versions)
        (usual, _), *others = counts.most_common()
        if not others:
            continue
        for member in facts.members:
            here = member.versions.get(package, "none")
            if member.versions and here != usual:
                found.setdefault(member.name, {})[package] = (here, usual)
    return found


def _line(differing: dict[str, tuple[str, str]]) -> str:
    parts = [f"{name} {here} (others {usual})" for name, (here, usual) in differing.items()]
    more = f" and {len(parts) - PACKAGES_IN_LINE} more" if len(parts) > PACKAGES_IN_LINE else ""
    return ", ".join(parts[:PACKAGES_IN_LINE]) + more


def _differences_line(facts: GroupFacts) -> str:
    return "; ".join(f"{node}: {_line(parts)}" for node, parts in list(_differences(facts).items())[:4])


def judge_fleet_software(facts: GroupFacts, options: Options) -> tuple[Finding, ...]:
    """What differs from the majority, one line per node."""
    differing = _differences(facts)
    found = [
        Finding(
            verdict=Verdict.FAIL,
            reason=Reason.FLEET_DIFFERS,
            subject=node,
            facts={"differences": _line(parts)},
        )
        for node, parts in list(differing.items())[:DIFFERENCES_MAX]
    ]
    named = {"count": len(facts.members)}
    return tuple(found) or (Finding(verdict=Verdict.PASS, reason=Reason.FLEET_EQUAL, facts=named),)
