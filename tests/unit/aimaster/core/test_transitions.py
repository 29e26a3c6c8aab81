"""The tables: every missing row is loud, no row is dead, and the page drawn from them is fresh."""

from __future__ import annotations

from enum import Enum
from itertools import product
from pathlib import Path

import pytest

from aimaster.core.state import JobPhase, NodeState
from aimaster.core.transitions import (
    JOB_MOVES,
    NODE_MOVES,
    IllegalEvent,
    JobTrigger,
    NodeTrigger,
    SuspicionTrigger,
    move_job,
    move_node,
    move_suspicion,
)
from aimaster.simulation.diagrams import page

PAGE = Path(__file__).parents[4] / "docs" / "explain" / "state-machines.md"


def test_every_pair_is_in_the_table_or_an_error_that_names_it() -> None:
    for phase, trigger in product(JobPhase, JobTrigger):
        if (phase, trigger) in JOB_MOVES:
            assert move_job(phase, trigger) is JOB_MOVES[phase, trigger]
        else:
            with pytest.raises(IllegalEvent, match=f"the job is {phase.value}, where '{trigger.value}'"):
                move_job(phase, trigger)
    for state, step in product(NodeState, NodeTrigger):
        if (state, step) in NODE_MOVES:
            assert move_node(state, step, node="n7") is NODE_MOVES[state, step]
        else:
            with pytest.raises(IllegalEvent, match=f"node n7 is {state.value}, where '{step.value}'"):
                move_node(state, step, node="n7")


def test_an_error_carries_what_it_is_about() -> None:
    with pytest.raises(IllegalEvent) as caught:
        move_node(NodeState.LOST, NodeTrigger.STARTED, node="n7")
    assert (caught.value.state, caught.value.trigger, caught.value.subject) == (
        NodeState.LOST,
        "started",
        "node n7",
    )


@pytest.mark.parametrize(
    ("moves", "start"), [(JOB_MOVES, JobPhase.UNDECLARED), (NODE_MOVES, NodeState.SPARE)]
)
def test_every_state_can_be_reached(moves: dict[tuple[Enum, Enum], Enum], start: Enum) -> None:
    reached = {start}
    while True:
        more = {target for (state, _), target in moves.items() if state in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(type(start))


def test_the_end_is_final() -> None:
    assert not [trigger for (phase, trigger) in JOB_MOVES if phase is JobPhase.ENDED]


def test_suspicion() -> None:
    for suspect in (False, True):
        assert move_suspicion(suspect, SuspicionTrigger.SILENT)
        assert not move_suspicion(suspect, SuspicionTrigger.HEARD)


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == page(), (
        "write it anew: python -m aimaster.simulation.diagrams > docs/explain/state-machines.md"
    )
