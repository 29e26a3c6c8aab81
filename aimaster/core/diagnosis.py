"""From what was said at a failure to its cause: the first row of a table that fits, and the cause of all.

A row matches one failure by its exit code, its signal, its text, its kind; all that it names must fit. Rows
are ordered, and the first that matches a failure speaks for it. Of all failures that belong to one incident
the most specific row wins, and of equally specific ones the earliest failure: that a peer has closed its
connection, or that a launcher saw a child fail, is the echo of something else.

The table is data (``aimaster/rules/diagnosis.yaml``); this is the pure part, which knows no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Protocol

TEXT_CHARS_MAX = 16 * 1024
"""How much of a failure's text is looked at."""


class Blame(Enum):
    """Where the cause lies."""

    USER = "user"  # the script, its data, its settings
    NODE = "node"
    DEVICE = "device"
    NETWORK = "network"
    STORAGE = "storage"
    PLATFORM = "platform"  # scheduler, container, libraries
    UNKNOWN = "unknown"


class Retry(Enum):
    """Whether starting again may help."""

    NEVER = "never"
    ONCE = "once"  # if it comes again it is not by chance
    AGAIN = "again"
    ELSEWHERE = "elsewhere"  # on another node


class Weight(IntEnum):
    """How much a row says, least first."""

    ECHO = 0  # the consequence of another rank's failure
    GENERIC = 1  # true, but says little
    CAUSE = 2


class Pattern(Protocol):
    """A compiled regular expression; the core compiles none itself."""

    def search(self, string: str, /) -> object | None:
        """A match anywhere, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row."""

    name: str
    cause: str
    """One sentence without a full stop."""
    blame: Blame
    retry: Retry
    do: str
    """What a person does about it."""
    source: str
    """Where the message comes from."""
    weight: Weight = Weight.CAUSE
    text: Pattern | None = None
    exit_codes: frozenset[int] = frozenset()
    signals: frozenset[int] = frozenset()
    kinds: frozenset[str] = frozenset()
    """Kinds of incident, such as ``node_lost``, and of hang, such as ``stopped``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure, as it was reported."""

    kinds: frozenset[str]
    node: str = ""
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    text: str = ""
    at_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one failure is, by the row that speaks for it."""

    rule: Rule
    failure: Failure


def fits(rule: Rule, failure: Failure) -> bool:
    """Whether all that the row names fits the failure."""
    if rule.exit_codes and failure.exit_code not in rule.exit_codes:
        return False
    if rule.signals and failure.signal not in rule.signals:
        return False
    if rule.kinds and not rule.kinds & failure.kinds:
        return False
    return rule.text is None or rule.text.search(failure.text[-TEXT_CHARS_MAX:]) is not None


def find(rules: Sequence[Rule], failure: Failure) -> Finding | None:
    """The first row that matches."""
    rule = next((rule for rule in rules if fits(rule, failure)), None)
    return None if rule is None else Finding(rule=rule, failure=failure)


def first_cause(rules: Sequence[Rule], failures: Iterable[Failure]) -> tuple[Finding, ...]:
    """What every failure is, the cause of all of them first.

    Returns:
        The most specific finding, of equal ones the earliest, then the others by time. Failures that no row
        matches are left out.
    """
    ordered = sorted(failures, key=lambda failure: failure.at_s)
    found = [finding for failure in ordered if (finding := find(rules, failure)) is not None]
    if not found:
        return ()
    cause = max(found, key=lambda finding: finding.rule.weight)  # the first of equals
    return (cause, *(finding for finding in found if finding is not cause))
