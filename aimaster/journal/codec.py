"""Events, decisions and policies as JSON text, and back.

Generic over the frozen dataclasses of the core: an object is ``{"is": "WorkerExited", "rank": 3, …}``, an
enum its value, a tuple a list. Reading is driven by the type hints and total: whatever does not fit is a
`JournalCorrupt` that names the place. A field that is not there takes its default, so that a field with a
default may be added without a new schema number; a field or a type that is not known is an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

from aimaster.core import commands, events, policy, requeue
from aimaster.journal.errors import JournalCorrupt

SCHEMA = 1
"""Raised when older programs could misread what is written. Kept in the journal's head."""

TYPE_KEY = "is"

Plain = bool | int | float | str | None | list["Plain"] | dict[str, "Plain"]


def _registry() -> dict[str, type]:
    found: dict[str, Any] = {}
    for module in (events, commands, policy, requeue):
        for name, value in vars(module).items():
            if not isinstance(value, type) or value.__module__ != module.__name__:
                continue
            if dataclasses.is_dataclass(value):
                found[name] = value
    return found


_TYPES: Mapping[str, type] = _registry()


def encode(value: object) -> str:
    """One line of JSON for a dataclass of the core."""
    return json.dumps(to_plain(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def to_plain(value: object) -> Plain:
    """The same as plain lists and dictionaries."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = type(value).__name__
        if _TYPES.get(name) is not type(value):
            raise TypeError(f"{name} is not a dataclass of the core, so the journal does not know it")
        plain: dict[str, Plain] = {TYPE_KEY: name}
        for field in dataclasses.fields(value):
            plain[field.name] = to_plain(getattr(value, field.name))
        return plain
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a journal cannot hold a {type(value).__name__}")


def decode_event(text: str) -> events.Event:
    """The event that `encode` wrote.

    Raises:
        JournalCorrupt: if the text is anything else.
    """
    return _decode(text, events.Event)


def decode_decision(text: str) -> commands.Decision:
    """The decision that `encode` wrote.

    Raises:
        JournalCorrupt: if the text is anything else.
    """
    return _decode(text, commands.Decision)


def decode_policy(text: str) -> policy.Policy:
    """The policy that `encode` wrote.

    Raises:
        JournalCorrupt: if the text is anything else.
    """
    return _decode(text, policy.Policy)


D = typing.TypeVar("D")


def _decode(text: str, wanted: type[D]) -> D:
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _corrupt(wanted.__name__, f"not JSON: {error}") from error
    value = _object(plain, wanted, wanted.__name__)
    assert isinstance(value, wanted)
    return value


def _corrupt(where: str, what: str) -> JournalCorrupt:
    return JournalCorrupt(
        "the journal holds something that cannot be read",
        where=f"{where}: {what}",
        next_step="Start the job under another --rdzv-id, or move its state directory away.",
    )


@cache
def _hints(cls: type) -> Mapping[str, Any]:
    return typing.get_type_hints(cls)


def _object(plain: object, wanted: type, where: str) -> object:
    """A dataclass of the core that is a `wanted`."""
    if not isinstance(plain, dict):
        raise _corrupt(where, f"an object was expected, not {type(plain).__name__}")
    name = plain.get(TYPE_KEY)
    cls = _TYPES.get(name) if isinstance(name, str) else None
    if cls is None or not issubclass(cls, wanted):
        raise _corrupt(where, f"{name!r} is not a known {wanted.__name__}")
    hints = _hints(typing.cast("Any", cls))
    given = {key: value for key, value in plain.items() if key != TYPE_KEY}
    unknown = sorted(set(given) - set(hints))
    if unknown:
        raise _corrupt(f"{where} {name}", f"unknown fields {', '.join(map(repr, unknown))}")
    values = {key: _value(value, hints[key], f"{name}.{key}") for key, value in given.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise _corrupt(f"{where} {name}", str(error)) from error


def _value(plain: object, hint: Any, where: str) -> object:
    """A value of the type that the hint names."""
    hint = getattr(hint, "__supertype__", hint)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(plain, typing.get_args(hint), where)
    if origin is tuple:
        if not isinstance(plain, list):
            raise _corrupt(where, "a list was expected")
        return tuple(_value(item, typing.get_args(hint)[0], where) for item in plain)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(plain, dict):
            raise _corrupt(where, "an object was expected")
        return {key: _value(item, typing.get_args(hint)[1], where) for key, item in plain.items()}
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(plain)
        except ValueError as error:
            raise _corrupt(where, str(error)) from error
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _object(plain, hint, where)
    return _scalar(plain, hint, where)


def _scalar(plain: object, hint: Any, where: str) -> object:
    if hint is float and type(plain) in (int, float):
        number = float(typing.cast("float", plain))
        if math.isfinite(number):
            return number
    elif hint in (int, str, bool, type(None)) and type(plain) is hint:
        return plain
    raise _corrupt(where, f"{plain!r:.100} is not a {getattr(hint, '__name__', hint)}")


def _one_of(plain: object, choices: tuple[Any, ...], where: str) -> object:
    """The first choice of the very type comes first, so that an int stays one where floats are allowed."""
    exact = [c for c in choices if type(plain) is getattr(c, "__supertype__", c)]
    for choice in (*exact, *choices):
        try:
            return _value(plain, choice, where)
        except JournalCorrupt:
            continue
    raise _corrupt(where, f"{plain!r:.100} is none of {', '.join(map(str, choices))}")
