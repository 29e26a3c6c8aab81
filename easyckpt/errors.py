"""What can go wrong with a checkpoint, as one tree.

Every error says what happened, where, and what to do next; the facts are attributes, the sentence is made of
them. Three branches differ in who can help: the caller's code, the environment (storage, memory, the
saver), or the checkpoint itself::

    EasyckptError                      70  base; raised itself only for our own bugs
    ├── Misuse                          2  the calling code or the command line must change
    │   ├── UnsupportedValue            2  a value in the state that cannot be stored without pickle
    │   ├── StateMismatch               2  the state to load into differs from what was saved
    │   └── StaleGeneration             2  spoken by a life of the job that has been replaced
    ├── EnvironmentFault                3  the surroundings refuse; the same code may work later or elsewhere
    │   ├── StorageError                3  the checkpoint folder or store
    │   │   ├── StorageFull             3  no space, or a quota is used up
    │   │   ├── StorageDenied           3  no permission, read-only, or credentials are refused
    │   │   ├── StorageUnavailable      3  does not answer, or answers that it cannot just now
    │   │   ├── StorageMissing          3  the object that was asked for is not there
    │   │   └── StorageConflict         3  an object that is created only once is there already
    │   ├── MemoryFull                  3  no memory for a slot
    │   └── SaverUnavailable            3  the node's saver process is not there or does not answer
    │       └── ProtocolError           3  the other side speaks something else: version, size, secret
    ├── CheckpointFault                 4  what is stored cannot be used
    │   ├── CorruptCheckpoint           4  bytes differ from what their digest says
    │   ├── IncompleteCheckpoint        4  pieces are missing
    │   ├── UnknownFormat               4  written by a newer version, or not by easyckpt
    │   └── NothingToLoad               4  progress is known to have existed, and nothing loadable is found
    └── SaveNotDone                     5  a save that did not reach the stage asked for
        ├── SaveSkipped                 5  never begun: the slots were busy, or the step was saved already
        ├── SaveAbandoned               5  begun, and given up; older steps are unharmed
        ├── SaveTimeout                 5  the stage was not reached in time, and still may be
        └── Unprotected                 5  nothing became durable for longer than `max_unprotected_s`

The numbers are the exit codes of the ``easyckpt`` command.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "CheckpointFault",
    "CorruptCheckpoint",
    "EasyckptError",
    "EnvironmentFault",
    "IncompleteCheckpoint",
    "MemoryFull",
    "Misuse",
    "NothingToLoad",
    "ProtocolError",
    "SaveAbandoned",
    "SaveNotDone",
    "SaveSkipped",
    "SaveTimeout",
    "SaverUnavailable",
    "StaleGeneration",
    "StateMismatch",
    "StorageConflict",
    "StorageDenied",
    "StorageError",
    "StorageFull",
    "StorageMissing",
    "StorageUnavailable",
    "UnknownFormat",
    "Unprotected",
    "UnsupportedValue",
]


class EasyckptError(Exception):
    """Base of all errors of this package. Exit code 70 when raised as itself: that is our own bug.

    Args:
        what: what happened, one clause.
        where: the path, step, rank or key path that it happened to.
        hint: what to do next, one sentence or a command to type.
    """

    exit_code: ClassVar[int] = 70

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(what)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text} ({self.hint})" if self.hint else text


class Misuse(EasyckptError):
    """The calling code or the command line must change. Exit code 2."""

    exit_code = 2


class UnsupportedValue(Misuse):
    """A value in the state cannot be stored without pickle; ``where`` is its key path. Exit code 2."""


class StateMismatch(Misuse):
    """The state to load into differs from what was saved. Exit code 2.

    Args:
        what: what happened, one clause.
        missing: names that the state has and the checkpoint does not.
        unexpected: names that the checkpoint has and the state does not.
        changed: names of another shape or type, each with both.
        where: the checkpoint.
        hint: what to do next.
    """

    def __init__(
        self,
        what: str,
        *,
        missing: tuple[str, ...] = (),
        unexpected: tuple[str, ...] = (),
        changed: tuple[str, ...] = (),
        where: str = "",
        hint: str = "",
    ) -> None:
        super().__init__(what, where=where, hint=hint)
        self.missing = missing
        self.unexpected = unexpected
        self.changed = changed


class StaleGeneration(Misuse):
    """Spoken by a life of the job that has been replaced. Exit code 2."""


class EnvironmentFault(EasyckptError):
    """The surroundings refuse; the same code may work later or elsewhere. Exit code 3."""

    exit_code = 3


class StorageError(EnvironmentFault):
    """The checkpoint folder or store refuses. Exit code 3."""


class StorageFull(StorageError):
    """No space is left, or a quota is used up. Exit code 3."""


class StorageDenied(StorageError):
    """No permission, a read-only file system, or refused credentials. Exit code 3."""


class StorageUnavailable(StorageError):
    """The storage does not answer, or answers that it cannot just now. Exit code 3."""


class StorageMissing(StorageError):
    """The object that was asked for is not there. Exit code 3."""


class StorageConflict(StorageError):
    """An object that is created only once is there already. Exit code 3."""


class MemoryFull(EnvironmentFault):
    """There is no memory for a checkpoint slot. Exit code 3."""


class SaverUnavailable(EnvironmentFault):
    """The node's saver process is not there or does not answer. Exit code 3."""


class ProtocolError(SaverUnavailable):
    """The other side speaks something else: another version, an oversized message, a wrong secret. Exit
    code 3."""


class CheckpointFault(EasyckptError):
    """What is stored cannot be used. Exit code 4."""

    exit_code = 4


class CorruptCheckpoint(CheckpointFault):
    """Bytes differ from what their digest says. Exit code 4."""


class IncompleteCheckpoint(CheckpointFault):
    """Pieces of a checkpoint are missing. Exit code 4."""


class UnknownFormat(CheckpointFault):
    """Written by a newer version, or not by easyckpt. Exit code 4."""


class NothingToLoad(CheckpointFault):
    """Progress is known to have existed, and nothing loadable is found: never a silent start. Exit code 4."""


class SaveNotDone(EasyckptError):
    """A save did not reach the stage that was asked for. Exit code 5."""

    exit_code = 5


class SaveSkipped(SaveNotDone):
    """The save never began; ``what`` names the reason, the same on every rank. Exit code 5."""


class SaveAbandoned(SaveNotDone):
    """The save began and was given up; older steps are unharmed. Exit code 5."""


class SaveTimeout(SaveNotDone):
    """The stage was not reached in time, and still may be. Exit code 5."""


class Unprotected(SaveNotDone):
    """Nothing became durable for longer than ``max_unprotected_s``: training would go on without a net. Exit
    code 5."""
