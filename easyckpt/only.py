"""Which parts of a checkpoint a load takes: ``load(state, only=["model.encoder", "optimizer.*"])``. Pure.

A pattern is a key path (``model.encoder``: it and everything below) or has wildcards as in file names
(``*.weight``); names are those that errors and `easyckpt inspect` show.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from easyckpt.errors import Misuse

__all__ = ["Selection"]

_WILD = "*?"


class Selection:
    """What is selected. None selects everything."""

    def __init__(self, patterns: str | Iterable[str] | None = None) -> None:
        if isinstance(patterns, str):
            patterns = (patterns,)
        self.patterns = None if patterns is None else tuple(patterns)
        if self.patterns is not None and not (self.patterns and all(map(_is_pattern, self.patterns))):
            raise Misuse(
                f"only={patterns!r} selects nothing", hint='key paths or patterns: only=["model", "*.bias"]'
            )

    def has(self, path: str) -> bool:
        """Whether a path is selected, with everything below it."""
        if self.patterns is None:
            return True
        return any(
            path == pattern
            or path.startswith((f"{pattern}.", f"{pattern}["))
            or (_has_wildcard(pattern) and fnmatch.fnmatchcase(path, _escaped(pattern)))
            for pattern in self.patterns
        )

    def may_have_below(self, path: str) -> bool:
        """Whether something at or below a path can be selected."""
        if self.patterns is None:
            return True
        for pattern in self.patterns:
            literal = _literal(pattern)
            if (
                self.has(path)
                or literal.startswith((f"{path}.", f"{path}["))
                or (_has_wildcard(pattern) and (path.startswith(literal) or literal.startswith(path)))
            ):
                return True
        return False


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _has_wildcard(pattern: str) -> bool:
    return any(sign in pattern for sign in _WILD)


def _literal(pattern: str) -> str:
    """The part before the first wildcard."""
    ends = [pattern.find(sign) for sign in _WILD if sign in pattern]
    return pattern[: min(ends)] if ends else pattern


def _escaped(pattern: str) -> str:
    """Brackets are part of key paths (``items[0]``) and no wildcards here."""
    return pattern.replace("[", "[[]")
