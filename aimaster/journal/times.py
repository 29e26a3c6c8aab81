"""The phases of a downtime, from a journal and nothing else: what `aimaster explain` says of an incident.

Taken from the same account as the job's goodput (`aimaster.core.goodput`), so that the phases of an incident
never overlap, and those up to the first new step are its downtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aimaster.core.goodput import Goodput, Phase, Span
from aimaster.journal.base import Entry
from aimaster.journal.incidents import Incident

__all__ = ["downtime", "spans"]

_NO_DOWNTIME = frozenset({Phase.TRAINING, Phase.STALL, Phase.UNKNOWN})
_ROUNDING_S = 1e-6


def spans(entries: Iterable[Entry]) -> tuple[Span, ...]:
    """All stretches of a job, in order, up to its newest entry.

    Args:
        entries: a whole journal, in order.
    """
    kept: list[Span] = []
    goodput = Goodput(kept.append)
    at_s = 0.0
    for entry in entries:
        at_s = entry.record.at_s
        goodput.take(entry.record.event, entry.record.decision, at_s)
    return (*kept, *goodput.unsettled(at_s))


def downtime(incident: Incident, known: Sequence[Span]) -> tuple[tuple[Phase, float], ...]:
    """Phases in their order, from the fault until training was where it had been; of one that lasts, so far.

    Args:
        incident: of the same journal.
        known: what `spans` gave.
    """
    found: dict[Phase, float] = {}
    begun = incident.detected_at_s
    for span in known:
        before = span.phase is Phase.DETECT and abs(span.end_s - begun) < _ROUNDING_S
        if not before and span.begin_s < begun - _ROUNDING_S:
            continue
        if span.phase in _NO_DOWNTIME:
            break
        found[span.phase] = found.get(span.phase, 0.0) + span.end_s - span.begin_s
    return tuple(found.items())
