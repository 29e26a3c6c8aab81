"""What is there by name before a store lists it.

Some stores list late what they already give out by name. The names that matter most can be guessed: the next
generations, and the step that was committed last.
"""

from __future__ import annotations

from easyckpt.envelope import read_index
from easyckpt.errors import CheckpointFault, StorageError
from easyckpt.paths import GENERATIONS_FOLDER, LATEST_PATH, StepName, generation_path, parse_generation
from easyckpt.records import SMALL_BYTES_MAX, LatestHint
from easyckpt.storage.base import Storage

__all__ = ["all_generations", "hinted_step"]


def all_generations(storage: Storage) -> list[int]:
    """Numbers of all lives that have a record, oldest first.

    Raises:
        StorageError: the storage refuses.
    """
    listed = (parse_generation(entry.path) for entry in storage.list(GENERATIONS_FOLDER))
    numbers = {number for number in listed if number is not None}
    following = max(numbers, default=0) + 1
    while storage.exists(generation_path(following)):
        numbers.add(following)
        following += 1
    return sorted(numbers)


def hinted_step(storage: Storage) -> StepName | None:
    """The step committed last, as ``latest.json`` has it. What its manifest says decides; without one,
    nothing comes of the hint."""
    try:
        raw = read_index(storage, LATEST_PATH, bytes_max=SMALL_BYTES_MAX)
        hint = LatestHint.from_json(raw, where=storage.where(LATEST_PATH))
    except (StorageError, CheckpointFault):
        return None
    return StepName(step=hint.step, generation=hint.generation)
