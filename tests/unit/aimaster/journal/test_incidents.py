"""Incidents as they are told from a journal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from aimaster.core.commands import Reason
from aimaster.core.events import NodeChecked, Suspicion, Tier, TimerKind, WorkerExited
from aimaster.core.policy import Policy, Timeouts
from aimaster.ids import NodeId
from aimaster.journal.incidents import AlsoFailed, Incident, IncidentKind, incidents
from aimaster.journal.memory import MemoryJournal
from tests.unit.aimaster.core.play import Play
from tests.unit.aimaster.journal.stories import WALL_S, write


def told(play: Play) -> tuple[Incident, ...]:
    journal = MemoryJournal()
    write(journal, play)
    return incidents(journal.entries())


def test_a_job_without_trouble_has_none() -> None:
    play = Play((1, 1))
    play.run("a")
    play.stepped("a", 1)
    play.join("spare")
    play.died("spare")
    play.exited("a", code=0)
    assert told(play) == ()


def test_a_killed_worker() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.stepped("a", 1)
    play.committed("a", 40)
    follower = WorkerExited(**play.current("a"), local_rank=0, rank=0, exit_code=1, signal=None, step=41)
    play.exited("b", step=41)
    began = play.now
    play.tell(follower)
    play.restart()
    play.restored("a", 40, Tier.MEMORY)
    play.restored("b", 40, Tier.MEMORY)
    play.stepped("b", 41)
    over = play.now
    play.stepped("a", 41)
    (incident,) = told(play)
    assert (incident.id, incident.kind, incident.node, incident.rank) == (
        1,
        IncidentKind.WORKER_KILLED,
        "b",
        1,
    )
    assert (incident.signal, incident.exit_code, incident.last_step) == (9, None, 41)
    assert (incident.generation, incident.attempt) == (1, 1)
    assert (incident.resumed_step, incident.restored_from, incident.first_step) == (40, "memory", 41)
    assert incident.detected_at_s == pytest.approx(began)
    assert incident.detected_wall_s == pytest.approx(WALL_S + began)
    assert incident.recovered_s == pytest.approx(over - began)
    assert incident.identified_s == 0.0
    assert [(also.kind, also.node) for also in incident.also_failed] == [(IncidentKind.WORKER_FAILED, "a")]


def test_what_a_look_found_belongs_to_the_incident() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    looked = NodeChecked(**play.current("b"), why=Suspicion.SLOW, looked=5)
    play.tell(looked)
    play.exited("b")
    found = NodeChecked(
        **play.current("b"), why=Suspicion.FAILURE, looked=5, findings=("gpu.ecc: fail",), blocking=True
    )
    play.tell(found)
    play.tell(replace(found, findings=(), blocking=False))
    play.restart()
    (incident,) = told(play)
    assert [(one.node, one.blocking) for one in incident.checked] == [("b", False)]


def test_a_lost_node_is_the_cause_of_its_partners_failures() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.join("c")
    play.stepped("a", 1)
    play.exited("a", code=1, step=70, error="Connection reset by peer")
    began = play.now
    play.now += 4.0
    play.died("b")
    identified = play.now
    play.restart()
    play.restored("a", 69, Tier.MEMORY)
    play.restored("c", 69, Tier.PEER)
    play.stepped("c", 70)
    (incident,) = told(play)
    assert (incident.kind, incident.node, incident.rank) == (IncidentKind.NODE_LOST, "b", None)
    assert incident.also_failed == (
        AlsoFailed(
            kind=IncidentKind.WORKER_FAILED,
            node=NodeId("a"),
            exit_code=1,
            error="Connection reset by peer",
            rank=0,
            at_s=incident.detected_at_s,
        ),
    )
    assert incident.detected_at_s == pytest.approx(began)
    assert incident.identified_s == pytest.approx(identified - began)
    assert (incident.resumed_step, incident.restored_from) == (69, "peer")
    assert incident.last_step == 70
    assert incident.reason is Reason.NODE_LOST


def test_every_further_attempt_is_an_incident_and_the_first_step_closes_all() -> None:
    play = Play((1, 1))
    play.run("a")
    play.exited("a")
    play.restart()
    play.exited("a", code=3)
    play.restart()
    assert [incident.recovered_s for incident in told(play)] == [None, None]
    play.stepped("a", 1)
    first, second = told(play)
    assert (first.kind, second.kind) == (IncidentKind.WORKER_KILLED, IncidentKind.WORKER_FAILED)
    assert first.recovered_s is not None
    assert second.recovered_s is not None
    assert first.recovered_s > second.recovered_s


def test_the_incident_that_ends_a_job_says_why() -> None:
    play = Play((1, 1), max_restarts=0)
    play.run("a")
    play.exited("a", code=1, error="ValueError: no")
    (incident,) = told(play)
    assert (incident.ended_job, incident.reason, incident.error) == (
        True,
        Reason.BUDGET_SPENT,
        "ValueError: no",
    )
    assert incident.recovered_s is None


def test_the_other_kinds() -> None:
    play = Play((1, 2), policy=Policy(fruitless_attempts_max=9, timeouts=Timeouts(last_call_s=0.1)))
    play.run("a", "b")
    play.left("b")
    play.restart()
    play.join("a", life="2")
    play.restart()
    play.failed("a")
    play.restart()
    kinds = [incident.kind for incident in told(play)]
    assert kinds == [IncidentKind.NODE_LEFT, IncidentKind.NODE_RESTARTED, IncidentKind.NODE_FAILED]


def test_members_that_are_late_are_one_incident_with_a_node() -> None:
    play = Play((2, 2))
    play.join("a")
    play.join("b")
    play.prepared("a")
    play.timer(TimerKind.PREPARE)
    (incident,) = told(play)
    assert (incident.kind, incident.node, incident.reason) == (
        IncidentKind.NODE_FAILED,
        "b",
        Reason.PREPARE_TIMED_OUT,
    )
