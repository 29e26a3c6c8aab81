"""Suspicions that fall on nodes: what casts one, who is told to look, and what is written down."""

from __future__ import annotations

import pytest

from aimaster.core.commands import CheckNode, Prepare, Reason
from aimaster.core.diagnosis import Blame, Failure, Finding, Retry, Rule
from aimaster.core.events import (
    HangKind,
    NodeChecked,
    NodeRecovered,
    NodeSuspected,
    RankSlow,
    Suspicion,
    WorkersHung,
)
from aimaster.core.sentences import sentence
from aimaster.core.suspicion import PAUSE_S, falls_on_node, worth_a_look
from aimaster.ids import NodeId
from tests.unit.aimaster.core.play import Play


@pytest.mark.parametrize(
    ("blame", "falls"),
    [
        (Blame.NODE, True),
        (Blame.DEVICE, True),
        (Blame.NETWORK, True),
        (Blame.STORAGE, True),
        (Blame.USER, False),
        (Blame.PLATFORM, False),
        (Blame.UNKNOWN, False),
    ],
)
def test_a_failure_falls_on_a_node_by_its_rule(blame: Blame, falls: bool) -> None:
    rule = Rule(name="r", cause="c", blame=blame, retry=Retry.AGAIN, do="d", source="s")
    assert falls_on_node(Finding(rule=rule, failure=Failure(kinds=frozenset()))) is falls


def test_a_failure_that_no_rule_knows_falls_on_nobody() -> None:
    assert not falls_on_node(None)


def test_while_workers_go_on_a_node_is_looked_at_now_and_then_only() -> None:
    for why in (Suspicion.SLOW, Suspicion.SILENCE):
        assert worth_a_look(why, since_last_s=None)
        assert not worth_a_look(why, since_last_s=PAUSE_S / 2)
        assert worth_a_look(why, since_last_s=PAUSE_S)
    for why in (Suspicion.FAILURE, Suspicion.HANG):
        assert worth_a_look(why, since_last_s=0.0)


def looks(play: Play) -> list[CheckNode]:
    return [one for _, decision, _ in play.seen for one in decision.commands if isinstance(one, CheckNode)]


def running() -> Play:
    play = Play((2, 2))
    play.run("a", "b")
    return play


def test_the_node_of_a_slow_rank_is_looked_at() -> None:
    play = running()
    generation = play.view().generation
    slow = RankSlow(
        generation=generation, node=NodeId("b"), ranks=(1,), awake=0.9, running=0.9, others_awake=0.5
    )
    play.tell(slow)
    assert looks(play) == [CheckNode(node=NodeId("b"), generation=generation, why=Suspicion.SLOW)]


def test_a_node_that_was_silent_is_looked_at_when_it_is_heard_again() -> None:
    play = running()
    play.tell(NodeSuspected(**play.about("a"), silent_s=4.0))
    assert looks(play) == []
    play.tell(NodeRecovered(**play.about("a"), silent_s=4.5))
    assert [(one.node, one.why) for one in looks(play)] == [("a", Suspicion.SILENCE)]


@pytest.mark.parametrize("culprits", [(1,), ()])
def test_the_culprit_of_a_hang_is_told_to_look_before_it_prepares(culprits: tuple[int, ...]) -> None:
    play = running()
    decision = play.tell(
        WorkersHung(
            generation=play.view().generation,
            kind=HangKind.STUCK,
            node=NodeId("b"),
            culprits=culprits,
            stalled_s=30.0,
            limit_s=20.0,
            step=5,
        )
    )
    order = [type(one) for one in decision.commands if getattr(one, "node", "") == "b"]
    assert order == ([CheckNode, Prepare] if culprits else [Prepare])


def test_what_was_found_is_written_down_and_changes_nothing() -> None:
    play = running()
    before = play.machine.digest()
    decision = play.tell(
        NodeChecked(**play.current("a"), why=Suspicion.SLOW, looked=9, findings=("host.disk: fail, full",))
    )
    assert (decision.reason, decision.commands) == (Reason.NODE_CHECKED, ())
    assert sentence(decision.reason, decision.facts) == (
        "node a was checked (slow): 9 checks looked; host.disk: fail, full"
    )
    assert play.machine.digest() == before
