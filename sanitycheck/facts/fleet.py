"""What the nodes of a group found out together: ``coll.pair``, ``coll.all``, ``coll.localise``, ``sw.fleet``.

These facts come from :mod:`sanitycheck.group`, never from a probe: without ``--rdzv-endpoint`` there is no
group, and the checks are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts.request import Request

__all__ = ["AllFacts", "GroupFacts", "MeetingFacts", "MemberFacts", "collect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberFacts:
    """One node of the group.

    Attributes:
        name: Host name, with the rank where two nodes have the same.
        alone: Its figure alone (products per second); None where it was not measured.
        failed_alone: Its own checks say that training would fail or compute wrongly there.
        left: It went away before the end.
    """

    name: str
    rank: int = 0
    alone: float | None = None
    failed_alone: bool = False
    left: bool = False
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingFacts:
    """One test of two nodes; ``mb_s`` is None where it failed, and ``problem`` says how."""

    first: str
    second: str
    round: int = 0
    mb_s: float | None = 1000.0
    latency_s: float = 0.0001
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllFacts:
    """One test of all good nodes together."""

    nodes: int = 2
    mb_s: float | None = 1000.0
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFacts:
    """Everything the group found out.

    Attributes:
        me: Name of the node that reports.
        expected: How many nodes there should be.
        missing: Ranks that never came.
        pair_share: Below this share of the median a pair is bad.
        alone_share: Below this share of the median a node alone is slow.
        ended: Why the group ended early; empty if it did not.
    """

    me: str = "a"
    expected: int = 2
    missing: tuple[int, ...] = ()
    members: tuple[MemberFacts, ...] = (MemberFacts(name="a"), MemberFacts(name="b", rank=1))
    meetings: tuple[MeetingFacts, ...] = (MeetingFacts(first="a", second="b"),)
    together: AllFacts | None = None
    pair_share: float = 0.75
    alone_share: float = 0.80
    ended: str = ""


def collect(request: Request) -> GroupFacts:
    """A node alone has no group."""
    raise NotApplicableError("there is no group (--nnodes N --node-rank R --rdzv-endpoint HOST:PORT)")
