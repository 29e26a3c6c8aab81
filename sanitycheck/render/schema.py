"""JSON Schema (2020-12) of the report that ``--json`` writes: published in the reference, made from enums."""

from __future__ import annotations

from typing import Any

from sanitycheck.reasons import Reason
from sanitycheck.result import REPORT_SCHEMA, Level, Verdict

__all__ = ["report_schema"]

_TEXT = {"type": "string"}
_FLAG = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "number", "minimum": 0}


def _object(properties: dict[str, Any], *, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """An object whose fields are all there; more may come in later versions."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def report_schema() -> dict[str, Any]:
    """The schema. A field that changes its meaning or goes away raises the report's number."""
    verdict = {"enum": [one.value for one in Verdict]}
    level = {"enum": [one.value for one in Level]}
    reason = {"enum": [one.value for one in Reason]}
    finding = _object(
        {
            "verdict": verdict,
            "reason": reason,
            "subject": _TEXT,
            "blocking": _FLAG,
            "facts": {"type": "object"},
            "summary": _TEXT,
            "next": _TEXT,
        }
    )
    result = _object(
        {
            "check": _TEXT,
            "level": level,
            "scope": _TEXT,
            "verdict": verdict,
            "reason": reason,
            "blocking": _FLAG,
            "duration_s": _SECONDS,
            "findings": {"type": "array", "items": finding, "minItems": 1},
        }
    )
    counts = dict.fromkeys(("checks", "looked", *(one.value for one in Verdict)), _COUNT)
    report = _object(
        {
            "schema": {"const": REPORT_SCHEMA},
            "node": _TEXT,
            "level": level,
            "verdict": verdict,
            "blocking": _FLAG,
            "exit_code": {"enum": [0, 3, 4]},
            "coverage": _object(dict(counts)),
            "started_unix_s": _SECONDS,
            "duration_s": _SECONDS,
            "nccl_overrides": {"type": "object", "additionalProperties": _TEXT},
            "missing": {"type": "array", "items": _TEXT},
            "results": {"type": "array", "items": result},
        },
        optional=("missing",),
    )
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "sanitycheck report"}
    return {**head, **report}
