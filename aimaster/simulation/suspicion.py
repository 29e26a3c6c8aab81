"""How often the failure detector is wrong about a node that lives, and how late about one that is gone.

The detector itself, in virtual time, fed by beats as they come over a bad network from a busy machine:

- each beat takes some milliseconds on its way;
- a segment that is lost is sent again after 0.2 s (the least that Linux waits), then after twice as long each
  time (RFC 6298, section 5.5), and what was sent later waits behind it: to the detector, loss over TCP is not
  a gap but a late burst. Worse than it is: the next beat makes a real sender repeat the lost one sooner;
- now and then an agent stands still for a while, with a heavy tail (Pareto);
- now and then the master is late: it hears and looks only when it is free again, and says by how much.

A life is followed for some hours; any suspicion and any verdict of death in it is wrong. At its end the node
falls silent without a sign, and the time to the verdict is the delay of a right one. The beats depend on the
seed and the conditions alone, so that two configurations judge the same beats.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import merge
from random import Random

from aimaster.core.detector import Detector, DetectorConfig
from aimaster.core.events import NodeDied
from aimaster.ids import Incarnation, NodeId

__all__ = ["CONDITIONS", "Conditions", "Wrong", "judge"]

RETRANSMIT_FIRST_S = 0.2
RETRANSMISSIONS_MAX = 8
"""After so many in a row the segment gets through: a connection that is truly gone is another case."""
DELAY_S = (0.0005, 0.02)
HOUR_S = 3600.0

_NODE = NodeId("n0")
_LIFE = Incarnation("n0-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """How bad it is."""

    name: str
    loss: float = 0.0
    """Share of segments that are lost, each on its own."""
    pauses_per_hour: float = 0.0
    """How often the agent stands still."""
    pause_least_s: float = 0.2
    pause_shape: float = 2.0
    """Exponent of the Pareto tail: a pause exceeds x with (pause_least_s / x) ** pause_shape."""
    late_per_hour: float = 0.0
    """How often the master is late."""
    late_s: float = 8.0
    """By how much at most."""

    def __post_init__(self) -> None:
        if not 0 <= self.loss < 1 or min(self.pauses_per_hour, self.late_per_hour) < 0:
            raise ValueError(f"need 0 <= loss < 1 and rates that are not negative, got {self}")


CONDITIONS = (
    Conditions(name="calm"),
    Conditions(name="1 % loss", loss=0.01),
    Conditions(name="10 % loss", loss=0.1),
    Conditions(name="20 % loss", loss=0.2),
    Conditions(name="60 pauses an hour of 0.2 s and more", pauses_per_hour=60.0),
    Conditions(name="600 pauses an hour of 0.5 s and more", pauses_per_hour=600.0, pause_least_s=0.5),
    Conditions(
        name="always ragged: a pause of 1.5 s and more every second",
        pauses_per_hour=3600.0,
        pause_least_s=1.5,
        pause_shape=4.0,
    ),
    Conditions(name="late master: 12 times an hour, up to 8 s", late_per_hour=12.0),
)
"""From what is usual to what nobody should have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """What one node's life showed."""

    hours: float
    suspected: int
    """Suspicions of the living node."""
    given_up: int
    """Verdicts of death on the living node."""
    delay_s: float | None
    """From the moment it fell silent to the verdict; None if it had just been given up wrongly."""


def judge(config: DetectorConfig, conditions: Conditions, *, hours: float, seed: int) -> Wrong:
    """Follow one node for some hours, then let it fall silent.

    Args:
        config: of the detector.
        conditions: of network, machine and master.
        hours: virtual time in which the node lives.
        seed: of the beats.
    """
    detector = Detector(config)
    detector.watch(_NODE, _LIFE, 0.0)
    silent_from_s = hours * HOUR_S
    late = _late(conditions, Random(f"master {seed}"), silent_from_s)
    beats = _arrivals(config, conditions, Random(f"beats {seed}"), silent_from_s)
    suspected = given_up = 0
    for at_s, is_look, planned_s in merge(_held(beats, late, is_look=False), _looks(config, late)):
        if not is_look:
            if not detector.watches(_NODE, _LIFE):
                detector.watch(_NODE, _LIFE, at_s)  # it was given up, hears so, and joins again
            detector.heartbeat(_NODE, _LIFE, at_s)
            continue
        for event in detector.scan(at_s, late_s=at_s - planned_s):
            died = isinstance(event, NodeDied)
            if died and at_s >= silent_from_s:
                return Wrong(
                    hours=hours, suspected=suspected, given_up=given_up, delay_s=at_s - silent_from_s
                )
            if at_s < silent_from_s:
                given_up += died
                suspected += not died
        if at_s >= silent_from_s and not detector.watches(_NODE, _LIFE):
            break  # wrongly given up just before it went: nobody waits for a verdict any more
    return Wrong(hours=hours, suspected=suspected, given_up=given_up, delay_s=None)


def _arrivals(
    config: DetectorConfig, conditions: Conditions, random: Random, until_s: float
) -> Iterator[float]:
    """When the beats of a node arrive that are sent before that time, in order."""
    pause_at_s = _next(conditions.pauses_per_hour, random, 0.0)
    at_s = newest_s = 0.0
    while at_s < until_s:
        while pause_at_s <= at_s:
            pause_s = conditions.pause_least_s * random.paretovariate(conditions.pause_shape)
            at_s = max(at_s, pause_at_s + pause_s)
            pause_at_s = _next(conditions.pauses_per_hour, random, pause_at_s + pause_s)
        wait_s, again_s, tries = random.uniform(*DELAY_S), RETRANSMIT_FIRST_S, 0
        while random.random() < conditions.loss and tries < RETRANSMISSIONS_MAX:
            wait_s, again_s, tries = wait_s + again_s, again_s * 2, tries + 1
        newest_s = max(newest_s, at_s + wait_s)
        if at_s < until_s:
            yield newest_s
        at_s += config.heartbeat_interval_s


def _next(per_hour: float, random: Random, now_s: float) -> float:
    return now_s + random.expovariate(per_hour / HOUR_S) if per_hour else float("inf")


def _late(conditions: Conditions, random: Random, until_s: float) -> tuple[tuple[float, float], ...]:
    """Stretches in which the master does nothing, apart from each other."""
    stretches = []
    begin_s = _next(conditions.late_per_hour, random, 0.0)
    while begin_s < until_s:
        end_s = begin_s + random.uniform(0.0, conditions.late_s)
        stretches.append((begin_s, end_s))
        begin_s = _next(conditions.late_per_hour, random, end_s)
    return tuple(stretches)


def _held(
    times: Iterator[float], late: tuple[tuple[float, float], ...], *, is_look: bool
) -> Iterator[tuple[float, bool, float]]:
    """When the master attends to what was due at these times, whether it is a look, and when it was due.

    Of two things at one time the beat goes first: what has arrived is read before silence is judged.
    """
    index = 0
    for due_s in times:
        while index < len(late) and late[index][1] <= due_s:
            index += 1
        busy = index < len(late) and late[index][0] <= due_s
        yield (late[index][1] if busy else due_s), is_look, due_s


def _looks(
    config: DetectorConfig, late: tuple[tuple[float, float], ...]
) -> Iterator[tuple[float, bool, float]]:
    """The master looks an interval after it has looked."""
    at_s = 0.0
    while True:
        due_s = at_s + config.heartbeat_interval_s
        ((at_s, is_look, _),) = _held(iter((due_s,)), late, is_look=True)
        yield at_s, is_look, due_s
