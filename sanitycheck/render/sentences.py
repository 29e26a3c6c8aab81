"""Sentences for people, from reasons and facts. Pure; one pair per reason: what was found, and what to do
next."""

from __future__ import annotations

from typing import Any

from sanitycheck.reasons import Reason
from sanitycheck.render.texts import NOTHING, TEXTS
from sanitycheck.result import Finding

__all__ = ["describe", "human", "next_step", "template"]


def template(reason: Reason) -> tuple[str, str]:
    """The sentence and the next step of a reason, with the names of facts in braces."""
    return TEXTS[reason]


def human(name: str, value: Any) -> str:
    """A fact as people read it; the unit is the end of its name."""
    if value is None:
        return "none" if name.endswith("_bytes") else "unknown"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if name.endswith("_bytes"):
        return _bytes(value)
    if name.endswith("_mb_s"):
        return f"{value:g} MB/s"
    if name.endswith(("gb_s", "per_s")):
        return f"{value:g}"
    if name.endswith("_s") and name != "unix_s":
        return _seconds(value)
    if name == "share":
        return f"{100 * value:.0f} %"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def _seconds(value: float) -> str:
    if abs(value) < 120:
        return f"{value:.3g} s"
    if abs(value) < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if abs(value) < 172_800 else f"{value / 86400:.0f} days"


class _Facts(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return "?"


def _fill(text: str, finding: Finding) -> str:
    return text.format_map(_Facts({name: human(name, value) for name, value in finding.facts.items()}))


def describe(finding: Finding) -> str:
    """What was found, in one sentence, led by what it is about."""
    text = _fill(TEXTS[finding.reason].found, finding)
    return f"{finding.subject}: {text}" if finding.subject else text


def next_step(finding: Finding) -> str:
    """What to do next; empty when there is nothing to do."""
    text = _fill(TEXTS[finding.reason].next_step, finding)
    return "" if text == NOTHING else text
