"""Errors of sanitycheck.

::

    SanitycheckError                    exit 70 (our own bug, unless a branch below says otherwise)
    ├─ UsageError                       exit 2   the caller asked for something that does not exist
    │   ├─ UnknownCheckError            exit 2   no check has this id
    │   ├─ GroupError                   exit 2   the meeting point of a group cannot be opened
    │   └─ BadFileError                 exit 2   a drill, baseline or fingerprint file cannot be used
    ├─ TableError                       exit 70  a packaged table of facts has a slip
    ├─ CodecError                       exit 70  a value does not have the shape its class declares
    ├─ ReportFormatError                exit 70  a report that is not ours, or of a schema we do not read
    └─ CannotLookError                  (inside a probe only; becomes a verdict, never an exit code)
        ├─ NotApplicableError           → skipped
        ├─ ToolMissingError             → unknown
        ├─ ChildFailedError             → unknown
        └─ NotPermittedError            → unknown

A check that fails is not an error: it is a result.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BadFileError",
    "CannotLookError",
    "ChildFailedError",
    "CodecError",
    "GroupError",
    "NotApplicableError",
    "NotPermittedError",
    "ReportFormatError",
    "SanitycheckError",
    "TableError",
    "ToolMissingError",
    "UnknownCheckError",
    "UsageError",
]


class SanitycheckError(Exception):
    """Root of the tree. ``str(error)`` says what, where and what to do next."""

    exit_code: ClassVar[int] = 70


class UsageError(SanitycheckError):
    """The caller asked for something that does not exist or does not go together. Exit code 2."""

    exit_code: ClassVar[int] = 2


class UnknownCheckError(UsageError):
    """No check has this id. Exit code 2."""

    def __init__(self, check: str, *, known: tuple[str, ...]) -> None:
        self.check = check
        self.known = known
        family = check.split(".", 1)[0] + "."
        near = [name for name in known if name.startswith(family)] or list(known)
        super().__init__(f"there is no check {check!r}; near it: {', '.join(near)} (see 'sanitycheck list')")


class BadFileError(UsageError):
    """A drill, baseline or fingerprint file cannot be used. Exit code 2."""

    def __init__(self, path: str, *, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}")


class TableError(SanitycheckError):
    """A packaged table of facts has a slip; says which file and where. Exit code 70."""

    def __init__(self, table: str, *, problem: str) -> None:
        self.table = table
        self.problem = problem
        super().__init__(f"{table}: {problem}")


class GroupError(UsageError):
    """The meeting point of a group cannot be opened here. Exit code 2."""

    def __init__(self, endpoint: str, *, problem: str) -> None:
        self.endpoint = endpoint
        self.problem = problem
        super().__init__(
            f"{endpoint} cannot be opened: {problem}; on node rank 0, --rdzv-endpoint must name an address of"
            " that node and a free port"
        )


class ReportFormatError(SanitycheckError):
    """A text that should be a report is not one, or has a schema that this version does not read. Exit code
    70."""


class CodecError(SanitycheckError):
    """A value does not have the shape that its class declares; says where. Exit code 70."""


class CannotLookError(SanitycheckError):
    """Raised inside a probe: the thing could not be looked at. Becomes ``unknown`` (exit code 4 of a run)."""

    kind: ClassVar[str] = "cannot_look"


class NotApplicableError(CannotLookError):
    """Raised inside a probe: the check has no object here. Becomes ``skipped``."""

    kind: ClassVar[str] = "not_applicable"


class ToolMissingError(CannotLookError):
    """Raised inside a probe: a library, file or system call that is needed is not there. Becomes
    ``unknown``."""

    kind: ClassVar[str] = "tool_missing"


class ChildFailedError(CannotLookError):
    """Raised inside a probe: a child of its own gave no answer, or ended in an error. Becomes ``unknown``."""

    kind: ClassVar[str] = "child_failed"


class NotPermittedError(CannotLookError):
    """Raised inside a probe: this user or container may not look. Becomes ``unknown``."""

    kind: ClassVar[str] = "not_permitted"
