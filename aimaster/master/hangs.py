"""Hang detection as the master runs it: heartbeats in, at most one `WorkersHung` per generation out.

Between the wire's words and the core's: which ranks a heartbeat tells of, and who must be heard of before
anybody is judged. While any rank steps this costs constant time per tick, whatever the size of the job. Where
a node's workers are a world of their own, each node is watched by itself: one that stands still is not hidden
by the steps of another.
"""

from __future__ import annotations

from aimaster.core.events import RestartScope, WorkersHung
from aimaster.core.hang import HangConfig
from aimaster.core.hangwatch import HangWatch, NodeReport, Roster
from aimaster.core.sights import RankReport, Sight
from aimaster.core.state import JobPhase, NodeRecord, NodeState, State
from aimaster.ids import NO_GENERATION, NodeId
from aimaster.rpc.messages import Heartbeat, Identity, RankProgress
from aimaster.rpc.status import HangStatus


class Hangs:
    """One life of a master's hang detection. Used on its event loop."""

    def __init__(self, config: HangConfig, state: State) -> None:
        """Begin; nothing but that the job has ever stepped is known from before."""
        job = state.job
        stepped = job.attempt_step is not None or job.history.best_step is not None
        self._config, self._stepped = config, stepped or job.first_step_at_s is not None
        self._watch = self._new_watch()
        self._alone: dict[NodeId, HangWatch] = {}
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
        self._watch_of(identity.node).take(report, now)

    def scan(self, now: float) -> WorkersHung | None:
        """Look, if nobody has stepped for long enough."""
        if self._state.job.phase is not JobPhase.RUNNING:
            return None
        if not self._by_node:
            return self._watch.look(_roster(self._state), now) if self._watch.due(now) else None
        for name in self._state.job.members:
            watch = self._alone.get(name)
            node = self._state.nodes[name]
            if watch is not None and node.state is NodeState.RUNNING and watch.due(now):
                found = watch.look(_roster_of_one(node), now)
                if found is not None:
                    return found  # the next one is found by the next look
        return None

    @property
    def _by_node(self) -> bool:
        declared = self._state.job.declared
        return declared is not None and declared.scope is RestartScope.NODE

    def _new_watch(self) -> HangWatch:
        return HangWatch(self._config, ever_stepped=self._stepped)

    def _watch_of(self, node: NodeId) -> HangWatch:
        if not self._by_node:
            return self._watch
        if node not in self._alone:
            self._alone[node] = self._new_watch()
        return self._alone[node]

    def status(self) -> HangStatus:
        """The limits in force, for people."""
        members = self._state.job.members
        watch = self._watch_of(members[0]) if self._by_node and members else self._watch
        limits = watch.limits()
        return HangStatus(
            enabled=watch.config.enabled,
            blind=watch.blind,
            stopped_s=limits.stopped_s,
            stuck_s=limits.stuck_s,
            busy_s=limits.busy_s,
            exit_s=limits.exit_s,
            step_time_s=watch.pace().quantile_s,
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


def _roster_of_one(node: NodeRecord) -> Roster:
    return Roster(
        generation=node.generation,
        nodes={node.id: node.incarnation},
        finished=frozenset(),
        suspect=(node.id,) if node.suspect else (),
        world_size=node.workers,
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
