"""The form of the words for one reason."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NOTHING", "Text"]

NOTHING = "nothing to do"


class Text(NamedTuple):
    """What was found and what to do next; names of facts in braces, filled in as ``sentences.human`` shows
    them."""

    found: str
    next_step: str
