"""Slow ranks as the master looks for them: heartbeats in, `RankSlow` out where that changes.

Between the wire's words and the core's, as `aimaster.master.hangs` is. Where no group crosses nodes, ranks of
different nodes do not wait for each other, and nobody is compared.
"""

from __future__ import annotations

from aimaster.core.events import RankSlow, RestartScope
from aimaster.core.slowrank import RankEffort, SlowWatch
from aimaster.core.state import JobPhase, State
from aimaster.ids import NO_GENERATION
from aimaster.rpc.messages import Heartbeat, Identity
from aimaster.rpc.status import SlowStatus


class Slowness:
    """One life of a master's search for slow ranks. Used on its event loop."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._watch = SlowWatch()
        self._told_world = 0
        self._newest: RankSlow | None = None

    def take(self, identity: Identity, beat: Heartbeat) -> None:
        """One heartbeat; costs time by the ranks of its node."""
        if beat.generation == NO_GENERATION:
            return
        self._told_world = beat.world_size
        self._watch.take(
            identity.node,
            beat.generation,
            tuple(
                RankEffort(rank=one.rank, steps=one.steps, effort=one.effort)
                for one in beat.progress
                if one.rank is not None and one.effort is not None
            ),
        )

    def scan(self) -> RankSlow | None:
        """What there is to say; costs time by the ranks of the job, and most at the end of a window."""
        job = self._state.job
        by_node = job.declared is not None and job.declared.scope is RestartScope.NODE
        if job.phase is not JobPhase.RUNNING or by_node:
            return None
        found = self._watch.look(job.generation, self._told_world or job.world_size)
        if found is not None:
            self._newest = found
        return found

    def status(self) -> SlowStatus | None:
        """Whom the others wait for at the moment."""
        found = self._newest
        if found is None or found.over or self._watch.named is None:
            return None
        return SlowStatus(
            node=found.node,
            ranks=found.ranks,
            awake=found.awake,
            running=found.running,
            others_awake=found.others_awake,
        )
