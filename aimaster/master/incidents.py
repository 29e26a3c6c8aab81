"""What status says about incidents: kept small, and derived again only when something happened."""

from __future__ import annotations

from collections import deque

from aimaster.core.events import NodeRecovered, NodeSuspected, StepCommitted
from aimaster.journal.base import Entry
from aimaster.journal.incidents import Incident, incidents
from aimaster.rpc.status import IncidentStatus

ENTRIES_KEPT_MAX = 20_000
INCIDENTS_SHOWN_MAX = 200

_NO_PART_OF_IT = (StepCommitted, NodeSuspected, NodeRecovered)
"""Frequent events that no incident is made of."""


class IncidentLog:
    """The journal's entries that incidents can be told from."""

    def __init__(self) -> None:
        self._entries: deque[Entry] = deque(maxlen=ENTRIES_KEPT_MAX)
        self._told: tuple[IncidentStatus, ...] | None = ()

    def add(self, entry: Entry) -> None:
        """A step that is in the journal."""
        if not isinstance(entry.record.event, _NO_PART_OF_IT):
            self._entries.append(entry)
            self._told = None

    def told(self) -> tuple[IncidentStatus, ...]:
        """The newest incidents, newest last."""
        if self._told is None:
            found = incidents(self._entries)
            self._told = tuple(_shown(incident) for incident in found[-INCIDENTS_SHOWN_MAX:])
        return self._told


def _shown(incident: Incident) -> IncidentStatus:
    return IncidentStatus(
        number=incident.id,
        kind=incident.kind.value,
        node=incident.node,
        rank=incident.rank,
        reason=incident.reason.value,
        generation=incident.generation,
        at_wall_s=incident.detected_wall_s,
        last_step=incident.last_step,
        resumed_step=incident.resumed_step,
        restored_from=incident.restored_from,
        recovered_s=incident.recovered_s,
        error=incident.error,
    )
