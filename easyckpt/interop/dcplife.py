"""Which life of the job a ``dcp.save`` belongs to; see `easyckpt.interop.dcp`."""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass, replace

from easyckpt.commit import ensure_root, next_generation, record_generation
from easyckpt.errors import Misuse
from easyckpt.records import GenerationRecord, RootRecord
from easyckpt.storage import Storage
from easyckpt.survey import survey

__all__ = ["PART", "SOFTWARE", "Life", "begin_life", "ends_in_number", "note_resumed", "number_at_end"]

PART = "dcp"
"""Key of the only part in the state, and name of its adapter."""

SOFTWARE = "easyckpt dcp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """What all ranks of a save have in common."""

    run_id: str
    generation: int
    resumed_step: int | None
    step: int
    world_size: int


_lives: dict[str, Life] = {}
"""Root → the life of this process, with the last step that it began to save."""
_resumed: dict[str, int] = {}
"""Root → the step that this process has loaded."""


def note_resumed(root: str, step: int) -> None:
    """This process has loaded a step: what it saves next is another life, which goes on from there."""
    _resumed[root] = step
    _lives.pop(root, None)


_NUMBER = re.compile(r"(\d{1,15})/?\Z", re.ASCII)


def ends_in_number(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Whether a DCP id names a step."""
    return _NUMBER.search(os.fspath(checkpoint_id)) is not None


def number_at_end(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step that a DCP id names.

    Raises:
        Misuse: it names none.
    """
    found = _NUMBER.search(os.fspath(checkpoint_id))
    if found is None:
        raise Misuse("checkpoint_id has to end in the step's number", where=os.fspath(checkpoint_id))
    return int(found[1])


def begin_life(storage: Storage, root: str, *, step: int, world_size: int) -> Life:
    """This process's life, or another one if it cannot go on with it.

    Raises:
        Misuse: the step is not newer than one that is there.
        StaleGeneration: another job has begun one at the same time.
        StorageError: the storage refuses.
    """
    known = _lives.get(root)
    if known is not None and known.step < step and known.world_size == world_size:
        _lives[root] = replace(known, step=step)
        return _lives[root]
    found = survey(storage)
    newest = found.visible[0].step if found.visible else None
    resumed = _resumed.get(root, newest) if known is None else newest
    if resumed is not None and resumed >= step:
        raise Misuse(
            f"step {resumed} is there already, and step {step} is not newer",
            where=storage.where(),
            hint="load the step to go on from with DcpReader(root, step=…) first, or use another folder",
        )
    record = ensure_root(
        storage, RootRecord(run_id=secrets.token_hex(8), created_unix_s=time.time(), software=SOFTWARE)
    )
    generation = next_generation(storage)
    record_generation(
        storage,
        GenerationRecord(
            run_id=record.run_id,
            generation=generation,
            resumed_step=resumed,
            world_size=world_size,
            life=f"dcp-{secrets.token_hex(8)}",
            created_unix_s=time.time(),
            software=SOFTWARE,
        ),
    )
    _lives[root] = Life(
        run_id=record.run_id, generation=generation, resumed_step=resumed, step=step, world_size=world_size
    )
    return _lives[root]
