"""Journals of small jobs, written as a master writes them."""

from __future__ import annotations

from aimaster.core.events import Event
from aimaster.core.machine import Machine
from aimaster.core.policy import Policy
from aimaster.ids import Incarnation
from aimaster.journal.base import Journal, Record
from tests.unit.aimaster.core.play import Play

WALL_S = 1_700_000_000.0


def records(play: Play) -> list[Record]:
    """What a master would have written about the job that was played."""
    machine = Machine(play.machine.policy)
    written = []
    for event, decision, at_s in play.seen:
        assert machine.step(event, at_s) == decision
        written.append(
            Record(event=event, decision=decision, digest=machine.digest(), at_s=at_s, wall_s=WALL_S + at_s)
        )
    return written


def write(journal: Journal, play: Play) -> None:
    """A whole life of a master."""
    journal.begin_life(Incarnation("m1"), policy=play.machine.policy, at_s=0.0, wall_s=WALL_S)
    for record in records(play):
        journal.append([record])


def a_job() -> Play:
    """Two nodes and a spare, a killed worker, a lost node, and the end."""
    play = Play((2, 2), policy=Policy(fruitless_attempts_max=5))
    play.run("a", "b")
    play.join("c")
    play.stepped("a", 1)
    play.committed("a", 7)
    play.exited("b", step=8)
    play.restart()
    play.stepped("a", 8)
    play.died("b")
    play.restart()
    for node in play.view().members:
        play.exited(node, code=0)
    for node in "ac":
        play.left(node)
    return play


def events(play: Play) -> list[Event]:
    return [event for event, _, _ in play.seen]
