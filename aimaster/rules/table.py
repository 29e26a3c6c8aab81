"""Reads tables of diagnosis rules: the one that comes with the program, and a user's own, which goes first.

A table is a YAML list of rows; `diagnosis.yaml` beside this file is the example. Everything is checked when
it is read, and an error names file, row and field: a rule that silently never matches is worse than none.
"""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from aimaster.core.diagnosis import Blame, Retry, Rule, Weight
from aimaster.errors import UsageError
from aimaster.rules.reading import check_known, read_yaml

BUILT_IN = Path(__file__).with_name("diagnosis.yaml")
RULES_BYTES_MAX = 1024 * 1024
RULES_MAX = 2000

_FIELDS = frozenset({"name", "match", "cause", "blame", "retry", "do", "source", "weight"})
_NEEDED = ("name", "match", "cause", "blame", "retry", "do")
_MATCHES = frozenset({"text", "exit_code", "signal", "kind"})
_NAME = re.compile(r"[a-z][a-z0-9_]*\Z")

E = TypeVar("E", bound=Enum)


def load_rules(own: Path | None = None) -> tuple[Rule, ...]:
    """The rules in order: the user's own first, then those that come with the program.

    Raises:
        UsageError: A table cannot be read, or a row of it is wrong.
    """
    first = read_table(own) if own is not None else ()
    return (*first, *read_table(BUILT_IN))


def read_table(path: Path) -> tuple[Rule, ...]:
    """One table.

    Raises:
        UsageError: It cannot be read, or a row is wrong.
    """
    rows = read_yaml(path, what="the rules", chars_max=RULES_BYTES_MAX)
    if not isinstance(rows, list) or len(rows) > RULES_MAX:
        raise UsageError(f"the rules must be a list of at most {RULES_MAX} rows", where=str(path))
    rules = tuple(_rule(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1))
    names = [rule.name for rule in rules]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"two rules are named {twice}", where=str(path))
    return rules


def _rule(row: object, where: str) -> Rule:
    if not isinstance(row, dict):
        raise UsageError("a rule must have fields", where=where)
    where = f"{where} ({row.get('name', 'without a name')})"
    check_known(row, _FIELDS, where)
    missing = [field for field in _NEEDED if field not in row]
    if missing:
        raise UsageError(f"a rule lacks {', '.join(missing)}", where=where)
    if not _NAME.match(str(row["name"])):
        raise UsageError("a rule's name is made of small letters, digits and '_'", where=where)
    match = row["match"]
    if not isinstance(match, dict) or not match:
        raise UsageError("match must name at least one of text, exit_code, signal, kind", where=where)
    check_known(match, _MATCHES, where)
    return Rule(
        name=str(row["name"]),
        cause=str(row["cause"]).strip(),
        blame=_member(Blame, row["blame"], where),
        retry=_member(Retry, row["retry"], where),
        do=str(row["do"]).strip(),
        source=str(row.get("source", "")),
        weight=_weight(row.get("weight", "cause"), where),
        text=_pattern(match.get("text"), where),
        exit_codes=frozenset(_numbers(match.get("exit_code"), where)),
        signals=frozenset(_numbers(match.get("signal"), where)),
        kinds=frozenset(str(kind) for kind in _listed(match.get("kind"))),
    )


def _member(kind: type[E], value: object, where: str) -> E:
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(str(member.value) for member in kind)
        raise UsageError(f"{value!r} is not one of {allowed}", where=where) from None


def _weight(value: object, where: str) -> Weight:
    try:
        return Weight[str(value).upper()]
    except KeyError:
        raise UsageError(f"{value!r} is not one of echo, generic, cause", where=where) from None


def _pattern(value: object, where: str) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        return re.compile(str(value), re.MULTILINE)
    except re.error as error:
        raise UsageError(f"text is no regular expression: {error}", where=where) from error


def _numbers(value: object, where: str) -> list[int]:
    found = _listed(value)
    if not all(type(number) is int for number in found):
        raise UsageError(f"whole numbers are needed, got {value!r}", where=where)
    return [int(number) for number in found]


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
