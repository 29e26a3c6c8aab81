"""Parses the words behind `aimaster run`: flags up to the program, then the program and what is its own.

argparse is not used, for three reasons: what was given must be told from what is a default (argument before
variable before default); an abbreviation that torchrun knows must not become ambiguous by a flag of ours; and
a `--` in front of the program means something here, while one behind the program belongs to the program: what
argparse does with `--` changed between versions of Python. A test compares this parser with torchrun's on
words that both accept.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aimaster.errors import UsageError
from aimaster.integrations.torchrun import Flag, Kind, split_list

__all__ = ["Parsed", "Value", "convert", "parse_words"]

Value = str | int | float | bool | tuple[str, ...]
"""What a flag may hold."""

_NEGATIVE_NUMBER = re.compile(r"-\d+$|-\d*\.\d+$")
_HELP = ("-h", "--help")
_SUGGESTIONS_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """The words, sorted."""

    given: Mapping[str, Value]
    """Values of the flags that were given as arguments, by `Flag.dest`."""
    rest: tuple[str, ...]
    """The program and its own words; empty where none was given."""
    separator: bool
    """Whether a `--` stood in front of the program."""
    help: bool = False
    """Whether help was asked for; nothing behind that flag was looked at."""


@dataclass(slots=True)
class _Reader:
    """Reads words from the left; the position is the only state."""

    words: Sequence[str]
    flags: Sequence[Flag]
    abbreviated: Sequence[Flag]
    at: int = 0
    given: dict[str, Value] = field(default_factory=dict)

    def done(self, *, separator: bool = False, help: bool = False) -> Parsed:
        rest = () if help else tuple(self.words[self.at :])
        return Parsed(given=dict(self.given), rest=rest, separator=separator, help=help)

    def find(self, name: str) -> Flag:
        """The flag of that name or abbreviation."""
        for flag in self.flags:
            if name in flag.names:
                return flag
        if name.startswith("--"):
            found = [f for f in self.abbreviated if any(n.startswith(name) for n in f.names)]
            if len(found) == 1:
                return found[0]
            if found:
                could = ", ".join(flag.long for flag in found)
                raise UsageError(f"the flag {name} is ambiguous", where=f"it could be {could}")
        raise _unknown(name, self.flags)

    def long(self, word: str) -> None:
        name, equals, text = word.partition("=")
        flag = self.find(name)
        if flag.kind is Kind.SWITCH:
            if equals:
                raise UsageError(f"the flag {flag.long} takes no value", where=f"{text!r} was given")
            self.given[flag.dest] = True
        else:
            self.given[flag.dest] = convert(flag, text if equals else self.value_of(flag), source=flag.long)

    def short(self, word: str) -> None:
        """`-m`, `-r 3`, `-r3`, `-r=3`, `-mr 3`."""
        flag = self.find(word[:2])
        if flag.kind is Kind.SWITCH:
            self.given[flag.dest] = True
            if len(word) > 2:
                self.short("-" + word[2:])
        else:
            text = word[2:].removeprefix("=") if len(word) > 2 else self.value_of(flag)
            self.given[flag.dest] = convert(flag, text, source=flag.long)

    def value_of(self, flag: Flag) -> str:
        """The next word, which must not look like a flag."""
        word = self.words[self.at] if self.at < len(self.words) else None
        if word is None or word == "--" or _looks_like_flag(word):
            raise UsageError(f"the flag {flag.long} needs a value", where=flag.metavar or flag.help)
        self.at += 1
        return word


def parse_words(words: Sequence[str], *, torchrun: Sequence[Flag], own: Sequence[Flag]) -> Parsed:
    """Sort the words of a command line.

    Args:
        words: What stands behind `aimaster run`.
        torchrun: Flags that may be abbreviated, as argparse lets torchrun's be.
        own: Flags that must be written out, so that they never make an abbreviation ambiguous.

    Raises:
        UsageError: An unknown or ambiguous flag, a missing value or one of the wrong kind.
    """
    reader = _Reader(words=words, flags=(*torchrun, *own), abbreviated=torchrun)
    while reader.at < len(words):
        word = words[reader.at]
        if word == "--":
            reader.at += 1
            return reader.done(separator=True)
        if not _looks_like_flag(word):
            break
        reader.at += 1
        if word in _HELP:
            return reader.done(help=True)
        if word.startswith("--"):
            reader.long(word)
        else:
            reader.short(word)
    return reader.done()


def convert(flag: Flag, text: str, *, source: str) -> Value:
    """The value that `text` means for `flag`; `source` names the argument or variable in an error."""
    try:
        match flag.kind:
            case Kind.INT:
                return int(text)
            case Kind.FLOAT:
                return float(text)
            case Kind.LIST:
                return split_list(text)
            case Kind.SWITCH:
                return bool(int(text or "0"))
            case Kind.TEXT:
                pass
    except ValueError:
        wanted = {Kind.INT: "a whole number", Kind.FLOAT: "a number", Kind.SWITCH: "0 or 1"}[flag.kind]
        raise UsageError(f"{source} needs {wanted}", where=f"{text!r} was given") from None
    if flag.choices and source in flag.names and text not in flag.choices:
        raise UsageError(f"{source} must be one of {', '.join(flag.choices)}", where=f"{text!r} was given")
    return text


def _looks_like_flag(word: str) -> bool:
    """argparse's rule: a dash in front, but neither a lone dash, a negative number nor words with spaces."""
    if not word.startswith("-") or word == "-" or _NEGATIVE_NUMBER.match(word):
        return False
    return " " not in word.partition("=")[0]


def _unknown(name: str, flags: Iterable[Flag]) -> UsageError:
    known = sorted({n for flag in flags for n in flag.names if "_" not in n})
    near = difflib.get_close_matches(name.replace("_", "-"), known, n=_SUGGESTIONS_MAX, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}?\n" if near else ""
    return UsageError(f"unknown flag {name}", next_step=hint + "see all flags with: aimaster run --help")
