"""All orders of a few events on three nodes: no order may break a promise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations, product

from aimaster.core.commands import Reason
from aimaster.core.events import NodeJoined, NodePrepared, WorkerExited, WorkersStarted
from aimaster.core.state import JobPhase
from aimaster.core.transitions import IllegalEvent
from aimaster.ids import Generation, Incarnation, NodeId
from tests.unit.aimaster.core.play import Play

Step = Callable[[Play], object]


def told(event_of: Callable[[Play], object]) -> Step:
    """A step that may be refused; a refusal must change nothing."""

    def step(play: Play) -> None:
        before = play.machine.digest()
        try:
            event_of(play)
        except IllegalEvent:
            assert play.machine.state.digest_from_scratch() == before

    return step


def exit_of(node: str, rank: int, code: int | None) -> Step:
    def say(play: Play) -> None:
        play.tell(
            WorkerExited(
                node=NodeId(node),
                incarnation=Incarnation("1"),
                generation=Generation(1),
                local_rank=0,
                rank=rank,
                exit_code=code,
                signal=9 if code is None else None,
                step=None,
            )
        )

    return told(say)


def obey(play: Play) -> None:
    """Everyone who is there does what it was told, until nothing is left to do."""
    for _ in range(6):
        view = play.view()
        for node in view.nodes:
            about = {"node": node.node, "incarnation": node.incarnation, "generation": node.generation}
            if node.state.value == "preparing":
                play.tell(NodePrepared(**about, rendezvous_port=9))  # type: ignore[arg-type]
            elif node.state.value == "starting":
                play.tell(WorkersStarted(**about))  # type: ignore[arg-type]


BLOWS: dict[str, Step] = {
    "a fails": exit_of("a", 0, None),
    "b fails": exit_of("b", 1, 1),
    "b dies": told(lambda play: play.died("b")),
    "c dies": told(lambda play: play.died("c")),
    "b starts anew": told(
        lambda play: play.tell(
            NodeJoined(node=NodeId("b"), incarnation=Incarnation("2"), address="b.net", workers=1)
        )
    ),
    "a finishes": exit_of("a", 0, 0),
    "everyone obeys": obey,
}


def test_every_order_of_four_blows_out_of_seven() -> None:
    """Whatever the order, one generation lives, nothing is charged twice, and the job can go on."""
    for blows in permutations(BLOWS.items(), 4):
        play = Play((2, 2))
        play.run("a", "b")
        play.join("c")
        names = [name for name, _ in blows]
        for _, blow in blows:
            blow(play)
        view = play.view()
        assert view.restarts <= 3, names
        assert view.exit_code is None, names
        for node in "abc":
            seen = view.node(NodeId(node))
            assert seen is not None
            if seen.gone:
                play.join(node, life="9")
        obey(play)
        assert play.view().phase is JobPhase.RUNNING, names


def test_every_order_in_which_three_nodes_come_prepare_and_start() -> None:
    """Five events per order, each node's own in order: the same members, whoever is first."""
    for first in permutations("abc"):
        for ready in permutations("abc"):
            play = Play((3, 3))
            for node in first:
                play.join(node)
            starts = [play.prepared(node) for node in ready]
            assert [d.reason for d in starts] == [Reason.NODE_PREPARED] * 2 + [Reason.GENERATION_PREPARED]
            assert sorted(play.view().members) == ["a", "b", "c"]
            for node in ready:
                play.started(node)
            assert play.view().phase is JobPhase.RUNNING


def test_every_pair_of_blows_in_every_phase() -> None:
    """The same blows while members prepare, start and run."""
    stages: dict[str, Callable[[Play], object]] = {
        "preparing": lambda play: None,
        "one prepared": lambda play: play.prepared("a"),
        "starting": lambda play: play.prepared("a", "b"),
        "one running": lambda play: (play.prepared("a", "b"), play.started("a")),
        "running": lambda play: play.restart(),
    }
    for (stage, reach), one, other in product(stages.items(), BLOWS.values(), BLOWS.values()):
        play = Play((2, 2))
        for node in "abc":
            play.join(node)
        reach(play)
        one(play)
        other(play)
        for node in "abc":
            seen = play.view().node(NodeId(node))
            if seen is not None and seen.gone:
                play.join(node, life="9")
        obey(play)
        assert play.view().phase is JobPhase.RUNNING, stage
