"""The report as JSON for a file or stdout: the report's own schema, plus the sentences for people."""

from __future__ import annotations

import json
import os
from typing import Any

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
    """Write the JSON so that a reader sees the old file or the whole new one, never a part.

    Raises:
        OSError: The file cannot be written; nothing is left behind.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        # A pipe or a device such as /dev/null: it is written to, never replaced.
        with open(path, "w", encoding="utf-8") as stream:
            stream.write(render(report) + "\n")
        return
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(render(report) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
