"""Frozen dataclasses to JSON values and back, strictly: an unknown field or a wrong type is an error.

Only what facts and options are made of: numbers, strings, None, enums, tuples, string-keyed mappings,
dataclasses.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sanitycheck.errors import CodecError

__all__ = ["decode", "encode"]

T = TypeVar("T")


def encode(value: Any) -> Any:
    """The JSON value of a dataclass, leaving out fields that are not data (callables)."""
    if is_dataclass(value) and not isinstance(value, type):
        items = ((item.name, getattr(value, item.name)) for item in fields(value))
        return {name: encode(part) for name, part in items if not callable(part)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(part) for part in value]
    return value


def decode(kind: type[T], value: Any, *, where: str = "") -> T:
    """A ``kind`` from its JSON value.

    Raises:
        CodecError: A field is unknown, missing without a default, or of another type.
    """
    if not is_dataclass(kind):
        raise CodecError(f"{kind!r} is not a dataclass")
    where = where or kind.__name__
    if not isinstance(value, Mapping):
        raise CodecError(f"{where}: expected an object, got {type(value).__name__}")
    hints = get_type_hints(kind)
    known = {item.name for item in fields(kind)}
    unknown = sorted(set(value) - known)
    if unknown:
        raise CodecError(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(sorted(known))}")
    parts = {name: _decode_as(hints[name], part, f"{where}.{name}") for name, part in value.items()}
    try:
        return kind(**parts)
    except TypeError as error:
        raise CodecError(f"{where}: {error}") from error


def _decode_as(hint: Any, value: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = (arg for arg in args if arg is not type(None))
        return _decode_as(inner, value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise CodecError(f"{where}: expected a list, got {type(value).__name__}")
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode_as(args[0], part, f"{where}[{i}]") for i, part in enumerate(value))
        raise CodecError(f"{where}: only tuple[X, ...] is carried")
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise CodecError(f"{where}: expected an object, got {type(value).__name__}")
        return {str(key): _decode_as(args[1], part, f"{where}.{key}") for key, part in value.items()}
    if is_dataclass(hint):
        return decode(hint, value, where=where)  # type: ignore[arg-type]
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(value)
        except ValueError as error:
            raise CodecError(f"{where}: {error}") from error
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint in (bool, int, float, str) and type(value) is hint:
        return value
    raise CodecError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {value!r}")
