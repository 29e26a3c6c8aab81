"""What can be wrong with a journal, beside its folder (`FolderUnusable`), its file system (`NoSpace`) and
another master that writes it (`AlreadyRunning`).

    SetupError                     3  (aimaster.errors)
    └── JournalError               3  the journal cannot be used
        ├── JournalNewer           3  written by a newer version
        ├── JournalCorrupt         3  not a journal, or damaged
        └── JournalDiverged        3  replaying it gives another state than was written down
"""

from __future__ import annotations

from aimaster.errors import SetupError


class JournalError(SetupError):
    """The journal of a job cannot be used."""


class JournalNewer(JournalError):
    """A newer version wrote it, in a form that this one does not know."""


class JournalCorrupt(JournalError):
    """It is not a journal, or it is damaged."""


class JournalDiverged(JournalError):
    """Its events give another state than the one that was written beside them."""
