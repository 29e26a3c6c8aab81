"""What fails on many nodes in the same way is held against none of them."""

from __future__ import annotations

from aimaster.core.commands import Decision, Reason
from aimaster.core.events import NodeFailed
from aimaster.core.machine import Machine
from aimaster.core.policy import Budget, Policy
from aimaster.core.sentences import sentence
from aimaster.core.state import NodeState
from aimaster.ids import NodeId
from tests.unit.aimaster.core.play import Play, told_to_end, told_to_prepare

SHARED = "no saver on port 4711 of {node}: /shared is read-only"


def _state(play: Play, node: str) -> NodeState:
    seen = play.view().node(NodeId(node))
    assert seen is not None
    return seen.state


def _strikes(play: Play) -> dict[str, int]:
    return {str(node.node): node.strikes for node in play.view().nodes}


def _fail(play: Play, node: str) -> Decision:
    return play.failed(node, SHARED.format(node=node).replace("4711", str(4000 + ord(node[-1]))))


def _job(nodes: str = "abcd", **policy: int | float) -> Play:
    play = Play((2, len(nodes)), policy=Policy(**policy))  # type: ignore[arg-type]
    play.run(*nodes)
    play.exited(nodes[0])
    return play


def test_a_fault_of_all_nodes_sets_nobody_aside_and_ends_by_the_budget() -> None:
    play = _job(node_strikes_max=1, common_cause_nodes_min=2)
    decision = _fail(play, "a")
    assert _state(play, "a") is NodeState.ASIDE  # nobody else has said the same yet
    for turn in range(40):
        if play.view().exit_code is not None:
            break
        decision = _fail(play, "bcd"[turn % 3])
        assert _state(play, "bcd"[turn % 3]) is not NodeState.ASIDE
    # 22 would say that the machines are broken; 21 says that the job tried often enough.
    assert (decision.reason, play.view().exit_code) == (Reason.BUDGET_SPENT, 21)
    assert "held against none of them); the restart budget is spent" in play.view().sentence


def test_who_was_set_aside_before_the_others_said_the_same_is_asked_again() -> None:
    play = _job(node_strikes_max=1)
    _fail(play, "a")
    _fail(play, "b")
    assert (_state(play, "a"), _state(play, "b")) == (NodeState.ASIDE, NodeState.ASIDE)
    decision = _fail(play, "c")
    assert decision.facts["same_fault"] == 3
    assert "the same on 3 nodes" in sentence(decision.reason, decision.facts)
    assert set(told_to_prepare(decision)) == {"a", "b", "c", "d"}
    assert set(_strikes(play).values()) == {0}
    assert play.view().members == ("a", "b", "c", "d")


def test_one_node_that_fails_again_and_again_is_set_aside_as_before() -> None:
    play = _job()
    _fail(play, "a")
    decision = _fail(play, "a")
    assert _state(play, "a") is NodeState.ASIDE
    assert "same_fault" not in decision.facts


def test_different_faults_are_no_common_cause() -> None:
    play = _job(node_strikes_max=1)
    for node, what in (("a", "no port"), ("b", "no saver"), ("c", "a worker does not end")):
        assert "same_fault" not in play.failed(node, what).facts
        assert _state(play, node) is NodeState.ASIDE


def test_the_same_fault_long_ago_is_no_common_cause() -> None:
    play = _job(node_strikes_max=1, common_cause_window_s=60.0)
    for node in "abc":
        assert "same_fault" not in _fail(play, node).facts
        play.now += 61.0


def test_reports_that_come_too_late_for_their_generation_change_nothing() -> None:
    play = _job(node_strikes_max=1)
    told = {node: play.current(node) for node in "bc"}
    _fail(play, "a")
    before = play.machine.digest()
    for node in "bc":
        assert play.tell(NodeFailed(**told[node], what=SHARED.format(node=node))).reason is Reason.STALE
    assert play.machine.digest() == before


def test_after_the_end_of_the_job_nobody_is_asked_to_prepare() -> None:
    play = Play(
        (2, 3), policy=Policy(common_cause_nodes_min=2, node_failures=Budget(limit=1), node_strikes_max=1)
    )
    play.run("a", "b", "c")
    play.exited("a")
    _fail(play, "a")
    decision = _fail(play, "b")
    assert told_to_end(decision) == {"a": 0, "b": 21, "c": 21}  # a had no part in the end
    assert told_to_prepare(decision) == []


def test_a_replay_comes_to_the_same_state() -> None:
    play = _job(node_strikes_max=1)
    for node in "abc":
        _fail(play, node)
    again = Machine(play.machine.policy)
    for event, decision, at_s in play.seen:
        assert again.step(event, at_s) == decision
    assert again.digest() == play.machine.digest() == again.state.digest_from_scratch()
