"""The checkers themselves: each planted fault must be seen, or a green run means nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from aimaster.core import generation, guards, machine, on_workers
from aimaster.core.commands import Decision, EndNode, StartWorkers
from aimaster.core.events import StepCommitted
from aimaster.core.machine import Machine
from aimaster.core.policy import Budget, Policy
from aimaster.simulation.checkers import Checkers, Violation
from aimaster.simulation.faults import Fault, FaultKind
from aimaster.simulation.run import simulate
from aimaster.simulation.world import Options

FAULTS = (
    Fault(kind=FaultKind.KILL_WORKER, at_s=15.0, node=0, lasts_s=1.0),
    Fault(kind=FaultKind.KILL_NODE, at_s=25.0, node=1, lasts_s=1.0),
    Fault(kind=FaultKind.CUT_LINK, at_s=40.0, node=2, lasts_s=9.0),
)


def run() -> None:
    simulate(3, Options(seed=3, faults=FAULTS))


def answering(change: Callable[[Decision], Decision]) -> Callable[..., Decision]:
    """A step whose answers are changed."""
    step = Machine.step

    def changed(self: Machine, event: Any, now: float) -> Decision:
        return change(step(self, event, now))

    return changed


def starts_changed(**changes: Any) -> Callable[[Decision], Decision]:
    def change(decision: Decision) -> Decision:
        commands = tuple(
            replace(c, **changes) if isinstance(c, StartWorkers) and c.node_rank == 1 else c
            for c in decision.commands
        )
        return replace(decision, commands=commands)

    return change


def test_without_a_planted_fault_nothing_is_seen() -> None:
    run()


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"node_rank": 0}, "node ranks"),
        ({"first_rank": 0}, "first ranks"),
        ({"master_port": 1}, "told different things"),
        ({"generation": 0}, "not the newest"),
    ],
)
def test_wrong_ranks_or_addresses(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], what: str
) -> None:
    monkeypatch.setattr(Machine, "step", answering(starts_changed(**changes)))
    with pytest.raises(Violation, match=what):
        run()


def test_a_command_without_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from aimaster.core.commands import Reason

    monkeypatch.setattr(
        Machine, "step", answering(lambda decision: replace(decision, reason=Reason.NOTHING_TO_DO))
    )
    with pytest.raises(Violation, match="without a reason"):
        run()


def test_starting_before_all_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    form = generation.form

    def hasty(turn: Any, reason: Any) -> None:
        form(turn, reason)
        for node in turn.members():
            node.state = type(node.state)("prepared")
        generation.start(turn)

    monkeypatch.setattr(generation, "form", hasty)
    with pytest.raises(Violation, match="before they were prepared"):
        run()


def test_listening_to_an_older_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_workers, "current", guards.known)
    with pytest.raises(Violation):
        run()


def test_ending_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(turn: Any, node: Any, event: Any) -> None:
        generation.end_job(turn, 0, machine.Reason.JOB_FINISHED)

    monkeypatch.setattr(on_workers, "_finished", impatient)
    with pytest.raises(Violation, match="finished with 1 of 2 ranks"):
        run()


def test_never_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(decision: Decision) -> Decision:
        kept = tuple(c for c in decision.commands if not isinstance(c, EndNode))
        return replace(decision, commands=kept)

    monkeypatch.setattr(Machine, "step", answering(forgetful))
    monkeypatch.setattr("aimaster.simulation.run.LIVENESS_S", 60.0)
    with pytest.raises(Violation, match="not over after"):
        run()


def test_deciding_by_something_that_is_not_in_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def moody(decision: Decision) -> Decision:
        nonlocal asked
        asked += 1
        return replace(decision, facts={**decision.facts, "asked": asked})

    monkeypatch.setattr(Machine, "step", answering(moody))
    with pytest.raises(Violation, match="a replay decides otherwise"):
        run()


def test_forgetting_to_say_that_a_node_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(turn: Any, step: Any) -> None:
        next(iter(turn.state.nodes.values())).strikes += 1

    monkeypatch.setattr(on_workers, "_note_step", silent)
    with pytest.raises(Violation, match="running digest"):
        run()


@pytest.mark.parametrize(
    ("fault", "lasts_s", "believed", "what"),
    [
        (FaultKind.FAIL_PREPARE, 9.0, {"node_strikes_max": 5}, "was set aside after"),
        (FaultKind.KILL_WORKER, 0.0, {"worker_failures": Budget(limit=0)}, "charges of worker_failed"),
    ],
)
def test_a_core_that_follows_another_policy(
    monkeypatch: pytest.MonkeyPatch, fault: FaultKind, lasts_s: float, believed: dict[str, Any], what: str
) -> None:
    make = Checkers.__init__

    def mistaken(self: Checkers, policy: Policy, *, inside_every: int = 1) -> None:
        make(self, policy, inside_every=inside_every)
        self._policy = replace(policy, **believed)

    monkeypatch.setattr(Checkers, "__init__", mistaken)
    faults = (
        Fault(kind=fault, at_s=12.0, node=0, lasts_s=lasts_s),
        Fault(kind=FaultKind.KILL_WORKER, at_s=15.0, node=0, lasts_s=1.0),
    )
    with pytest.raises(Violation, match=what):
        simulate(3, Options(seed=3, faults=faults, min_nodes=1))


def test_a_durable_step_that_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Machine.step

    def forgetful(self: Machine, event: Any, now: float) -> Decision:
        decision = step(self, event, now)
        if isinstance(event, StepCommitted) and self.state.job.durable_step == 50:
            self.state.job.durable_step = 3
        return decision

    monkeypatch.setattr(Machine, "step", forgetful)
    with pytest.raises(Violation, match="durable step went back"):
        run()
