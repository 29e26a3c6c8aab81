"""Anything that can be said, in any order: the machine answers or refuses, and no promise breaks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aimaster.core.commands import Prepare, Reason, StartWorkers
from aimaster.core.events import (
    AgentPhase,
    Event,
    FirstStepDone,
    HangKind,
    JobDeclared,
    NodeChecked,
    NodeDied,
    NodeFailed,
    NodeJoined,
    NodeLeft,
    NodePrepared,
    NodeRecovered,
    NodeSuspected,
    RestartScope,
    Restored,
    StepCommitted,
    StopKind,
    StopRequested,
    Suspicion,
    Tier,
    TimerFired,
    TimerKind,
    WorkerExited,
    WorkersHung,
    WorkersStarted,
)
from aimaster.core.invariants import violations
from aimaster.core.machine import Machine
from aimaster.core.policy import Policy
from aimaster.core.transitions import IllegalEvent
from aimaster.ids import Generation, Incarnation, JobId, NodeId
from aimaster.journal.codec import decode_decision, decode_event, decode_policy, encode

NODES = st.sampled_from([NodeId(name) for name in "abc"])
LIVES = st.sampled_from([Incarnation(life) for life in "12"])
GENERATIONS = st.integers(0, 5).map(Generation)
STEPS = st.integers(0, 20)
ABOUT = {"node": NODES, "incarnation": LIVES}
IN_GENERATION = {**ABOUT, "generation": GENERATIONS}


@st.composite
def exits(draw: st.DrawFn) -> WorkerExited:
    """Well, by an exit code or by a signal."""
    code = draw(st.sampled_from([0, 0, 1, None]))
    return WorkerExited(
        node=draw(NODES),
        incarnation=draw(LIVES),
        generation=draw(GENERATIONS),
        local_rank=draw(st.integers(0, 1)),
        rank=draw(st.integers(0, 3)),
        exit_code=code,
        signal=9 if code is None else None,
        step=draw(st.none() | STEPS),
        error=draw(st.text(max_size=10)),
        error_digest=draw(st.sampled_from(["", "d"])),
    )


JOINS = st.builds(
    NodeJoined,
    **ABOUT,
    address=st.just("x"),
    workers=st.just(1),
    wanted_node_rank=st.none() | st.integers(0, 3),
    phase=st.sampled_from(AgentPhase),
    generation=GENERATIONS,
)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    JOINS,
    st.builds(NodePrepared, **IN_GENERATION, rendezvous_port=st.integers(1, 65535)),
    st.builds(WorkersStarted, **IN_GENERATION),
    exits(),
    st.builds(NodeDied, **ABOUT, silent_s=st.floats(0, 100)),
    st.builds(NodeLeft, **ABOUT, exit_code=st.integers(0, 255)),
    st.builds(NodeSuspected, **ABOUT, silent_s=st.floats(0, 100)),
    st.builds(NodeRecovered, **ABOUT, silent_s=st.floats(0, 100)),
    st.builds(NodeFailed, **IN_GENERATION, what=st.text(max_size=5)),
    st.builds(
        NodeChecked,
        **IN_GENERATION,
        why=st.sampled_from(Suspicion),
        looked=st.integers(0, 9),
        findings=st.lists(st.text(max_size=5), max_size=2).map(tuple),
        blocking=st.booleans(),
    ),
    st.builds(Restored, **IN_GENERATION, rank=st.integers(0, 3), step=STEPS, tier=st.sampled_from(Tier)),
    st.builds(FirstStepDone, **IN_GENERATION, step=STEPS),
    st.builds(
        WorkersHung,
        generation=GENERATIONS,
        kind=st.sampled_from(HangKind),
        node=NODES,
        culprits=st.lists(st.integers(0, 3), max_size=2).map(tuple),
        stalled_s=st.floats(0, 100),
        limit_s=st.floats(0, 100),
        step=st.none() | STEPS,
    ),
    st.builds(StepCommitted, **IN_GENERATION, step=STEPS, durable=st.booleans()),
    st.builds(StopRequested, **ABOUT, kind=st.sampled_from(StopKind), signal=st.just(15)),
    st.builds(TimerFired, timer=st.sampled_from(TimerKind), generation=GENERATIONS),
)


def declared(low: int, high: int, cap: int | None, *, scope: RestartScope) -> JobDeclared:
    return JobDeclared(job=JobId("j"), min_nodes=low, max_nodes=high, max_restarts=cap, scope=scope)


class Asked:
    """A machine, and what it was told and answered."""

    def __init__(
        self, low: int, high: int, cap: int | None, *, scope: RestartScope = RestartScope.JOB
    ) -> None:
        self.machine = Machine()
        self.now = 0.0
        self.taken: list[tuple[Event, float, str]] = []
        self.alone = scope is RestartScope.NODE
        self.tell(declared(low, high, cap, scope=scope))

    def tell(self, event: Event) -> None:
        self.now += 0.5
        before = self.machine.digest()
        try:
            decision = self.machine.step(event, self.now)
        except IllegalEvent:
            assert self.machine.state.digest_from_scratch() == before
            return
        self.taken.append((event, self.now, self.machine.digest()))
        assert violations(self.machine.state, self.machine.policy) == ()
        if decision.reason in (Reason.STALE, Reason.NOTHING_TO_DO):
            assert not decision.commands
            assert self.machine.digest() == before
        assert decode_event(encode(event)) == event
        assert decode_decision(encode(decision)) == decision
        generations = {c.generation for c in decision.commands if isinstance(c, StartWorkers)}
        # A node that starts alone has a generation of its own, which a later one of another node is beyond.
        assert self.alone or generations <= {self.machine.view(self.now).generation}
        newest = self.machine.view(self.now).generation
        told = {c.generation for c in decision.commands if isinstance(c, Prepare)}
        assert decision.reason is Reason.RESENT or told <= {newest}

    def obedient(self, node: NodeId) -> Event | None:
        """What a node that does as it is told would say next."""
        seen = self.machine.view(self.now).node(node)
        if seen is None:
            return None
        about = {"node": node, "incarnation": seen.incarnation, "generation": seen.generation}
        if seen.state.value == "preparing":
            return NodePrepared(**about, rendezvous_port=1)  # type: ignore[arg-type]
        if seen.state.value == "starting":
            return WorkersStarted(**about)  # type: ignore[arg-type]
        if seen.state.value == "ending":
            return NodeLeft(node=node, incarnation=seen.incarnation, exit_code=0)
        return None


JOBS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.none() | st.integers(0, 2)).map(
    lambda drawn: (min(drawn[:2]), max(drawn[:2]), drawn[2])
)


@settings(max_examples=200, deadline=None)
@given(JOBS, st.sampled_from(RestartScope), st.lists(EVENTS | NODES, max_size=50))
def test_whatever_is_said(
    job: tuple[int, int, int | None], scope: RestartScope, said: list[Event | NodeId]
) -> None:
    """A node in the list does what it was told last: so a job gets far enough to be broken."""
    asked = Asked(*job, scope=scope)
    for item in said:
        event = asked.obedient(NodeId(item)) if isinstance(item, str) else item
        if event is not None:
            asked.tell(event)
    again = Machine()
    for event, at_s, digest in asked.taken:
        again.step(event, at_s)
        assert again.digest() == digest


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(["died", "rejoined", "exited"]), max_size=30),
    st.lists(NODES, min_size=30, max_size=30),
)
def test_a_job_whose_nodes_do_as_they_are_told_always_gets_somewhere(
    what: list[str], nodes: list[NodeId]
) -> None:
    """After any blows, as soon as two nodes are there and obey, workers run or the job has ended."""
    asked = Asked(2, 2, None)
    lives = dict.fromkeys("abc", 1)

    def join(node: str) -> None:
        asked.tell(
            NodeJoined(node=NodeId(node), incarnation=Incarnation(str(lives[node])), address=node, workers=1)
        )

    def settle() -> None:
        for _ in range(20):
            events = [asked.obedient(NodeId(node)) for node in "abc"]
            for event in events:
                if event is not None:
                    asked.tell(event)

    for node in "abc":
        join(node)
    settle()
    for blow, node in zip(what, nodes, strict=False):
        view = asked.machine.view(asked.now)
        about = {"node": node, "incarnation": Incarnation(str(lives[node]))}
        seen = view.node(node)
        assert seen is not None
        if blow == "died":
            asked.tell(NodeDied(**about, silent_s=6.0))  # type: ignore[arg-type]
        elif blow == "rejoined":
            lives[node] += 1
            join(node)
        elif seen.state.value in ("starting", "running"):
            fields = {"generation": view.generation, "local_rank": 0, "rank": seen.first_rank}
            asked.tell(WorkerExited(**about, **fields, exit_code=None, signal=9, step=None))  # type: ignore[arg-type]
    for node in "abc":
        lives[node] += 1
        join(node)
    settle()
    assert asked.machine.view(asked.now).phase.value in ("running", "ended", "ending")


@given(
    st.builds(
        Policy,
        fruitless_attempts_max=st.integers(1, 9),
        fruitful_s=st.floats(0, 1e6),
        node_strikes_max=st.integers(1, 9),
    )
)
def test_policies_survive_the_journal(policy: Policy) -> None:
    assert decode_policy(encode(policy)) == policy
