"""The small index files: who a folder belongs to, one record per life of the job, tombstones, and the hint.

All are frozen dataclasses that check themselves when made, whether by us or from a file.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from easyckpt.envelope import decode, encode

__all__ = [
    "NUMBER_MAX",
    "SMALL_BYTES_MAX",
    "GenerationRecord",
    "LatestHint",
    "RootRecord",
    "Tombstone",
    "check_number",
    "check_text",
    "check_wall_time",
]

NUMBER_MAX = 10**15
"""Of steps and generations: far beyond any run, and exact in every JSON reader."""

SMALL_BYTES_MAX = 64 << 10
"""Length of any file of this module."""

TEXT_CHARACTERS_MAX = 256


def check_number(value: int, what: str, *, least: int = 0, most: int = NUMBER_MAX) -> None:
    """Raise ValueError unless the number is in its range. ``True`` is no number."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {value!r}, and has to be a whole number from {least} to {most}")


def check_text(value: str, what: str, *, may_be_empty: bool = False) -> None:
    """Raise ValueError unless the text is short and printable: it goes to terminals and logs."""
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS_MAX or not value.isprintable():
        raise ValueError(f"{what} has to be printable text of at most {TEXT_CHARACTERS_MAX} characters")
    if not value and not may_be_empty:
        raise ValueError(f"{what} is empty")


def check_wall_time(value: float, what: str) -> None:
    """Raise ValueError unless it is a number of seconds since 1970 that a calendar has a date for."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 253_402_300_800:
        raise ValueError(f"{what} is {value!r}, and has to be seconds since 1970")
    if not math.isfinite(value):
        raise ValueError(f"{what} is not finite")


@dataclass(frozen=True, slots=True, kw_only=True)
class RootRecord:
    """``easyckpt.json``: created once, and everything in the folder belongs to its run."""

    KIND: ClassVar[str] = "easyckpt.root"

    run_id: str
    """Identity of the training run that this folder keeps; lasts over every restart and every job id."""
    created_unix_s: float
    software: str

    def __post_init__(self) -> None:
        check_text(self.run_id, "run_id")
        check_text(self.software, "software", may_be_empty=True)
        check_wall_time(self.created_unix_s, "created_unix_s")

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> RootRecord:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRecord:
    """``generations/<n>.json``: one life of the job, and the step that it resumed from.

    Created once, before anything of the generation is committed, and after the step to resume from is
    settled.
    It fences the older lives: what they commit beyond that step is never seen.
    """

    KIND: ClassVar[str] = "easyckpt.generation"

    run_id: str
    generation: int
    resumed_step: int | None
    """None if this life began without a checkpoint."""
    world_size: int
    life: str
    """Token of the process that wrote it: a retry is told from another life with the same number."""
    created_unix_s: float
    software: str

    def __post_init__(self) -> None:
        check_text(self.run_id, "run_id")
        check_number(self.generation, "generation", least=1)
        if self.resumed_step is not None:
            check_number(self.resumed_step, "resumed_step")
        check_number(self.world_size, "world_size", least=1)
        check_text(self.life, "life")
        check_text(self.software, "software", may_be_empty=True)
        check_wall_time(self.created_unix_s, "created_unix_s")

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> GenerationRecord:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """``tombstones/…``: retention has taken a step back; its bytes go later.

    It counts only as long as the newer step that justified it (the anchor) would itself be seen: a tombstone
    set by a life that was replaced, for the sake of steps that never came to be, takes nothing away.
    """

    KIND: ClassVar[str] = "easyckpt.tombstone"

    run_id: str
    step: int
    generation: int
    by_generation: int
    """The generation whose retention set it."""
    anchor_step: int
    """The newer step that was read back before."""
    anchor_generation: int
    created_unix_s: float

    def __post_init__(self) -> None:
        check_text(self.run_id, "run_id")
        check_number(self.step, "step")
        check_number(self.generation, "generation", least=1)
        check_number(self.by_generation, "by_generation", least=1)
        check_number(self.anchor_step, "anchor_step")
        check_number(self.anchor_generation, "anchor_generation", least=1)
        check_wall_time(self.created_unix_s, "created_unix_s")
        if (self.anchor_step, self.anchor_generation) <= (self.step, self.generation):
            raise ValueError("only a newer step is a reason to remove one")

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> Tombstone:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestHint:
    """``latest.json``: the step committed last, for people and scripts. Nothing of ours decides by it."""

    KIND: ClassVar[str] = "easyckpt.latest"

    step: int
    generation: int
    manifest: str

    def __post_init__(self) -> None:
        check_number(self.step, "step")
        check_number(self.generation, "generation", least=1)
        check_text(self.manifest, "manifest")

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> LatestHint:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)
