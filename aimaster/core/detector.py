"""Which nodes have been silent for too long: trusted, suspect, dead.

A heartbeat is a sign of life and nothing else. For each node the detector keeps the mean and the mean
deviation of the time between its beats (the estimator that TCP uses for round trips: V. Jacobson,
"Congestion Avoidance and Control", SIGCOMM 1988, appendix A). A node is suspect when it is silent for
longer than

    max(suspect_s, mean + deviations * deviation), at most suspect_s * stretch_max

and dead at the same multiple of that as `dead_s` is of `suspect_s`. So a node with a steady beat is judged by
the configured times, one with a ragged beat gets more patience, and none becomes immortal.

Three things bend the silence that counts, all of them pure numbers given by the shell:

- *The master was late itself.* A master that did not look for two seconds cannot hold them against a node.
  Its own delay is taken off every silence (`scan(late_s=...)`), as memberlist stretches its time-outs by the
  local node's health.
- *The connection broke.* That is no death (a proxy may have been restarted), but a second witness: the times
  shrink by `connection_lost_factor` until the node is heard again.
- *A new life.* Statistics and silence belong to one incarnation; nothing is inherited, and a beat from an
  earlier one counts for nothing.

More silence never makes a node healthier: between two beats a verdict only gets worse. A heartbeat costs
constant time; a scan looks only at nodes silent for longer than the shortest time that could matter.

What the detector says are events (`NodeSuspected`, `NodeRecovered`, `NodeDied`) for the journal and the
machine. It keeps no other memory: a master that starts again watches every node anew.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from aimaster.core.events import NodeDied, NodeRecovered, NodeSuspected
from aimaster.ids import Incarnation, NodeId

GAIN = 1 / 8
"""Weight of a new interval in the mean (Jacobson 1988)."""

DEVIATION_GAIN = 1 / 4
"""Weight of a new deviation in the mean deviation (Jacobson 1988)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig:
    """Times of the failure detector."""

    heartbeat_interval_s: float = 1.0
    """How often agents beat; they are told when they join."""
    suspect_s: float = 3.0
    dead_s: float = 6.0
    deviations: float = 4.0
    """How many mean deviations above the mean a silence may be."""
    stretch_max: float = 3.0
    """How many times `suspect_s` the most patient suspicion is."""
    connection_lost_factor: float = 0.6
    """Share of the times that is left when the connection is known to be broken."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.suspect_s < self.dead_s:
            raise ValueError(
                "need 0 < heartbeat_interval_s < suspect_s < dead_s, got "
                f"{self.heartbeat_interval_s}, {self.suspect_s}, {self.dead_s}"
            )
        if not 0 < self.connection_lost_factor <= 1 <= self.stretch_max or self.deviations < 0:
            raise ValueError(
                "need 0 < connection_lost_factor <= 1 <= stretch_max and deviations >= 0, got "
                f"{self.connection_lost_factor}, {self.stretch_max}, {self.deviations}"
            )


class Verdict(Enum):
    """What the detector thinks of a node, best first."""

    TRUSTED = "trusted"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(slots=True)
class _Watched:
    incarnation: Incarnation
    heard_s: float
    """When it was last heard, on the detector's own clock."""
    mean_s: float
    deviation_s: float = 0.0
    suspect: bool = False
    cut: bool = False


