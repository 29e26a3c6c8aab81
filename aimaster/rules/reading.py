"""Files that users write: read within a bound, and every trouble is one message that names the file."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from aimaster.errors import UsageError

__all__ = ["check_known", "read_text", "read_yaml"]


def read_text(path: Path, *, what: str, chars_max: int) -> str:
    """A text file.

    Args:
        path: where it is.
        what: in the plural or the singular, as the messages shall call it: ``the policy``.
        chars_max: more than that is refused.

    Raises:
        UsageError: It cannot be read, or is too long.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{what} cannot be read ({error})", where=str(path)) from error
    if len(text) > chars_max:
        raise UsageError(f"{what}: more than {chars_max} characters", where=str(path))
    return text


def read_yaml(path: Path, *, what: str, chars_max: int) -> Any:
    """What a YAML file says, made of plain values alone. See `read_text`.

    Raises:
        UsageError: It cannot be read, is too long, or is not YAML.
    """
    try:
        return yaml.safe_load(read_text(path, what=what, chars_max=chars_max))
    except yaml.YAMLError as error:
        raise UsageError(f"{what}: not YAML: {error}", where=str(path)) from error


def check_known(said: Mapping[Any, Any], known: Collection[str], where: str) -> None:
    """Refuse fields that nobody knows: one that silently does nothing is worse than none.

    Raises:
        UsageError: There is one.
    """
    unknown = sorted(str(name) for name in said if name not in known)
    if unknown:
        raise UsageError(
            f"unknown fields {', '.join(unknown)}",
            where=where,
            next_step=f"known: {', '.join(sorted(known))}",
        )
