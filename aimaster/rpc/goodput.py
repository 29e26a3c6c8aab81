"""Where a job's wall time went, as a status tells it: on the wire and as a frozen object."""

from __future__ import annotations

from dataclasses import dataclass

from aimaster.rpc.gen import contract
from aimaster.rpc.wire import Wire, checked_seconds, checked_text


@dataclass(frozen=True, slots=True, kw_only=True)
class GoodputStatus:
    """Where the job's wall time went; see `aimaster.core.goodput`."""

    wall_s: float
    phases: tuple[tuple[str, float], ...]
    """Every phase and its seconds; together they are `wall_s`."""

    @property
    def share(self) -> float | None:
        """Of the wall time that went into new steps; None before any time has passed."""
        return dict(self.phases).get("training", 0.0) / self.wall_s if self.wall_s > 0 else None


NO_TIME = GoodputStatus(wall_s=0.0, phases=())


def goodput_to_wire(goodput: GoodputStatus) -> Wire:
    """For a status reply."""
    phases = [contract.PhaseTime(phase=name, seconds=seconds) for name, seconds in goodput.phases]
    return contract.Goodput(wall_s=goodput.wall_s, phases=phases)


def goodput_from_wire(wire: Wire) -> GoodputStatus:
    """Inverse of `goodput_to_wire`.

    Raises:
        BadMessage: a time is none.
    """
    phases = tuple(
        (checked_text("goodput.phase", one.phase), checked_seconds("goodput.seconds", one.seconds))
        for one in wire.phases
    )
    return GoodputStatus(wall_s=checked_seconds("goodput.wall_s", wire.wall_s), phases=phases)
