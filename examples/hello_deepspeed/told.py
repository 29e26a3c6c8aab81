"""What the job's own journal says about each fault: when it was noticed, whom it blames, where the time went.

The master that wrote it was not told what was done to the job, so this is what a user would have learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from aimaster.core.goodput import Phase
from aimaster.errors import AimasterError
from aimaster.journal.incidents import Incident, incidents
from aimaster.journal.sqlite import SqliteJournal
from aimaster.journal.times import spans

UNATTRIBUTED_MAX = 0.02
CLOCK_S = 0.1  # a fault is noted down right after it was made

Add = Callable[[str], None]


def read_incidents(folder: Path, add: Add) -> tuple[Incident, ...]:
    """The incidents that the job's journal tells, oldest first; the node that hosted the master has it."""
    found: list[Incident] = []
    for path in sorted(folder.glob("nodes/*/state/journal.db")):
        try:
            with SqliteJournal.read(path) as journal:
                entries = tuple(journal.entries())
        except AimasterError as error:
            add(f"the journal cannot be read: {error}")
            continue
        found += incidents(entries)
        known = spans(entries)
        total_s = sum(span.end_s - span.begin_s for span in known)
        unknown_s = sum(span.end_s - span.begin_s for span in known if span.phase is Phase.UNKNOWN)
        if unknown_s > UNATTRIBUTED_MAX * total_s:
            add(f"the journal does not say what {unknown_s:.1f} of {total_s:.1f} s went to")
    return tuple(sorted(found, key=lambda one: one.detected_wall_s))


def detected(kind: str, when: float, told: tuple[Incident, ...], add: Add) -> float | None:
    """From the fault to the first sign of it that the master acted on."""
    own = _of(kind, when, told)
    if own is None:
        add(f"{kind}: the journal tells of no incident of this kind")
        return None
    return round(max(0.0, own.detected_wall_s - when), 3)


def check_blame(fault: dict[str, Any], ranks: Iterable[int], told: tuple[Incident, ...], add: Add) -> None:
    """The journal must name who was hurt, and nobody else.

    Args:
        fault: what was done.
        ranks: of the processes that were hurt, by their own step logs.
        told: what the journal tells.
        add: told what is not as it should be.
    """
    kind = fault["kind"]
    own = _of(kind, fault["wall_s"], told)
    if own is None:
        return  # said already
    if fault.get("node"):
        if own.node != fault["node"]:
            add(f"{kind}: the journal blames node {own.node}, hurt was {fault['node']}")
        return
    hurt = tuple(sorted(set(ranks)))
    blamed = own.hang.culprits if own.hang is not None else () if own.rank is None else (own.rank,)
    if blamed != hurt:
        add(f"{kind}: the journal blames rank {_names(blamed)}, hurt was rank {_names(hurt)}")


def _of(kind: str, when: float, told: tuple[Incident, ...]) -> Incident | None:
    own = [one for one in told if one.kind.value == kind and one.detected_wall_s >= when - CLOCK_S]
    return min(own, key=lambda one: one.detected_wall_s, default=None)


def _names(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "nobody"
