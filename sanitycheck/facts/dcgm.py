"""NVIDIA's own diagnostic, where it is installed: ``deep.dcgm``."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sanitycheck.errors import ChildFailedError, NotApplicableError
from sanitycheck.facts.request import Request

__all__ = ["DcgmFacts", "DcgmTest", "collect", "parse_dcgm"]

RUN_LEVEL = "3"
RESERVE_S = 10.0
TESTS_MAX = 200
TEXT_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmTest:
    """One test that did not pass: its name, what it is about, and what DCGM says."""

    name: str
    status: str = "Fail"
    subject: str = ""
    info: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DcgmFacts:
    """All tests: how many ran, and those that did not pass."""

    tests: int = 1
    failed: tuple[DcgmTest, ...] = ()


def _walk(value: Any) -> Iterator[dict[str, Any]]:
    """Every test in DCGM's JSON, whose nesting differs between versions 3 and 4."""
    if isinstance(value, dict):
        if "name" in value and "results" in value:
            yield value
        for part in value.values():
            yield from _walk(part)
    elif isinstance(value, list):
        for part in value:
            yield from _walk(part)


def parse_dcgm(text: str) -> DcgmFacts:
    """The outcome of ``dcgmi diag --json``.

    Raises:
        ValueError: It is not JSON, or holds no test.
    """
    failed: list[DcgmTest] = []
    tests = 0
    for test in _walk(json.loads(text[text.index("{") :])):
        for result in test["results"] if isinstance(test["results"], list) else ():
            status = str(result.get("status", ""))
            if status.lower() in ("pass", "skip", "not run", ""):
                tests += status.lower() == "pass"
                continue
            tests += 1
            warnings = result.get("warnings") or result.get("info") or ""
            failed.append(
                DcgmTest(
                    name=str(test["name"]),
                    status=status,
                    subject=str(result.get("gpu_id", result.get("gpu_ids", result.get("entity_id", "")))),
                    info=str(warnings)[:TEXT_CHARS_MAX],
                )
            )
    if not tests:
        raise ValueError("no test ran")
    return DcgmFacts(tests=tests, failed=tuple(failed[:TESTS_MAX]))


def collect(request: Request) -> DcgmFacts:
    """Run ``dcgmi diag -r 3``."""
    tool = shutil.which("dcgmi")
    if tool is None:
        raise NotApplicableError("DCGM is not installed here")
    request.tell("running dcgmi diag")
    try:
        done = subprocess.run(
            [tool, "diag", "-r", RUN_LEVEL, "--json"],
            capture_output=True,
            text=True,
            check=False,
            timeout=max(1.0, request.deadline_s - RESERVE_S),
        )
        return parse_dcgm(done.stdout)
    except subprocess.TimeoutExpired as error:
        raise ChildFailedError("dcgmi diag gave no answer in time") from error
    except ValueError as error:
        raise ChildFailedError(f"dcgmi diag said nothing that can be read: {error}") from error
