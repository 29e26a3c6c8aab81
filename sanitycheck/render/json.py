"""The report as JSON for a file or stdout: the report's own schema, plus the sentences for people."""

from __future__ import annotations

import json
from typing import Any

from sanitycheck.durable import write_whole
from sanitycheck.render.sentences import describe, next_step
from sanitycheck.result import Report

__all__ = ["render", "write"]


def render(report: Report) -> str:
    """Indented JSON with ``summary`` and ``next`` beside every finding; readers of the report pass over
    them."""
    data: dict[str, Any] = report.to_dict()
    for item, result in zip(data["results"], report.results, strict=True):
        for part, finding in zip(item["findings"], result.findings, strict=True):
            part["summary"], part["next"] = describe(finding), next_step(finding)
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)


def write(report: Report, path: str) -> None:
    """Write the JSON, whole or not at all.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    write_whole(path, render(report) + "\n")
