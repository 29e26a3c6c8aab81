"""Reads a policy file: what the master tolerates, and how patient its failure detector is.

YAML with the fields of `aimaster.core.policy.Policy` and, under ``detector``, those of
`aimaster.core.detector.DetectorConfig`; what is not named keeps its default::

    worker_failures: {limit: 5, window_s: 1800}
    timeouts: {replacement_s: 120}
    detector: {suspect_s: 5, dead_s: 10}
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from aimaster.core.detector import DetectorConfig
from aimaster.core.policy import Policy
from aimaster.errors import UsageError
from aimaster.rules.reading import check_known, read_yaml

__all__ = ["PolicyFile", "read_policy"]

POLICY_BYTES_MAX = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """What a file says."""

    policy: Policy = field(default_factory=Policy)
    detector: DetectorConfig = field(default_factory=DetectorConfig)


def read_policy(path: Path) -> PolicyFile:
    """A policy file.

    Raises:
        UsageError: It cannot be read, or a field of it is unknown or impossible.
    """
    said = read_yaml(path, what="the policy", chars_max=POLICY_BYTES_MAX)
    said = {} if said is None else said
    if not isinstance(said, dict):
        raise UsageError("the policy must be fields with values", where=str(path))
    detector = said.pop("detector", {})
    return PolicyFile(
        policy=_changed(Policy(), said, str(path)),
        detector=_changed(DetectorConfig(), detector, f"{path}, detector"),
    )


def _changed(default: T, said: Any, where: str) -> T:
    """A record with the fields that were named; records in it are changed in the same way."""
    if not isinstance(said, dict):
        raise UsageError(f"fields with values are needed, got {said!r}", where=where)
    known = {item.name for item in fields(default)}  # type: ignore[arg-type]
    check_known(said, known, where)
    values = {name: _value(getattr(default, name), value, f"{where}, {name}") for name, value in said.items()}
    try:
        return replace(default, **values)  # type: ignore[type-var]
    except ValueError as error:
        raise UsageError(str(error), where=where) from error


def _value(default: Any, value: Any, where: str) -> Any:
    if is_dataclass(default):
        return _changed(default, value, where)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or (isinstance(default, int) and not isinstance(value, int)):
        wanted = "a whole number" if isinstance(default, int) else "a number"
        raise UsageError(f"{wanted} is needed, got {value!r}", where=where)
    return type(default)(value)
