"""Steps that a person wants to keep, whatever retention's policy says: one small file each,
``pins/s<step>.json``.

A pin holds for the number of the step, in every generation. It is set and taken away by hand (`easyckpt pin`,
`easyckpt unpin`), also while the job runs; retention looks at each of its runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import ClassVar

from easyckpt.envelope import decode, encode
from easyckpt.errors import NothingToLoad, StorageConflict
from easyckpt.paths import PINS_FOLDER, parse_pin, pin_path
from easyckpt.records import check_number, check_text, check_wall_time
from easyckpt.storage.base import Storage
from easyckpt.survey import survey

__all__ = ["PinRecord", "pin", "pinned_steps", "unpin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinRecord:
    """``pins/…``: the file's name is what counts, its content is for people."""

    KIND: ClassVar[str] = "easyckpt.pin"

    step: int
    note: str
    created_unix_s: float

    def __post_init__(self) -> None:
        check_number(self.step, "step")
        check_text(self.note, "note", may_be_empty=True)
        check_wall_time(self.created_unix_s, "created_unix_s")

    def to_json(self) -> bytes:
        """The file's bytes."""
        return encode(self.KIND, asdict(self))

    @classmethod
    def from_json(cls, raw: bytes, *, where: str) -> PinRecord:
        """Read it; see `easyckpt.envelope.decode` for the errors."""
        return decode(raw, cls.KIND, into=cls, where=where)


def pinned_steps(storage: Storage) -> frozenset[int]:
    """Steps that are pinned, by the names of the files: a damaged pin still holds.

    Raises:
        StorageError: the storage refuses.
    """
    steps = (parse_pin(entry.path) for entry in storage.list(PINS_FOLDER))
    return frozenset(step for step in steps if step is not None)


def pin(storage: Storage, step: int, *, note: str, now_unix_s: float) -> bool:
    """Keep a step from now on. Returns whether it was not pinned before.

    Raises:
        NothingToLoad: the step is not offered.
        StorageError: the storage refuses.
    """
    record = PinRecord(step=step, note=note, created_unix_s=now_unix_s)
    new = True
    try:
        storage.write_durable(pin_path(step), record.to_json(), if_absent=True)
    except StorageConflict:
        new = False
    # Retention may have taken it back meanwhile: look after the pin is there, not before.
    if survey(storage).find(step) is None:
        if new:
            storage.delete(pin_path(step))
        raise NothingToLoad(
            f"step {step} is not offered, so it cannot be kept",
            where=storage.where(),
            hint=f"`easyckpt why {storage.where()} {step}` says why",
        )
    return new


def unpin(storage: Storage, step: int) -> bool:
    """Leave a step to retention's policy again. Returns whether it was pinned.

    Raises:
        StorageError: the storage refuses.
    """
    was = storage.exists(pin_path(step))
    storage.delete(pin_path(step))
    return was
