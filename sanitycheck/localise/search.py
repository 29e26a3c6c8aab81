"""Which pairs to test next, and what the evidence proves. Pure; see the package for the idea."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sanitycheck.localise.evidence import Culprit, Evidence, Limits, PairOutcome, Verdicts, Why

__all__ = ["conclude", "plan", "tournament_round"]

Pair = tuple[str, str]
TOURNAMENT_ROUNDS = 2
SMALL_FLEET = 6
"""Up to so many nodes everybody meets everybody: that takes no more rounds than the search, and a fleet of
four has too few witnesses for it."""
WITNESSES = 2
"""Partners that must agree before a node is called bad."""
WITNESSES_AGAINST = 3
"""So many make a node bad whatever others say: a fault may come and go, noise does not hit one so often."""
WITNESSES_FOR = 3
"""So many with which it was good clear a suspect …"""
WITNESSES_FOR_EACH = 2
"""… and so many more for each with which it was bad: nine tests at most."""
GOLDEN = 0.6180339887
"""Share of the fleet by which each round's witnesses lie behind those of the last: far from all earlier ones,
so that no rack judges a suspect twice."""
LINK_TESTS = 2
MAD_TO_SIGMA = 1.4826


def tournament_round(nodes: Sequence[str], number: int) -> tuple[Pair, ...]:
    """Round ``number`` of a round-robin tournament by the circle method: disjoint pairs, nobody meets twice.

    With an odd number of nodes one of them pauses, another one in each round.
    """
    seats: list[str | None] = list(nodes)
    if len(seats) % 2:
        seats.append(None)
    if len(seats) < 2:
        return ()
    turning = seats[1:]
    shift = number % len(turning)
    table = [seats[0], *turning[shift:], *turning[:shift]]
    half = len(table) // 2
    pairs = zip(table[:half], reversed(table[half:]), strict=True)
    return tuple((a, b) for a, b in pairs if a is not None and b is not None)


@dataclass(frozen=True, slots=True)
class _Reading:
    """The evidence, read once.

    Attributes:
        passed: Nodes that were good with everybody in the tournament: the witnesses.
        suspects: Nodes that were bad with somebody in it and are not bad alone, in order.
        bad_with: Witnesses with whom a suspect was bad.
        good_with: Witnesses with whom it was good.
        tests: (times bad, times tested) of a pair.
    """

    alone_bad: Mapping[str, Why]
    alone_typical: float | None
    pair_typical: float | None
    passed: tuple[str, ...]
    suspects: tuple[str, ...]
    bad_with: Mapping[str, tuple[PairOutcome, ...]]
    good_with: Mapping[str, tuple[PairOutcome, ...]]
    met: Mapping[str, frozenset[str]]
    small: bool
    bad_first: tuple[PairOutcome, ...]
    tests: Mapping[frozenset[str], tuple[int, int]]
    common: bool

    def is_bad(self, node: str) -> bool:
        """Whether two witnesses agree and are the majority, or three agree."""
        bad, good = len(self.bad_with.get(node, ())), len(self.good_with.get(node, ()))
        return bad >= WITNESSES_AGAINST or bad >= WITNESSES > good

    def is_open(self, node: str) -> bool:
        """Whether another witness could still decide."""
        bad, good = len(self.bad_with.get(node, ())), len(self.good_with.get(node, ()))
        if self.small or self.is_bad(node):
            return False
        return good < WITNESSES_FOR + WITNESSES_FOR_EACH * bad


def _alone(evidence: Evidence, limits: Limits) -> tuple[dict[str, Why], float | None]:
    scores = [score for score in evidence.alone.values() if score is not None]
    bad = {node: Why.FAILED_ALONE for node, score in evidence.alone.items() if score is None}
    if not scores:
        return bad, None
    typical = statistics.median(scores)
    sigma = MAD_TO_SIGMA * statistics.median([abs(score - typical) for score in scores])
    floor = min(limits.alone_share * typical, typical - limits.alone_sigmas * sigma)
    for node, score in evidence.alone.items():
        if score is not None and score < floor:
            bad[node] = Why.SLOW_ALONE
    return bad, typical


def _floor(evidence: Evidence, limits: Limits) -> tuple[float, float | None]:
    """(score below which a pair is bad, median of all pairs)."""
    scores = [one.score for part in evidence.rounds for one in part if one.score is not None]
    typical = statistics.median(scores) if scores else None
    reference = evidence.expected_pair if evidence.expected_pair is not None else typical
    return (limits.pair_share * reference if reference is not None else 0.0), typical


def _opening(count: int) -> int:
    """Rounds of the tournament that the search begins with."""
    return max(1, count - 1 + count % 2) if count <= SMALL_FLEET else TOURNAMENT_ROUNDS


def _read(evidence: Evidence, limits: Limits) -> _Reading:
    alone_bad, alone_typical = _alone(evidence, limits)
    floor, typical = _floor(evidence, limits)

    def wrong(outcome: PairOutcome) -> bool:
        return outcome.score is None or outcome.score < floor

    count = len(evidence.nodes) - len(alone_bad)
    small, opening = count <= SMALL_FLEET, _opening(count)
    first = [one for part in evidence.rounds[:opening] for one in part]
    met_first = {node for one in first for node in (one.first, one.second)}
    bad_first = tuple(one for one in first if wrong(one))
    touched = {node for one in bad_first for node in (one.first, one.second)}
    if small:  # good with anybody: everybody met everybody, so that a bad one shows by its majority
        well = {node for one in first if not wrong(one) for node in (one.first, one.second)}
    else:
        well = met_first - touched
    passed = tuple(n for n in evidence.nodes if n in well and n not in alone_bad)
    suspects = tuple(n for n in evidence.nodes if n in touched and n not in alone_bad)
    witnesses = frozenset(passed)
    bad_with: dict[str, list[PairOutcome]] = {}
    good_with: dict[str, list[PairOutcome]] = {}
    heard = evidence.rounds[:opening] if small else evidence.rounds[opening:]
    for one in (one for part in heard for one in part):
        for node in (one.first, one.second):
            if one.other(node) in witnesses and (small or node not in witnesses):
                (bad_with if wrong(one) else good_with).setdefault(node, []).append(one)
    met: dict[str, set[str]] = {}
    tests: dict[frozenset[str], tuple[int, int]] = {}
    for one in (one for part in evidence.rounds for one in part):
        met.setdefault(one.first, set()).add(one.second)
        met.setdefault(one.second, set()).add(one.first)
        bad, times = tests.get(frozenset((one.first, one.second)), (0, 0))
        tests[frozenset((one.first, one.second))] = (bad + wrong(one), times + 1)
    # Not before the tournament is over: after one round, many are beside a bad one.
    nobody = len(evidence.rounds) >= opening and bool(first) and not passed
    return _Reading(
        alone_bad=alone_bad,
        alone_typical=alone_typical,
        pair_typical=typical,
        passed=passed,
        suspects=suspects,
        bad_with={node: tuple(ones) for node, ones in bad_with.items()},
        good_with={node: tuple(ones) for node, ones in good_with.items()},
        met={node: frozenset(others) for node, others in met.items()},
        small=small,
        bad_first=bad_first,
        tests=tests,
        common=nobody or len(alone_bad) > limits.common_share * len(evidence.nodes),
    )


def plan(evidence: Evidence, *, limits: Limits | None = None) -> tuple[Pair, ...]:
    """The pairs of the next round, disjoint; empty when the search is over.

    Args:
        evidence: Nodes alone first, then the rounds that earlier calls asked for.
        limits: What counts as bad.
    """
    limits = limits or Limits()
    done = len(evidence.rounds)
    reading = _read(evidence, limits)
    if done >= limits.rounds_max or reading.common:
        return ()
    playing = [node for node in evidence.nodes if node not in reading.alone_bad]
    if done < _opening(len(playing)):
        return tournament_round(playing, done)
    return _with_witnesses(reading, done) or _links_again(reading)


def _with_witnesses(reading: _Reading, done: int) -> tuple[Pair, ...]:
    """Suspects whose case is open, each with a witness that it has not met."""
    free = reading.passed
    taken: set[str] = set()
    pairs: list[Pair] = []
    begin = int(done * GOLDEN * len(free))
    for place, suspect in enumerate(node for node in reading.suspects if reading.is_open(node)):
        if len(taken) == len(free):
            break
        for step in range(len(free)):
            witness = free[(begin + place + step) % len(free)]
            if witness not in taken and witness not in reading.met[suspect]:
                taken.add(witness)
                pairs.append((suspect, witness))
                break
    return tuple(pairs)


def _unexplained(reading: _Reading) -> list[Pair]:
    """Pairs that were bad in the tournament although neither node is bad."""
    bad = {node for node in reading.suspects if reading.is_bad(node)} | set(reading.alone_bad)
    return [(one.first, one.second) for one in reading.bad_first if not {one.first, one.second} & bad]


def _links_again(reading: _Reading) -> tuple[Pair, ...]:
    """Pairs that nothing explains, once more."""
    taken: set[str] = set()
    pairs: list[Pair] = []
    for pair in _unexplained(reading):
        if reading.tests[frozenset(pair)][1] < LINK_TESTS and not set(pair) & taken:
            taken |= set(pair)
            pairs.append(pair)
    return tuple(pairs)


def conclude(evidence: Evidence, *, limits: Limits | None = None) -> Verdicts:
    """What the evidence proves; may be asked at any time."""
    limits = limits or Limits()
    reading = _read(evidence, limits)
    rounds = len(evidence.rounds)
    untested = tuple(n for n in evidence.nodes if n not in reading.met and n not in reading.alone_bad)
    bad = [
        Culprit(first=node, why=why, score=evidence.alone.get(node), typical=reading.alone_typical)
        for node, why in reading.alone_bad.items()
    ]
    bad += [_bad_with_several(reading, node) for node in reading.suspects if reading.is_bad(node)]
    if reading.common or len(bad) > limits.common_share * len(evidence.nodes):
        return Verdicts(common_cause=True, untested=untested, rounds=rounds)
    links = [pair for pair in _unexplained(reading) if reading.tests[frozenset(pair)] == (2, LINK_TESTS)]
    linked = {node for pair in links for node in pair}
    doubtful = {node for node in reading.suspects if reading.bad_with.get(node) and not reading.is_bad(node)}
    unsettled = {node for node in reading.suspects if reading.is_open(node)}
    return Verdicts(
        nodes=tuple(bad),
        links=tuple(
            Culprit(first=first, second=second, why=Why.LINK_BAD_AGAIN, typical=reading.pair_typical)
            for first, second in links
        ),
        watch=tuple(n for n in evidence.nodes if n in (doubtful | unsettled) - linked),
        untested=untested,
        rounds=rounds,
    )


def _bad_with_several(reading: _Reading, node: str) -> Culprit:
    outcomes = reading.bad_with[node]
    scores = [outcome.score for outcome in outcomes if outcome.score is not None]
    return Culprit(
        first=node,
        why=Why.BAD_WITH_SEVERAL,
        score=max(scores) if scores else None,
        typical=reading.pair_typical,
        witnesses=tuple(outcome.other(node) for outcome in outcomes),
    )
