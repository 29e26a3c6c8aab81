"""The search for faulty nodes against simulated fleets: what it must find, what it must never call bad."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sanitycheck.errors import UsageError
from sanitycheck.localise.evidence import Evidence, Limits, PairOutcome, Verdicts, Why
from sanitycheck.localise.search import conclude, plan, tournament_round
from sanitycheck.localise.world import Fault, World, make_world


def searched(world: World, *, limits: Limits | None = None, expected_pair: float | None = None) -> Verdicts:
    start = world.start()
    evidence = Evidence(nodes=start.nodes, alone=start.alone, expected_pair=expected_pair)
    while pairs := plan(evidence, limits=limits):
        names = [node for pair in pairs for node in pair]
        assert len(names) == len(set(names)), "a node stands in two pairs of one round"
        evidence = evidence.with_round(world.round(pairs))
    return conclude(evidence, limits=limits)


def fleet(
    *names: str, faults: dict[str, Fault] | None = None, links: tuple[tuple[str, str], ...] = ()
) -> World:
    return World(
        nodes=names,
        faults=faults or {},
        links=frozenset(frozenset(link) for link in links),
        rng=random.Random(1),
    )


FOUR = ("a", "b", "c", "d")
MANY = tuple(f"n{i:02d}" for i in range(20))


@given(count=st.integers(2, 41))
def test_a_tournament_pairs_everybody_once_and_nobody_twice(count: int) -> None:
    nodes = [str(i) for i in range(count)]
    met: set[frozenset[str]] = set()
    for number in range(count - 1 + count % 2):
        pairs = tournament_round(nodes, number)
        names = [node for pair in pairs for node in pair]
        assert len(names) == len(set(names)) == count - count % 2
        assert not met & {frozenset(pair) for pair in pairs}
        met |= {frozenset(pair) for pair in pairs}
    assert len(met) == count * (count - 1) // 2


@pytest.mark.parametrize("nodes", [FOUR, MANY])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_one_bad_node_is_named_and_nobody_else(nodes: tuple[str, ...], share: float) -> None:
    verdicts = searched(fleet(*nodes, faults={nodes[1]: Fault(share=share)}))
    assert [(one.first, one.why) for one in verdicts.nodes] == [(nodes[1], Why.BAD_WITH_SEVERAL)]
    assert len(verdicts.nodes[0].witnesses) >= 2
    assert (verdicts.links, verdicts.watch, verdicts.common_cause) == ((), (), False)


@pytest.mark.parametrize("nodes", [FOUR, MANY])
def test_a_cut_pair_is_a_link_and_no_node(nodes: tuple[str, ...]) -> None:
    pair = tournament_round(nodes, 0)[0]
    verdicts = searched(fleet(*nodes, links=(pair,)))
    assert verdicts.nodes == ()
    assert [{one.first, one.second} for one in verdicts.links] == [set(pair)]


@pytest.mark.parametrize("nodes", [FOUR, MANY])
def test_a_node_that_is_slow_alone_leaves_before_the_pairs(nodes: tuple[str, ...]) -> None:
    verdicts = searched(fleet(*nodes, faults={nodes[2]: Fault(share=0.3, alone_share=0.4)}))
    assert [(one.first, one.why) for one in verdicts.nodes] == [(nodes[2], Why.SLOW_ALONE)]


@pytest.mark.parametrize("nodes", [FOUR, MANY])
def test_when_nobody_passes_nobody_is_called_bad(nodes: tuple[str, ...]) -> None:
    verdicts = searched(fleet(*nodes, faults={node: Fault(share=0.0) for node in nodes}))
    assert verdicts.common_cause
    assert (verdicts.nodes, verdicts.links) == ((), ())


def test_a_fleet_that_is_slow_as_a_whole_is_a_common_cause_where_the_speed_is_known() -> None:
    world = fleet(*MANY)
    world.speed = 0.5
    assert not searched(world).common_cause
    assert searched(world, expected_pair=1.0).common_cause


def test_two_bad_nodes_of_four_are_told_from_the_good_ones() -> None:
    verdicts = searched(fleet(*FOUR, faults={"a": Fault(share=0.0), "d": Fault(share=0.0)}))
    assert {one.first for one in verdicts.nodes} == {"a", "d"}


def test_two_nodes_cannot_say_which_of_them_it_is() -> None:
    verdicts = searched(fleet("a", "b", faults={"a": Fault(share=0.0)}))
    assert verdicts.nodes == ()
    assert verdicts.common_cause


def test_one_node_needs_no_partner() -> None:
    assert searched(fleet("a")) == Verdicts(untested=("a",))


def test_evidence_of_strange_nodes_is_refused() -> None:
    stranger = PairOutcome(first="a", second="x", score=1.0)
    with pytest.raises(UsageError, match="no pair of these nodes"):
        Evidence(nodes=("a", "b"), rounds=((stranger,),))
    with pytest.raises(UsageError, match="twice"):
        Evidence(nodes=("a", "a"))
    with pytest.raises(UsageError, match="between 0 and 1"):
        Limits(pair_share=2.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rack", [0, 16])
@pytest.mark.parametrize("faulty_share", [0.0, 0.005, 0.02, 0.05])
def test_faults_that_stay_are_all_found_and_no_good_node_is_called_bad(
    seed: int, rack: int, faulty_share: float
) -> None:
    world = make_world(500, seed=seed, faulty_share=faulty_share, rack=rack)
    verdicts = searched(world)
    assert {one.first for one in verdicts.nodes} == set(world.faults)
    assert verdicts.rounds <= 12


def test_the_rounds_do_not_grow_with_the_fleet() -> None:
    rounds = [searched(make_world(count, seed=7, faulty_share=0.02)).rounds for count in (200, 2000)]
    assert rounds[1] <= rounds[0] + 3


def test_faults_that_come_and_go_cost_recall_but_no_good_node() -> None:
    """A quarter of them never shows in the two rounds of the tournament, so that 3/4 is the most there is."""
    found = faulty = 0
    for seed in range(6):
        world = make_world(500, seed=seed, faulty_share=0.04, intermittent=1.0)
        bad = {one.first for one in searched(world).nodes}
        assert bad <= set(world.faults)
        found += len(bad)
        faulty += len(world.faults)
    assert found / faulty > 0.55


def test_a_fault_that_shows_in_every_third_test_is_called_bad() -> None:
    """Never the majority of its witnesses, and yet no noise."""
    names = tuple(f"n{i:02d}" for i in range(40))
    evidence = Evidence(nodes=names)
    seen = 0
    while pairs := plan(evidence):
        outcomes = []
        for first, second in pairs:
            shows = "n07" in (first, second) and seen % 3 == 0
            seen += "n07" in (first, second)
            outcomes.append(PairOutcome(first=first, second=second, score=0.4 if shows else 1.0))
        evidence = evidence.with_round(tuple(outcomes))
    (culprit,) = conclude(evidence).nodes
    assert (culprit.first, len(set(culprit.witnesses))) == ("n07", 3)


@given(seed=st.integers(0, 10_000), count=st.integers(1, 30), faulty=st.integers(0, 30))
def test_every_search_ends_and_names_only_nodes_of_the_fleet(seed: int, count: int, faulty: int) -> None:
    world = make_world(count, seed=seed, faulty_share=min(1.0, faulty / count), intermittent=0.3)
    verdicts = searched(world)
    named = {one.first for one in verdicts.nodes} | set(verdicts.watch) | set(verdicts.untested)
    assert named <= set(world.nodes)
    assert verdicts.rounds <= Limits().rounds_max
