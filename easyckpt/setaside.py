"""Steps that are beyond repair: set aside, so that nothing picks them up, and nothing forgets that they were.

A step exists if and only if its manifest does, so the manifest moves: first a copy to ``quarantine/``,
then the original goes. Every reader, of any version, passes the step over from then on. Its data stays.
While the newest progress is among what was set aside, a job does not start from nothing (`easyckpt.survey`
names it among the hidden steps).
"""

from __future__ import annotations

from easyckpt.paths import QUARANTINE_FOLDER, StepName, manifest_path, parse_quarantine, quarantine_path
from easyckpt.storage.base import Storage

__all__ = ["names_set_aside", "set_aside"]


def names_set_aside(storage: Storage) -> tuple[StepName, ...]:
    """What was set aside.

    Raises:
        StorageError: the storage refuses.
    """
    names = (parse_quarantine(entry.path) for entry in storage.list(QUARANTINE_FOLDER))
    return tuple(name for name in names if name is not None)


def set_aside(storage: Storage, name: StepName, *, bytes_max: int) -> str:
    """Move a step's manifest away. Returns where to.

    Raises:
        StorageError: the storage refuses; the step is as it was, or set aside.
    """
    path = quarantine_path(name)
    storage.write_durable(path, storage.read(manifest_path(name), 0, bytes_max))
    storage.delete(manifest_path(name))
    return path
