"""What is known of a fleet: outcomes of nodes alone and of pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from sanitycheck.errors import UsageError

__all__ = ["Culprit", "Evidence", "Limits", "PairOutcome", "Verdicts", "Why"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PairOutcome:
    """One test of two nodes; ``score`` is larger for better, None where the pair failed or hung."""

    first: str
    second: str
    score: float | None

    def other(self, node: str) -> str:
        """The partner of one of the two."""
        return self.second if node == self.first else self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What counts as bad, and how far to search.

    Attributes:
        alone_share: A node alone below this share of the fleet's median is slow …
        alone_sigmas: … if it is also this many robust standard deviations below it.
        pair_share: A pair below this share of the median of pairs is bad.
        common_share: More than this share of bad nodes is no longer bad luck but a common cause.
        rounds_max: Rounds of pairs after which the search ends with what it has.
    """

    alone_share: float = 0.80
    alone_sigmas: float = 3.5
    pair_share: float = 0.75
    common_share: float = 0.50
    rounds_max: int = 24

    def __post_init__(self) -> None:
        for name in ("alone_share", "pair_share", "common_share"):
            if not 0 < getattr(self, name) < 1:
                raise UsageError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if self.rounds_max < 2:
            raise UsageError(f"at least two rounds of pairs are needed, got {self.rounds_max}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that was seen.

    Attributes:
        nodes: All nodes that take part, in a fixed order.
        alone: Score of each node alone; None: it failed. A node that is not in it was not tested alone.
        rounds: Outcomes of each round of pairs, oldest first.
        expected_pair: Score that a good pair is known to reach, so that a fleet that is slow as a whole
            shows; None: only nodes are compared with each other.
    """

    nodes: tuple[str, ...]
    alone: Mapping[str, float | None] = field(default_factory=dict)
    rounds: tuple[tuple[PairOutcome, ...], ...] = ()
    expected_pair: float | None = None

    def __post_init__(self) -> None:
        if len(set(self.nodes)) != len(self.nodes):
            raise UsageError("a node stands twice among the nodes")
        known = set(self.nodes)
        for outcome in (one for part in self.rounds for one in part):
            if outcome.first == outcome.second or not {outcome.first, outcome.second} <= known:
                raise UsageError(f"{outcome.first} with {outcome.second} is no pair of these nodes")

    def with_round(self, outcomes: tuple[PairOutcome, ...]) -> Evidence:
        """This evidence and one more round."""
        return Evidence(
            nodes=self.nodes,
            alone=self.alone,
            rounds=(*self.rounds, outcomes),
            expected_pair=self.expected_pair,
        )


class Why(str, Enum):
    """Why something is called bad."""

    FAILED_ALONE = "failed_alone"
    SLOW_ALONE = "slow_alone"
    BAD_WITH_SEVERAL = "bad_with_several"
    LINK_BAD_AGAIN = "link_bad_again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """A bad node (``second`` empty) or link, and the numbers behind it.

    Attributes:
        score: Its own score alone, or the best of its bad pairs; None where nothing came back.
        typical: The fleet's median of the same kind.
        witnesses: Partners that passed everything else and agree; for a link empty.
    """

    first: str
    second: str = ""
    why: Why
    score: float | None = None
    typical: float | None = None
    witnesses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """What the evidence proves.

    Attributes:
        nodes: Bad nodes.
        links: Bad links between nodes that are good with others.
        watch: Nodes with a bad test that nothing explains: neither bad nor clear (a fault that comes and
            goes, a test disturbed by noise).
        untested: Nodes that met no partner, so that nothing is known of them.
        common_cause: Most looked bad, so that nobody is called bad.
        rounds: Rounds of pairs that were run.
    """

    nodes: tuple[Culprit, ...] = ()
    links: tuple[Culprit, ...] = ()
    watch: tuple[str, ...] = ()
    untested: tuple[str, ...] = ()
    common_cause: bool = False
    rounds: int = 0
