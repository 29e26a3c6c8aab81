"""What a check says: verdicts, findings, results and the report, with their JSON form.

A check may find several things (a small ``/dev/shm`` and a low ``nofile``); each is a :class:`Finding` with
its own reason and facts, and the result's verdict is the worst of them. Sentences are not stored: they are
rendered from reason and facts (``sanitycheck.render``). ``blocking`` is narrower than *fail*: it says that
training would fail or compute wrongly on this node, which is the only thing for which a launcher may refuse
a node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from sanitycheck.errors import ReportFormatError
from sanitycheck.reasons import Reason

__all__ = [
    "EXIT_FAILED",
    "EXIT_OK",
    "EXIT_UNKNOWN",
    "REPORT_SCHEMA",
    "Finding",
    "Level",
    "Report",
    "Result",
    "Verdict",
    "worst",
]

REPORT_SCHEMA = 1
"""Raised when a field of the JSON report changes its meaning or goes away; a new field does not raise it."""

EXIT_OK = 0
EXIT_FAILED = 3
EXIT_UNKNOWN = 4


class Verdict(str, Enum):
    """*Unknown* is never *pass* and never "bad node"; *skipped* says that the check has no object here."""

    PASS = "pass"
    WARN = "warn"
    FAIL = "fail"
    UNKNOWN = "unknown"
    SKIPPED = "skipped"


_BADNESS = (Verdict.SKIPPED, Verdict.PASS, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL)


def worst(verdicts: tuple[Verdict, ...]) -> Verdict:
    """The worst of some verdicts; of none: unknown, since nothing was looked at."""
    return max(verdicts, key=_BADNESS.index, default=Verdict.UNKNOWN)


class Level(str, Enum):
    """How deep to look; each level includes the ones before it."""

    INSTANT = "instant"
    QUICK = "quick"
    STANDARD = "standard"
    DEEP = "deep"

    @property
    def depth(self) -> int:
        """Place in the order of levels, from 0."""
        return list(Level).index(self)

    def includes(self, other: Level) -> bool:
        """Whether a run of this level runs the checks of ``other``."""
        return other.depth <= self.depth


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a check found.

    Attributes:
        verdict: How bad it is.
        reason: Which of the closed set of reasons.
        subject: What it is about when the check looks at several things (``gpu:GPU-1a2b``, ``/dev/shm``).
        facts: Numbers and names the verdict rests on; JSON values only. Units come last in the names.
        blocking: Training would fail or compute wrongly here. Only ever with *fail*.
    """

    verdict: Verdict
    reason: Reason
    subject: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    blocking: bool = False

    def __post_init__(self) -> None:
        if self.blocking and self.verdict is not Verdict.FAIL:
            raise ValueError(
                f"a finding that is {self.verdict.value} cannot be blocking ({self.reason.value})"
            )
        object.__setattr__(self, "facts", MappingProxyType(dict(self.facts)))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "verdict": self.verdict.value,
            "reason": self.reason.value,
            "subject": self.subject,
            "blocking": self.blocking,
            "facts": dict(self.facts),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """From the JSON form."""
        return cls(
            verdict=Verdict(data["verdict"]),
            reason=Reason(data["reason"]),
            subject=str(data["subject"]),
            blocking=bool(data["blocking"]),
            facts=data["facts"],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one check said.

    Attributes:
        check: Id of the check.
        level: The level the check belongs to.
        scope: What kind of thing it looks at (node, gpu, …).
        findings: At least one, the worst first.
        duration_s: From start of the probe to the judgement; 0 when no probe ran.
    """

    check: str
    level: Level
    scope: str
    findings: tuple[Finding, ...]
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.findings:
            raise ValueError(f"{self.check}: a result without a finding says nothing")
        order = sorted(self.findings, key=lambda f: (f.blocking, _BADNESS.index(f.verdict)), reverse=True)
        object.__setattr__(self, "findings", tuple(order))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the findings."""
        return worst(tuple(finding.verdict for finding in self.findings))

    @property
    def reason(self) -> Reason:
        """The reason of the worst finding."""
        return self.findings[0].reason

    @property
    def blocking(self) -> bool:
        """Whether training would fail or compute wrongly here."""
        return any(finding.blocking for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; ``verdict``, ``reason`` and ``blocking`` are repeated from the worst finding."""
        return {
            "check": self.check,
            "level": self.level.value,
            "scope": self.scope,
            "verdict": self.verdict.value,
            "reason": self.reason.value,
            "blocking": self.blocking,
            "duration_s": round(self.duration_s, 4),
            "findings": [finding.to_dict() for finding in self.findings],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Result:
        """From the JSON form."""
        return cls(
            check=str(data["check"]),
            level=Level(data["level"]),
            scope=str(data["scope"]),
            findings=tuple(Finding.from_dict(item) for item in data["findings"]),
            duration_s=float(data["duration_s"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """All results of one run on one node.

    Attributes:
        node: Host name.
        level: What was asked for.
        results: In the order of the catalogue.
        started_unix_s: Wall time of the start, for people.
        duration_s: Monotonic.
        nccl_overrides: ``NCCL_*`` variables that the environment sets: they change what is measured and
            trained.
        missing: Nodes of the group that never came.
    """

    node: str
    level: Level
    results: tuple[Result, ...]
    started_unix_s: float = 0.0
    duration_s: float = 0.0
    nccl_overrides: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "nccl_overrides", MappingProxyType(dict(self.nccl_overrides)))

    @property
    def verdict(self) -> Verdict:
        """The worst verdict; *unknown* when no check looked at anything (all skipped, or none chosen)."""
        verdict = worst(tuple(result.verdict for result in self.results))
        return Verdict.UNKNOWN if verdict is Verdict.SKIPPED else verdict

    @property
    def blocking(self) -> bool:
        """Whether training would fail or compute wrongly on this node."""
        return any(result.blocking for result in self.results)

    @property
    def exit_code(self) -> int:
        """0 all pass (warnings allowed), 3 a check failed, 4 none failed but one is unknown."""
        if self.verdict is Verdict.FAIL:
            return EXIT_FAILED
        return EXIT_UNKNOWN if self.verdict is Verdict.UNKNOWN else EXIT_OK

    def with_verdict(self, *verdicts: Verdict) -> tuple[Result, ...]:
        """The results that have one of these verdicts."""
        return tuple(result for result in self.results if result.verdict in verdicts)

    def coverage(self) -> dict[str, int]:
        """How many checks there were, ran, and had each verdict."""
        counts = {verdict.value: len(self.with_verdict(verdict)) for verdict in Verdict}
        looked = sum(counts[verdict.value] for verdict in (Verdict.PASS, Verdict.WARN, Verdict.FAIL))
        return {"checks": len(self.results), "looked": looked, **counts}

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {
            "schema": REPORT_SCHEMA,
            "node": self.node,
            "level": self.level.value,
            "verdict": self.verdict.value,
            "blocking": self.blocking,
            "exit_code": self.exit_code,
            "coverage": self.coverage(),
            "started_unix_s": round(self.started_unix_s, 3),
            "duration_s": round(self.duration_s, 4),
            "nccl_overrides": dict(self.nccl_overrides),
            "missing": list(self.missing),
            "results": [result.to_dict() for result in self.results],
        }

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read what :meth:`to_json` wrote.

        Raises:
            ReportFormatError: The text is not a report, or has another schema number.
        """
        try:
            data = json.loads(text)
            if data["schema"] != REPORT_SCHEMA:
                raise ReportFormatError(
                    f"report has schema {data['schema']!r}, this version reads {REPORT_SCHEMA};"
                    " use the sanitycheck that wrote it"
                )
            return cls(
                node=str(data["node"]),
                level=Level(data["level"]),
                results=tuple(Result.from_dict(item) for item in data["results"]),
                started_unix_s=float(data["started_unix_s"]),
                duration_s=float(data["duration_s"]),
                nccl_overrides={str(key): str(value) for key, value in data["nccl_overrides"].items()},
                missing=tuple(str(node) for node in data.get("missing", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReportFormatError(f"not a sanitycheck report: {type(error).__name__}: {error}") from error
