"""Scripted facts instead of a machine: ``--drill FILE``.

The file (YAML or JSON) names checks and what their probes would have said; a facts class's fields default to
those of a healthy node, so that only the fault is written down::

    schema: 1
    checks:
      gpu.inventory: {facts: {init_error: UNKNOWN}}
      host.disk: {hung: {phase: looking at /data}}
      num.bitwise: {crashed: {signal: SIGILL}}
      host.kernel: {cannot: {kind: not_permitted, message: /dev/kmsg}}

The rest of the engine, judgement and renderers is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sanitycheck.catalogue import by_id
from sanitycheck.errors import BadFileError, CodecError, SanitycheckError
from sanitycheck.facts.codec import decode
from sanitycheck.outcome import Answered, Cannot, Crashed, Hung, Outcome

__all__ = ["DRILL_BYTES_MAX", "DRILL_SCHEMA", "load", "parse"]

DRILL_SCHEMA = 1
DRILL_BYTES_MAX = 1 << 20
_KINDS: Mapping[str, type[Cannot] | type[Crashed] | type[Hung]] = {
    "cannot": Cannot,
    "crashed": Crashed,
    "hung": Hung,
}


def load(path: str) -> Mapping[str, Outcome]:
    """Read a drill file.

    Raises:
        BadFileError: It cannot be read or does not describe a drill.
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(DRILL_BYTES_MAX + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise BadFileError(path, problem=str(error)) from error
    if len(text) > DRILL_BYTES_MAX:
        raise BadFileError(path, problem=f"more than {DRILL_BYTES_MAX} bytes")
    if path.endswith(".json"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise BadFileError(path, problem=f"not JSON: {error}") from error
    else:
        import yaml

        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise BadFileError(path, problem=f"not YAML: {error}") from error
    return parse(data, path=path)


def parse(data: Any, *, path: str) -> Mapping[str, Outcome]:
    """Outcomes by id from the file's content.

    Raises:
        BadFileError: An unknown check, field or kind.
    """
    if not isinstance(data, Mapping) or data.get("schema") != DRILL_SCHEMA or "checks" not in data:
        raise BadFileError(path, problem=f"a drill is an object with 'schema: {DRILL_SCHEMA}' and 'checks'")
    outcomes: dict[str, Outcome] = {}
    for name, script in (data["checks"] or {}).items():
        try:
            outcomes[name] = _outcome(str(name), script)
        except SanitycheckError as error:
            raise BadFileError(path, problem=f"{name}: {error}") from error
    return outcomes


def _outcome(name: str, script: Any) -> Outcome:
    check = by_id(name)
    if not isinstance(script, Mapping) or len(script) != 1:
        raise CodecError(f"expected exactly one of facts, {', '.join(sorted(_KINDS))}")
    ((kind, body),) = script.items()
    if kind == "facts":
        return Answered(facts=decode(check.facts, body or {}))
    if kind not in _KINDS:
        raise CodecError(f"{kind!r} is none of facts, {', '.join(sorted(_KINDS))}")
    return decode(_KINDS[kind], body or {})
