"""What a pickle would import, told without loading it.

DCP keeps its ``.metadata`` as a pickle. A pickle runs code only through the names that it imports, so one
that imports nothing but DCP's own data classes is harmless. The scan follows the opcodes as Python's pickler
emits them: a name is imported by two texts pushed one after the other, directly or from the memo. Anything
else that could import, or a name built in another way, counts as unknown, and unknown is refused.
"""

from __future__ import annotations

import pickletools
from pathlib import Path

from easyckpt.errors import CorruptCheckpoint, Misuse

__all__ = ["check_imports"]

BYTES_MAX = 1 << 30
"""Of a metadata file: a million tensors take about 200 MB."""

_TEXT = {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE"}
_GET = {"BINGET", "LONG_BINGET", "GET"}
_PUT = {"BINPUT", "LONG_BINPUT", "PUT"}
_REFUSED = {"INST", "EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID"}
"""Opcodes that import or ask in ways that are not followed."""


def check_imports(path: Path, allowed: frozenset[str]) -> None:
    """Raise unless a pickle imports allowed names only.

    Args:
        path: the file.
        allowed: ``module.name``, or ``module.*``.

    Raises:
        CorruptCheckpoint: it is no pickle, or too long to be honest.
        Misuse: it imports something else.
    """
    if path.stat().st_size > BYTES_MAX:
        raise CorruptCheckpoint(f"it is longer than the {BYTES_MAX} bytes that it may have", where=str(path))
    try:
        strange = sorted(
            name
            for name in _imports(path.read_bytes())
            if name not in allowed and f"{name.rpartition('.')[0]}.*" not in allowed
        )
    except (ValueError, IndexError, EOFError, UnicodeDecodeError) as error:
        raise CorruptCheckpoint(f"it is no pickle: {error}", where=str(path)) from error
    if strange:
        raise Misuse(
            f"it would import {', '.join(strange[:5])}",
            where=str(path),
            hint="it is not loaded: the data of a checkpoint needs nothing of the kind",
        )


def _imports(data: bytes) -> set[str]:
    """Every ``module.name``; ``?`` for what cannot be told."""
    found: set[str] = set()
    memo: dict[int, str | None] = {}
    pushed: list[str | None] = [None, None]
    """The last two things that were pushed, if they were texts."""
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "MEMOIZE":
            memo[len(memo)] = pushed[-1]
        elif name in _PUT:
            memo[int(str(argument))] = pushed[-1]
        elif name in _TEXT:
            pushed = [pushed[-1], str(argument)]
        elif name in _GET:
            pushed = [pushed[-1], memo.get(int(str(argument)))]
        else:
            if name == "GLOBAL":
                found.add(str(argument).replace(" ", ".", 1))
            elif name == "STACK_GLOBAL":
                module, what = pushed
                found.add("?" if module is None or what is None else f"{module}.{what}")
            elif name in _REFUSED:
                found.add("?")
            if name != "FRAME":
                pushed = [None, None]
    return found
