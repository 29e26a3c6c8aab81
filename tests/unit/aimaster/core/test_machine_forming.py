"""From the first agent to running workers, with every way in which nodes may come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aimaster.core.commands import Prepare, Reason, SetTimer, StartWorkers
from aimaster.core.events import AgentPhase, JobDeclared, NodeJoined, NodePrepared, TimerKind
from aimaster.core.state import JobPhase, NodeState, WaitingFor
from aimaster.core.transitions import IllegalEvent
from aimaster.ids import Generation, Incarnation, JobId, NodeId
from tests.unit.aimaster.core.play import Play, of, told_to_prepare, told_to_start


def test_forms_when_all_are_there_and_starts_when_all_are_prepared() -> None:
    play = Play((2, 2))
    assert play.join("a", workers=2).reason is Reason.WAITING_FOR_NODES
    assert told_to_prepare(play.join("b", workers=3)) == ["a", "b"]
    assert play.prepared("b").commands == ()
    started = told_to_start(play.prepared("a"))
    assert started["a"] == StartWorkers(
        node=NodeId("a"),
        generation=Generation(1),
        attempt=0,
        node_rank=0,
        nodes=2,
        first_rank=0,
        world_size=5,
        master_addr="a.net",
        master_port=1000 + ord("a"),
        saver_lead="a.net:7",
        progress_expected=False,
    )
    assert started["b"] == replace(started["a"], node=NodeId("b"), node_rank=1, first_rank=2)
    assert play.started("a").reason is Reason.NODE_STARTED
    assert play.started("b").reason is Reason.WORKERS_RUNNING
    assert play.view().phase is JobPhase.RUNNING


def test_more_agents_than_the_maximum_are_spares_and_disturb_nothing() -> None:
    play = Play((1, 2))
    play.join("a")
    play.join("b")
    for name in "cdefg":
        decision = play.join(name)
        assert decision.reason is Reason.NODE_IS_SPARE
        assert decision.commands == ()
    play.restart()
    assert play.view().members == ("a", "b")
    assert play.left("g").commands == ()
    assert play.died("f").commands == ()
    assert play.view().phase is JobPhase.RUNNING


def test_between_minimum_and_maximum_a_last_call_is_waited_for() -> None:
    play = Play((2, 4))
    play.join("a")
    decision = play.join("b")
    assert of(decision, Prepare) == []
    assert [c.timer for c in of(decision, SetTimer)] == [TimerKind.LAST_CALL]
    assert play.view().waiting_for is WaitingFor.LAST_CALL
    play.join("c")
    assert told_to_prepare(play.timer(TimerKind.LAST_CALL)) == ["a", "b", "c"]


def test_a_node_that_leaves_during_the_last_call_ends_it() -> None:
    play = Play((2, 3))
    play.join("a")
    play.join("b")
    play.left("b")
    assert play.view().waiting_for is WaitingFor.NODES
    assert TimerKind.LAST_CALL not in dict(play.view().timers)
    assert TimerKind.REPLACEMENT in dict(play.view().timers)


def test_the_job_ends_with_22_if_too_few_nodes_ever_come() -> None:
    play = Play((2, 2))
    play.join("a")
    decision = play.timer(TimerKind.REPLACEMENT)
    assert decision.reason is Reason.NO_HEALTHY_NODES
    assert play.view().exit_code == 22


def test_static_node_ranks_are_honoured() -> None:
    play = Play((3, 3))
    play.join("a", wanted_node_rank=2)
    play.join("b", wanted_node_rank=0)
    play.join("c", wanted_node_rank=1)
    assert play.view().members == ("b", "c", "a")


def test_a_reconnect_sends_again_what_was_missed_and_nothing_else() -> None:
    play = Play((1, 1))
    assert told_to_prepare(play.join("a")) == ["a"]
    again = play.join("a")
    assert again.reason is Reason.RESENT
    assert told_to_prepare(again) == ["a"]
    first = told_to_start(play.prepared("a"))
    assert told_to_start(play.join("a", phase=AgentPhase.PREPARED)) == first
    play.started("a")
    assert play.join("a", phase=AgentPhase.RUNNING).commands == ()
    assert play.view().phase is JobPhase.RUNNING


def test_an_agent_that_starts_anew_breaks_its_generation_at_once() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    decision = play.join("b", life="2")
    assert decision.reason is Reason.NODE_RESTARTED
    assert told_to_prepare(decision) == ["a", "b"]
    assert play.view().generation == 2


def test_what_an_earlier_life_said_changes_nothing() -> None:
    play = Play((2, 2))
    play.join("a", life="old")
    play.join("a", life="new")
    play.join("b")
    before = play.machine.digest()
    for event in (
        NodePrepared(
            node=NodeId("a"), incarnation=Incarnation("old"), generation=Generation(1), rendezvous_port=1
        ),
        NodeJoined(node=NodeId("a"), incarnation=Incarnation("old"), address="x", workers=7),
    ):
        assert play.tell(event).reason is Reason.STALE
        assert play.machine.digest() == before


def test_a_job_cannot_be_declared_twice_differently() -> None:
    play = Play((2, 2))
    same = JobDeclared(job=JobId("j"), min_nodes=2, max_nodes=2, max_restarts=None)
    assert play.tell(same).reason is Reason.NOTHING_TO_DO
    with pytest.raises(IllegalEvent, match=r"the job is waiting.*JobDeclared"):
        play.tell(replace(same, max_nodes=3))


def test_nothing_can_be_said_before_the_job_is_declared() -> None:
    machine = Play().machine.__class__()
    with pytest.raises(IllegalEvent, match="the job is undeclared"):
        machine.step(NodeJoined(node=NodeId("a"), incarnation=Incarnation("1"), address="a", workers=1), 0.0)


def test_what_cannot_be_true_is_an_error_that_names_state_event_and_node_and_changes_nothing() -> None:
    play = Play((2, 2))
    play.join("a")
    before = play.machine.digest()
    with pytest.raises(IllegalEvent, match=r"node zz.*it never joined"):
        play.tell(
            NodePrepared(
                node=NodeId("zz"), incarnation=Incarnation("1"), generation=Generation(0), rendezvous_port=1
            )
        )
    with pytest.raises(IllegalEvent, match=r"node a is spare.*generation 5 is not yet"):
        play.tell(NodePrepared(**play.about("a"), generation=Generation(5), rendezvous_port=1))
    with pytest.raises(IllegalEvent, match="node a is spare, where 'started' is not possible"):
        play.started("a")
    with pytest.raises(IllegalEvent, match="workers, 1 before"):
        play.join("a", workers=4)
    play.join("b")
    play.restart()
    running = play.machine.digest()
    with pytest.raises(IllegalEvent, match="rank 7"):
        play.exited("a", code=1, rank=7)
    assert before != running == play.machine.state.digest_from_scratch() == play.machine.digest()


def test_a_master_without_a_journal_does_not_go_below_what_agents_have_seen() -> None:
    play = Play((2, 2))
    play.join("a", phase=AgentPhase.RUNNING, generation=Generation(7))
    decision = play.join("b")
    assert {c.generation for c in of(decision, Prepare)} == {8}


def test_a_spare_with_old_workers_is_told_to_stop_them() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.join("c")
    play.died("b")
    play.restart()
    decision = play.join("b", phase=AgentPhase.RUNNING, generation=Generation(1))
    assert told_to_prepare(decision) == ["b"]
    assert play.prepared("b").reason is Reason.NODE_PREPARED
    seen = play.view().node(NodeId("b"))
    assert seen is not None
    assert seen.state is NodeState.SPARE
    assert play.view().phase is JobPhase.RUNNING
