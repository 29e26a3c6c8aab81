"""Names of the things that messages and decisions are about, as distinct types.

A bare ``str`` or ``int`` that names a node or a generation is a mistake that a type checker finds.
"""

from __future__ import annotations

import re
from typing import NewType

JobId = NewType("JobId", str)
"""One training run. Given by ``--rdzv-id``, else by the scheduler, else made by the first agent."""

NodeId = NewType("NodeId", str)
"""One machine (one agent's place). Lasts over agent restarts; the node rank does not."""

Incarnation = NewType("Incarnation", str)
"""One life of an agent or master process."""

Generation = NewType("Generation", int)
"""Raised whenever membership or ranks change. 0 means that none was formed yet."""

NO_GENERATION = Generation(0)

ID_BYTES_MAX = 128
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


def is_valid_id(text: str) -> bool:
    """Whether ``text`` may be a job or node id: it names folders and crosses the wire, so it is plain."""
    return len(text.encode()) <= ID_BYTES_MAX and _ID.match(text) is not None
