"""Faults for a simulated fleet: written down line by line, or drawn from a mean time between failures.

A scenario is plain text. `#` begins a comment. A line is a setting or a fault::

    nodes 64                      # also: spares, min_nodes, workers, minutes, step_s, seed
    2m      kill_node     n8-n15  # when, what, which nodes
    5m30s   freeze_node   n3      for 10s
    6m      crash_master          for 3s

Times are numbers with a unit (`s`, `m`, `h`, `d`), which may follow each other. The kinds of faults are those
of `FaultKind`; those that strike the master name no node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random

from aimaster.errors import UsageError
from aimaster.simulation.faults import OF_THE_MASTER, Fault, FaultKind

__all__ = ["MIX", "Scenario", "draw_by_mtbf", "parse_duration", "parse_mtbf", "parse_scenario"]

LASTS_S = 5.0
"""How long a fault lasts that does not say so."""

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[smhd])+\Z")
_PART = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_NODES = re.compile(r"n(\d+)(?:-n?(\d+))?\Z")
_WHOLE = ("nodes", "spares", "min_nodes", "workers", "seed")
_SETTINGS = {**dict.fromkeys(_WHOLE, int), "minutes": float, "step_s": float}

MIX: tuple[tuple[FaultKind, float, tuple[float, float]], ...] = (
    (FaultKind.KILL_WORKER, 0.55, (0.0, 0.0)),
    (FaultKind.RESTART_NODE, 0.25, (600.0, 3600.0)),
    (FaultKind.HANG_WORKERS, 0.12, (4.0, 5.0)),
    (FaultKind.STICK_LINK, 0.04, (2.0, 60.0)),
    (FaultKind.FREEZE_NODE, 0.04, (2.0, 60.0)),
)
"""What strikes when faults are drawn by a mean time: kind, share, and how long it lasts, in seconds. An
assumption, not a measurement: most failures of a large training end a process, about a quarter take a node
away until it was looked after, one in eight is a hang."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What a file says."""

    settings: dict[str, float] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()


def parse_duration(text: str) -> float:
    """Seconds of ``90s``, ``1.5h`` or ``2m30s``.

    Raises:
        ValueError: it is none.
    """
    if not _DURATION.match(text):
        raise ValueError(f"{text!r} is no duration: a number with s, m, h or d, as in 90s or 2m30s")
    return sum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(text))


def parse_mtbf(text: str, *, nodes: int) -> float:
    """Mean time between failures of the whole job, in seconds: ``8h``, or ``2000h/node``.

    Raises:
        ValueError: it is none, or zero.
    """
    per_node = text.endswith("/node")
    seconds = parse_duration(text.removesuffix("/node"))
    if seconds <= 0:
        raise ValueError("a mean time between failures is above 0")
    return seconds / nodes if per_node else seconds


def draw_by_mtbf(random: Random, *, nodes: int, horizon_s: float, mtbf_s: float) -> tuple[Fault, ...]:
    """Faults of `MIX` that come independently of each other, on nodes drawn evenly."""
    kinds = [kind for kind, _, _ in MIX]
    shares = [share for _, share, _ in MIX]
    lasting = {kind: lasts for kind, _, lasts in MIX}
    faults = []
    at_s = random.expovariate(1 / mtbf_s)
    while at_s < horizon_s:
        (kind,) = random.choices(kinds, shares)
        lasts_s = random.uniform(*lasting[kind])
        faults.append(Fault(kind=kind, at_s=at_s, node=random.randrange(nodes), lasts_s=lasts_s))
        at_s += random.expovariate(1 / mtbf_s)
    return tuple(faults)


def parse_scenario(text: str, *, where: str) -> Scenario:
    """What a scenario says; ``where`` names it in errors.

    Raises:
        UsageError: a line is wrong; it is named.
    """
    settings: dict[str, float] = {}
    faults: list[Fault] = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        try:
            if words and words[0] in _SETTINGS:
                settings[words[0]] = _setting(words)
            elif words:
                faults += _faults(words)
        except ValueError as error:
            raise UsageError(str(error), where=f"{where}, line {number}") from error
    return Scenario(settings=settings, faults=tuple(faults))


def _setting(words: list[str]) -> float:
    name, *values = words
    try:
        (text,) = values
        value = _SETTINGS[name](text)
    except ValueError:
        raise ValueError(f"{name} needs one number, got {' '.join(values) or 'nothing'}") from None
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {text}")
    return float(value)


def _faults(words: list[str]) -> list[Fault]:
    at_s = parse_duration(words[0])
    if len(words) < 2:
        raise ValueError("a fault needs a kind behind its time")
    kind = _kind(words[1])
    rest = words[2:]
    lasts_s = LASTS_S
    if len(rest) >= 2 and rest[-2] == "for":
        lasts_s = parse_duration(rest[-1])
        rest = rest[:-2]
    if kind in OF_THE_MASTER:
        if rest:
            raise ValueError(f"{kind.value} strikes no node, got {' '.join(rest)}")
        return [Fault(kind=kind, at_s=at_s, node=0, lasts_s=lasts_s)]
    if len(rest) != 1:
        raise ValueError(f"{kind.value} needs one node or a range of nodes, as in n3 or n8-n15")
    return [Fault(kind=kind, at_s=at_s, node=node, lasts_s=lasts_s) for node in _nodes(rest[0])]


def _kind(text: str) -> FaultKind:
    try:
        return FaultKind(text)
    except ValueError:
        known = ", ".join(kind.value for kind in FaultKind)
        raise ValueError(f"{text!r} is no kind of fault; known: {known}") from None


def _nodes(text: str) -> range:
    found = _NODES.match(text)
    if not found:
        raise ValueError(f"{text!r} is no node; nodes are n0, n1, … and ranges of them n8-n15")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"{text!r} ends before it begins")
    return range(first, last + 1)
