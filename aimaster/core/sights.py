"""What an agent sees of one rank from outside, as plain numbers and closed sets: the input of every verdict.

A rank that makes steps is not looked at; it has only `still_s`. One that stands still is looked at by
several independent witnesses: the kernel's counters of its whole process tree, the state of its processes,
and the Python stack of its main thread. All times run on the agent's *observed* clock, which counts only
time in which the agent itself was on time: a machine that was paused as a whole has not stood still.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

STACK_CHARS_MAX = 2000
"""Longest stack that is kept, innermost frame first."""
WHERE_CHARS_MAX = 80
COLLECTIVE_CHARS_MAX = 80


class WorkerPhase(Enum):
    """What a worker is doing, as its progress page says."""

    STARTING = "starting"
    IMPORTING = "importing"
    TRAINING = "training"
    SAVING = "saving"
    LOADING = "loading"
    EXITING = "exiting"


class Activity(Enum):
    """What the kernel says about a rank's process tree."""

    UNKNOWN = "unknown"  # not looked at, since it moves, or nothing to be read
    ACTIVE = "active"  # uses processors, or wants to
    MOVING = "moving"  # moves bytes: reads or writes files, pipes, sockets
    IDLE = "idle"  # neither
    STOPPED = "stopped"  # by a signal
    TRACED = "traced"  # somebody traces it: a debugger
    ENDED = "ended"  # finished its script


class Wait(Enum):
    """What a rank's main thread waits for, by its stack and the kernel's word on its threads."""

    UNKNOWN = "unknown"  # no stack could be read
    OTHER = "other"  # something that may well end: work, a file, a socket, a sleep
    COLLECTIVE = "collective"  # other ranks
    LOCKED = "locked"  # a data worker, all of whose threads wait for a lock
    INTERPRETER = "interpreter"  # a C call holds the interpreter's lock and waits for another lock
    DEBUGGER = "debugger"  # a person


STUCK = frozenset({Wait.LOCKED, Wait.INTERPRETER})
"""Waits that nothing inside the rank's own processes can end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """How one rank looked a moment ago."""

    still_s: float
    """Since it last finished a step; before the first one, since its process was started."""
    activity: Activity = Activity.UNKNOWN
    idle_s: float = 0.0
    """How long its process tree has used no processor and moved no byte."""
    wait: Wait = Wait.UNKNOWN
    wait_s: float = 0.0
    """How long the same wait in the same place was seen, from the first look to the last one."""
    where: str = ""
    """The innermost frame that says something: ``recv (distributed_c10d.py)``."""
    stack: int = -1
    """Index into the stacks that came with it; -1 for none."""
    collective: str = ""
    """Operation and sequence number that the rank waits in, where the flight recorder tells."""

    def __post_init__(self) -> None:
        for name in ("still_s", "idle_s", "wait_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the kernel has counted for a rank's main thread since it began; see `aimaster.core.slowrank`."""

    at_s: float
    """When, on the node's monotonic clock."""
    awake_s: float
    """How long it ran, or wanted to run and was not let."""
    running_s: float
    """How long it ran."""

    def __post_init__(self) -> None:
        for name in ("at_s", "awake_s", "running_s"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and not negative, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """One rank of one node, as a heartbeat tells it."""

    rank: int
    phase: WorkerPhase
    steps: int
    """Since the start of the attempt."""
    sight: Sight
    step: int | None = None
    """The training's own number of its newest step, where it is known."""
    stack: str = ""
    """The stack's text, where there is one."""
