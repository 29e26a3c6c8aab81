"""Notices modules that read, while they are imported, a variable that differs between workers.

A module that is imported once in the template and then shared must not have looked at ``RANK``: every worker
would inherit the template's answer. So `os.environ` gets, for the time of the imports ahead, a class that
records who asks. The whole chain of modules that were being imported at that moment is tainted, since each of
them would import the asking one again.

Reads from C (``getenv``) are not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType, TracebackType


class _WatchedEnviron(os._Environ):  # type: ignore[type-arg]
    """As `os.environ`, and tells of every key that is read."""

    asked: Callable[[str], None]

    def __getitem__(self, key: str) -> str:
        _WatchedEnviron.asked(key)
        return str(super().__getitem__(key))


class ImportWatch:
    """Context in which imports are watched. `tainted` then maps module names to a sentence."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self.tainted: dict[str, str] = {}

    def __enter__(self) -> ImportWatch:
        _WatchedEnviron.asked = self._asked
        os.environ.__class__ = _WatchedEnviron
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.environ.__class__ = os._Environ

    def _asked(self, key: str) -> None:
        if key not in self._names:
            return
        reader = ""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = str(frame.f_globals.get("__name__", ""))
            if name.startswith("aimaster.agent."):
                return  # what is below is Python's own start
            if frame.f_code.co_name == "<module>":
                reader = reader or name
                self.tainted.setdefault(name, f"{reader} reads {key} when it is imported")
            frame = frame.f_back
