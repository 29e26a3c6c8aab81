"""Where the job's time went, as the master keeps it: journalled steps in, times out.

One thing the journal cannot know by itself: when the steps that an earlier attempt had finished are done
again. Heartbeats tell, and `CaughtUp` writes it down, once for each attempt that has any.
"""

from __future__ import annotations

from aimaster.core.events import CaughtUp, StepCommitted
from aimaster.core.goodput import Goodput
from aimaster.ids import NO_GENERATION, Generation
from aimaster.journal.base import Entry
from aimaster.master.commits import CommitAges
from aimaster.rpc.goodput import GoodputStatus
from aimaster.rpc.messages import Heartbeat


class TimeSheet:
    """One job's times over all lives of its master. Used on its event loop."""

    def __init__(self) -> None:
        self._goodput = Goodput()
        self._caught_up: Generation = NO_GENERATION
        self.ages = CommitAges()
        """Of committed steps."""

    def add(self, entry: Entry) -> None:
        """A step that is in the journal."""
        record = entry.record
        if isinstance(record.event, StepCommitted):
            self.ages.note(record.event, record.at_s)
        self._goodput.take(record.event, record.decision, record.at_s)

    def take(self, beat: Heartbeat) -> CaughtUp | None:
        """One heartbeat; costs time by the ranks of its node only while steps are done again."""
        goal = self._goodput.goal
        current = beat.generation == self._goodput.generation != self._caught_up
        if goal is None or not current or not beat.progress:
            return None
        step = beat.base_step + max(one.steps for one in beat.progress)
        if step < goal:
            return None
        self._caught_up = beat.generation
        return CaughtUp(generation=beat.generation, step=step)

    def status(self, now_s: float) -> GoodputStatus:
        """Up to now, on the job's clock."""
        spent = self._goodput.spent(now_s)
        return GoodputStatus(
            wall_s=spent.wall_s,
            phases=tuple((phase.value, seconds) for phase, seconds in spent.phases.items()),
        )