class Detector:
    """Watches any number of nodes. Not thread-safe: one owner calls it, with a clock that never goes back."""

    def __init__(self, config: DetectorConfig | None = None) -> None:
        self.config = config if config is not None else DetectorConfig()
        # In order of the last beat, longest silent first: a scan stops at the first that is fresh enough.
        self._watched: OrderedDict[NodeId, _Watched] = OrderedDict()
        self._excused_s = 0.0
        self._scanned_s: float | None = None

    def watch(self, node: NodeId, incarnation: Incarnation, now: float) -> None:
        """Begin with a node that has joined. Joining counts as a beat; a new incarnation starts afresh."""
        known = self._watched.get(node)
        if known is not None and known.incarnation == incarnation:
            known.heard_s, known.suspect, known.cut = self._clock(now), False, False
        else:
            self._watched[node] = _Watched(
                incarnation=incarnation,
                heard_s=self._clock(now),
                mean_s=self.config.heartbeat_interval_s,
            )
        self._watched.move_to_end(node)

    def forget(self, node: NodeId) -> None:
        """Stop watching a node that has left or is ended."""
        self._watched.pop(node, None)

    def watches(self, node: NodeId, incarnation: Incarnation) -> bool:
        """Whether this life of the node is watched.

        A beat from a node that is not must make it join again: it was given up, and does not know it.
        """
        known = self._watched.get(node)
        return known is not None and known.incarnation == incarnation

    def heartbeat(self, node: NodeId, incarnation: Incarnation, now: float) -> NodeRecovered | None:
        """Take in one beat, in constant time.

        Returns:
            The event that a suspect is heard again, if it was one.
        """
        known = self._watched.get(node)
        if known is None or known.incarnation != incarnation:
            return None
        silent = self._silence(known, now)
        error = silent - known.mean_s
        known.mean_s += GAIN * error
        known.deviation_s += DEVIATION_GAIN * (abs(error) - known.deviation_s)
        was_suspect = known.suspect
        known.heard_s, known.suspect, known.cut = self._clock(now), False, False
        self._watched.move_to_end(node)
        return NodeRecovered(node=node, incarnation=incarnation, silent_s=silent) if was_suspect else None

    def connection_lost(self, node: NodeId, incarnation: Incarnation) -> None:
        """A second witness: the node's connection broke without a goodbye."""
        known = self._watched.get(node)
        if known is not None and known.incarnation == incarnation:
            known.cut = True

    def scan(self, now: float, *, late_s: float = 0.0) -> tuple[NodeSuspected | NodeDied, ...]:
        """Look for nodes that have been silent for too long.

        Call it about once per heartbeat interval.

        Args:
            now: on the clock of the beats.
            late_s: how much later than meant this call comes, or how long beats may have lain unread: time in
                which the master could not have heard anybody.

        Returns:
            One event for each verdict that got worse. A dead node is not watched any more.
        """
        since_s = 0.0 if self._scanned_s is None else now - self._scanned_s
        self._excused_s += min(max(0.0, late_s), max(0.0, since_s))
        self._scanned_s = now
        # Whoever was heard within the excused time was heard just now, and no later than that.
        for known in reversed(self._watched.values()):
            if known.heard_s <= self._clock(now):
                break
            known.heard_s = self._clock(now)
        shortest_s = self.config.suspect_s * self.config.connection_lost_factor
        worse: list[NodeSuspected | NodeDied] = []
        for node, known in self._watched.items():
            silent = self._silence(known, now)
            if silent < shortest_s:
                break
            verdict = self._judge(known, silent)
            if verdict is Verdict.DEAD:
                worse.append(NodeDied(node=node, incarnation=known.incarnation, silent_s=silent))
            elif verdict is Verdict.SUSPECT and not known.suspect:
                known.suspect = True
                worse.append(NodeSuspected(node=node, incarnation=known.incarnation, silent_s=silent))
        for event in worse:
            if isinstance(event, NodeDied):
                del self._watched[event.node]
        return tuple(worse)

    def silence_s(self, node: NodeId, now: float) -> float | None:
        """For how long nothing was heard, the master's own delays taken off; None if not watched."""
        known = self._watched.get(node)
        return None if known is None else self._silence(known, now)

    def __len__(self) -> int:
        """How many nodes are watched."""
        return len(self._watched)

    def _clock(self, now: float) -> float:
        """Time without the stretches in which the master could not have heard anybody."""
        return now - self._excused_s

    def _silence(self, known: _Watched, now: float) -> float:
        return max(0.0, self._clock(now) - known.heard_s)

    def _judge(self, known: _Watched, silent_s: float) -> Verdict:
        config = self.config
        ragged_s = known.mean_s + config.deviations * known.deviation_s
        suspect_s = min(max(config.suspect_s, ragged_s), config.suspect_s * config.stretch_max)
        dead_s = suspect_s * (config.dead_s / config.suspect_s)
        if known.cut:
            suspect_s *= config.connection_lost_factor
            dead_s *= config.connection_lost_factor
        if silent_s >= dead_s:
            return Verdict.DEAD
        return Verdict.SUSPECT if silent_s >= suspect_s or known.suspect else Verdict.TRUSTED
