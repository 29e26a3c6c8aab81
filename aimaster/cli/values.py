"""Where a value comes from: argument, then variable, then default. Said here once for all flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aimaster.cli.flags import OWN_FLAGS
from aimaster.cli.words import Value, convert
from aimaster.integrations.torchrun import TORCHRUN_FLAGS, Flag

__all__ = ["FLAGS", "Values"]

FLAGS: dict[str, Flag] = {flag.dest: flag for flag in (*TORCHRUN_FLAGS, *OWN_FLAGS)}
"""All flags of `aimaster run` by `Flag.dest`."""


@dataclass(slots=True)
class Values:
    """Looks a flag's value up: argument, variable, default."""

    given: Mapping[str, Value]
    env: Mapping[str, str]
    notices: list[str] = field(default_factory=list)

    def of(self, dest: str) -> Value | None:
        flag = FLAGS[dest]
        if dest in self.given:
            return self.given[dest]
        for name in flag.env:
            if name in self.env:
                return convert(flag, self.env[name], source=f"the variable {name}")
        return flag.default

    def is_set(self, dest: str) -> bool:
        """Whether an argument or a variable gave it."""
        return dest in self.given or any(name in self.env for name in FLAGS[dest].env)

    def text(self, dest: str) -> str:
        value = self.of(dest)
        return "" if value is None else str(value)

    def switch(self, dest: str) -> bool:
        return bool(self.of(dest))

    def whole(self, dest: str) -> int | None:
        value = self.of(dest)
        return value if isinstance(value, int) else None

    def number(self, dest: str) -> float:
        value = self.of(dest)
        return float(value) if isinstance(value, int | float) else 0.0

    def words(self, dest: str) -> tuple[str, ...]:
        value = self.of(dest)
        return value if isinstance(value, tuple) else ()

    def path(self, dest: str) -> Path | None:
        text = self.text(dest)
        return Path(text) if text else None
