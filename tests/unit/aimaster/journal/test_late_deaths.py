"""A node whose death is sure only after its place was taken is still named as what went wrong."""

from __future__ import annotations

from aimaster.core.events import NodeSuspected, Tier
from aimaster.journal.incidents import Incident, IncidentKind, incidents
from aimaster.journal.memory import MemoryJournal
from tests.unit.aimaster.core.play import Play
from tests.unit.aimaster.journal.stories import write


def told(play: Play) -> tuple[Incident, ...]:
    journal = MemoryJournal()
    write(journal, play)
    return incidents(journal.entries())


def replaced_before_it_is_dead() -> Play:
    """`b` falls silent, `a`'s worker loses its partner, and the spare `c` takes the seat of the suspect."""
    play = Play((2, 2))
    play.run("a", "b")
    play.join("c")
    play.stepped("a", 1)
    play.tell(NodeSuspected(**play.about("b"), silent_s=2.0))
    play.exited("a", code=1, step=70, error="Connection closed by peer")
    assert play.view().members == ("a", "c")
    return play


def test_death_after_the_new_start() -> None:
    play = replaced_before_it_is_dead()
    play.restart()
    play.died("b")
    play.restored("c", 69, Tier.PEER)
    play.stepped("a", 70)
    (incident,) = told(play)
    assert (incident.kind, incident.node, incident.rank) == (IncidentKind.NODE_LOST, "b", None)
    assert incident.identified_s > 0
    assert (incident.resumed_step, incident.restored_from) == (69, "peer")
    assert incident.recovered_s is not None


def test_death_after_the_recovery() -> None:
    play = replaced_before_it_is_dead()
    play.restart()
    play.stepped("a", 70)
    play.died("b")
    (incident,) = told(play)
    assert (incident.kind, incident.node) == (IncidentKind.NODE_LOST, "b")


def test_death_of_a_spare_explains_nothing() -> None:
    play = Play((2, 2))
    play.run("a", "b")
    play.join("c")
    play.exited("a")
    play.restart()
    play.stepped("a", 2)
    play.died("c")
    (incident,) = told(play)
    assert (incident.kind, incident.node) == (IncidentKind.WORKER_KILLED, "a")
