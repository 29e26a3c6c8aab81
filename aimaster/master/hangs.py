"""Hang detection as the master runs it: heartbeats in, at most one `WorkersHung` per generation out.

Between the wire's words and the core's: which ranks a heartbeat tells of, and who must be heard of before
anybody is judged. While any rank steps this costs constant time per tick, whatever the size of the job.
"""

from __future__ import annotations

from aimaster.core.events import WorkersHung
from aimaster.core.hang import HangConfig
from aimaster.core.hangwatch import HangWatch, NodeReport, Roster
from aimaster.core.sights import RankReport, Sight
from aimaster.core.state import JobPhase, NodeState, State
from aimaster.ids import NO_GENERATION
from aimaster.rpc.messages import Heartbeat, Identity, RankProgress
from aimaster.rpc.status import HangStatus


class Hangs:
    """One life of a master's hang detection. Used on its event loop."""

    def __init__(self, config: HangConfig, state: State) -> None:
        """Begin; nothing but that the job has ever stepped is known from before."""
        job = state.job
        stepped = job.attempt_step is not None or job.history.best_step is not None
        self._watch = HangWatch(config, ever_stepped=stepped or job.first_step_at_s is not None)
        self._state = state

    def take(self, identity: Identity, beat: Heartbeat, now: float) -> None:
        """One heartbeat; costs time by the ranks of its node."""
        if beat.generation == NO_GENERATION:
            return
        ranks = tuple(
            _report(one, beat) for one in beat.progress if one.sight is not None and one.rank is not None
        )
        report = NodeReport(
            node=identity.node,
            incarnation=identity.incarnation,
            generation=beat.generation,
            ranks=ranks,
            clock_s=beat.clock_s,
            world_size=beat.world_size,
        )
        self._watch.take(report, now)

    def scan(self, now: float) -> WorkersHung | None:
        """Look, if nobody has stepped for long enough."""
        if self._state.job.phase is not JobPhase.RUNNING or not self._watch.due(now):
            return None
        return self._watch.look(_roster(self._state), now)

    def status(self) -> HangStatus:
        """The limits in force, for people."""
        limits = self._watch.limits()
        return HangStatus(
            enabled=self._watch.config.enabled,
            blind=self._watch.blind,
            stopped_s=limits.stopped_s,
            stuck_s=limits.stuck_s,
            busy_s=limits.busy_s,
            exit_s=limits.exit_s,
            step_time_s=self._watch.pace().quantile_s,
        )


def _report(one: RankProgress, beat: Heartbeat) -> RankReport:
    sight = one.sight or Sight(still_s=0.0)
    known = one.steps > 0 or beat.base_step > 0
    return RankReport(
        rank=one.rank if one.rank is not None else one.local_rank,
        phase=one.phase,
        steps=one.steps,
        sight=sight,
        step=beat.base_step + one.steps if known else None,
        stack=beat.stacks[sight.stack] if 0 <= sight.stack < len(beat.stacks) else "",
    )


def _roster(state: State) -> Roster:
    members = [state.nodes[name] for name in state.job.members]
    return Roster(
        generation=state.job.generation,
        nodes={node.id: node.incarnation for node in members},
        finished=frozenset(node.id for node in members if node.state is NodeState.FINISHED),
        suspect=tuple(node.id for node in members if node.suspect and node.state is not NodeState.FINISHED),
        world_size=state.job.world_size,
    )
