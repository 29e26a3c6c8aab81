"""Reference pages of the checks, from each check's own declaration: what, why, rule, source, what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from sanitycheck.catalogue import CHECKS
from sanitycheck.check import Check
from sanitycheck.checks.devices import DEVICE_REASONS
from sanitycheck.reasons import Reason
from sanitycheck.render.sentences import template
from sanitycheck.render.texts import NOTHING
from sanitycheck.result import Level
from sanitycheck.runner import LEVEL_TIMEOUT_S

__all__ = ["check_pages", "index_page"]

WIDTH = 110


def _wrapped(text: str) -> str:
    return textwrap.fill(text, width=WIDTH, break_long_words=False, break_on_hyphens=False)


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _facts_named(text: str) -> str:
    """``{facts}`` of a sentence in the form that a table shows: ``‹facts›``."""
    return text.replace("{", "‹").replace("}", "›").replace("|", "\\|")


def _rows(reasons: tuple[Reason, ...]) -> list[str]:
    rows = ["| it may say | that is | what to do |", "| --- | --- | --- |"]
    for reason in reasons:
        found, step = template(reason)
        todo = "–" if step == NOTHING else _facts_named(step)
        rows.append(f"| `{reason.value}` | {_facts_named(found)} | {todo} |")
    return rows


def _page(check: Check) -> str:
    own = tuple(reason for reason in check.reasons if reason not in DEVICE_REASONS)
    shared = tuple(reason for reason in check.reasons if reason in DEVICE_REASONS)
    if check.id == "gpu.inventory":
        own, shared = check.reasons, ()
    lines = [
        f"# {check.id}",
        "",
        _wrapped(f"{_capital(check.title)}. Level *{check.level.value}*, looks at: {check.scope}."),
        "",
        _wrapped(check.about),
        "",
        "## Rule",
        "",
        _wrapped(check.rule),
        "",
        _wrapped(f"Where it comes from: {check.source}."),
        "",
        _wrapped(
            f"When its probe gives no answer within {check.deadline_s:g} s, the verdict is "
            f"*{check.if_hung.value}*; when it dies of a fault such as SIGSEGV, *{check.if_crashed.value}*."
        ),
        "",
        "## What it may say",
        "",
        *_rows(own),
    ]
    if shared:
        lines += [
            "",
            "And what every check of devices may say: "
            + ", ".join(f"`{reason.value}`" for reason in shared)
            + "; see [gpu.inventory](gpu.inventory.md).",
        ]
    lines += [
        "",
        f"Try it: `sanitycheck run --only {check.id}`. All checks: [index](README.md).",
        "",
        "This page is made from the check's own declaration.",
        "",
    ]
    return "\n".join(lines)


def check_pages() -> Mapping[str, str]:
    """Name of the file → its text, for every check."""
    return {f"{check.id}.md": _page(check) for check in CHECKS}


def index_page() -> str:
    """All checks in one table, by level."""
    lines = [
        "# Checks",
        "",
        _wrapped(
            "Each level includes the ones before it. How to read a report: "
            "[reading the report](../../how-to/read-a-sanitycheck-report.md)."
        ),
        "",
        "| level | at most | checks |",
        "| --- | --- | --- |",
    ]
    for level in Level:
        here = sum(check.level is level for check in CHECKS)
        lines.append(f"| {level.value} | {LEVEL_TIMEOUT_S[level]:g} s | {here} more |")
    lines += ["", "| check | level | looks at | what |", "| --- | --- | --- | --- |"]
    lines += [
        f"| [{check.id}]({check.id}.md) | {check.level.value} | {check.scope} | {check.title} |"
        for check in CHECKS
    ]
    return "\n".join([*lines, "", "This page is made from the checks' own declarations.", ""])
