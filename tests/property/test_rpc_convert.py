"""Every message survives the wire unchanged, and nothing that comes from the wire breaks the receiver."""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from enum import Enum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aimaster.core import commands, events
from aimaster.core.commands import Reason
from aimaster.core.events import AgentPhase, RestartScope, StopKind, Tier
from aimaster.core.sights import Effort
from aimaster.errors import BadMessage
from aimaster.ids import Generation, Incarnation, JobId, NodeId
from aimaster.rpc import limits
from aimaster.rpc.convert import (
    MasterBody,
    decode_from_agent,
    decode_from_master,
    encode_from_agent,
    encode_from_master,
)
from aimaster.rpc.facts import FACT_KINDS
from aimaster.rpc.goodput import GoodputStatus
from aimaster.rpc.limits import CUT, TEXT_CHARS_MAX, clip
from aimaster.rpc.messages import (
    Ack,
    Header,
    Heartbeat,
    Hello,
    ProcessInfo,
    RankProgress,
    RefusalKind,
    Refused,
    Role,
    Welcome,
    WorkerPhase,
)
from aimaster.rpc.status import (
    BudgetStatus,
    IncidentStatus,
    JobStatus,
    NodeStatus,
    SlowStatus,
    decode_status,
    encode_status,
)

ids = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,30}", fullmatch=True)
ports = st.integers(0, 65_535)
counts = st.integers(0, limits.INT63_MAX)
ranks = st.integers(0, limits.INT32_MAX)
generations = counts.map(Generation)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
notes = st.lists(texts, max_size=3).map(tuple)
addresses = st.from_regex(r"[a-z0-9.:\[\]-]{0,40}", fullmatch=True)
seconds = st.floats(0, 1e9, allow_nan=False)


def maybe(strategy: st.SearchStrategy[typing.Any]) -> st.SearchStrategy[typing.Any]:
    return st.none() | strategy


headers = st.builds(
    Header,
    job=ids.map(JobId),
    node=ids.map(NodeId),
    incarnation=ids.map(Incarnation),
    generation=generations,
    seq=counts,
    ack=counts,
    epoch=counts,
)
processes = st.lists(
    st.builds(
        ProcessInfo, role=st.sampled_from(Role), pid=st.integers(1, limits.INT32_MAX), rank=maybe(ranks)
    ),
    max_size=4,
).map(tuple)
progress = st.lists(
    st.builds(
        RankProgress,
        local_rank=st.integers(0, limits.RANKS_PER_NODE_MAX - 1),
        rank=maybe(ranks),
        phase=st.sampled_from(WorkerPhase),
        steps=counts,
        saved_step=maybe(counts),
        age_s=seconds,
        effort=maybe(st.builds(Effort, at_s=seconds, awake_s=seconds, running_s=seconds)),
    ),
    max_size=4,
).map(tuple)
sizes = st.tuples(st.integers(1, limits.NODES_MAX), st.integers(1, limits.NODES_MAX)).map(sorted)


@st.composite
def hellos(draw: st.DrawFn) -> Hello:
    low, high = draw(sizes)
    return Hello(
        protocol_min=draw(st.integers(0, 100)),
        protocol_max=draw(st.integers(0, 100)),
        software=draw(texts),
        address=draw(addresses),
        workers=draw(st.integers(1, limits.RANKS_PER_NODE_MAX)),
        saver_address=draw(addresses),
        wanted_node_rank=draw(maybe(st.integers(0, limits.NODES_MAX - 1))),
        phase=draw(st.sampled_from(AgentPhase)),
        generation=draw(generations),
        min_nodes=low,
        max_nodes=high,
        max_restarts=draw(maybe(ranks)),
        scope=draw(st.sampled_from(RestartScope)),
        processes=draw(processes),
        notes=draw(notes),
    )


beats = st.builds(
    Heartbeat,
    phase=st.sampled_from(AgentPhase),
    progress=progress,
    processes=st.none() | processes,
    notes=notes,
)

FACT_FIELDS: dict[type[events.NodeEvent], dict[str, st.SearchStrategy[typing.Any]]] = {
    events.NodePrepared: {"generation": generations, "rendezvous_port": ports},
    events.NodeChecked: {
        "generation": generations,
        "why": st.sampled_from(events.Suspicion),
        "looked": ranks,
        "findings": notes,
        "blocking": st.booleans(),
    },
    events.NodeFailed: {"generation": generations, "what": texts},
    events.WorkersStarted: {"generation": generations},
    events.WorkerExited: {
        "generation": generations,
        "local_rank": st.integers(0, limits.RANKS_PER_NODE_MAX - 1),
        "rank": ranks,
        "step": maybe(counts),
        "error": texts,
        "error_digest": texts,
    },
    events.Restored: {
        "generation": generations,
        "rank": ranks,
        "step": counts,
        "tier": st.sampled_from(Tier),
    },
    events.FirstStepDone: {
        "generation": generations,
        "step": counts,
        "load_s": seconds,
        "warm_up_s": seconds,
    },
    events.StepCommitted: {
        "generation": generations,
        "step": counts,
        "durable": st.booleans(),
        "stalled_s": seconds,
    },
    events.StopRequested: {"kind": st.sampled_from(StopKind), "signal": st.integers(0, limits.SIGNAL_MAX)},
    events.NodeLeft: {"exit_code": st.integers(0, limits.EXIT_CODE_MAX)},
}


@st.composite
def said_facts(draw: st.DrawFn) -> tuple[Header, events.NodeEvent]:
    """A fact and the header that it travels with."""
    header = dataclasses.replace(draw(headers), seq=draw(st.integers(1, limits.INT63_MAX)))
    kind = draw(st.sampled_from(sorted(FACT_FIELDS, key=lambda kind: kind.__name__)))
    fields = {name: draw(strategy) for name, strategy in FACT_FIELDS[kind].items()}
    if kind is events.WorkerExited:
        killed = draw(st.booleans())
        fields["signal"] = draw(st.integers(1, limits.SIGNAL_MAX)) if killed else None
        fields["exit_code"] = None if killed else draw(st.integers(0, limits.EXIT_CODE_MAX))
    return header, kind(node=header.node, incarnation=header.incarnation, seq=header.seq, **fields)


@st.composite
def start_commands(draw: st.DrawFn, node: NodeId) -> commands.StartWorkers:
    nodes, world_size = draw(st.integers(1, limits.NODES_MAX)), draw(st.integers(1, limits.INT32_MAX))
    return commands.StartWorkers(
        node=node,
        generation=draw(generations),
        attempt=draw(ranks),
        node_rank=draw(st.integers(0, nodes - 1)),
        nodes=nodes,
        first_rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        master_addr=draw(addresses),
        master_port=draw(ports),
        saver_lead=draw(addresses),
        progress_expected=draw(st.booleans()),
        restore_below=draw(st.none() | st.integers(0, 2**63 - 1)),
    )


@st.composite
def said_by_masters(draw: st.DrawFn) -> tuple[Header, MasterBody]:
    header = draw(headers)
    reasons = st.sampled_from(Reason)
    body = draw(
        st.one_of(
            st.builds(
                Welcome,
                protocol=st.integers(0, 100),
                heartbeat_interval_s=st.floats(0.01, 1e6),
                agent_orphan_timeout_s=st.floats(0.01, 1e6),
                software=texts,
            ),
            st.builds(Refused, kind=st.sampled_from(RefusalKind), message=texts),
            st.just(Ack()),
            st.builds(commands.Prepare, node=st.just(header.node), generation=generations, reason=reasons),
            st.builds(
                commands.CheckNode,
                node=st.just(header.node),
                generation=generations,
                why=st.sampled_from(events.Suspicion),
            ),
            start_commands(header.node),
            st.builds(
                commands.EndNode,
                node=st.just(header.node),
                exit_code=st.integers(0, limits.EXIT_CODE_MAX),
                reason=reasons,
                sentence=texts,
            ),
        )
    )
    return header, body


@given(header=headers, hello=hellos())
def test_hello_round_trip(header: Header, hello: Hello) -> None:
    header = dataclasses.replace(header, generation=hello.generation)
    assert decode_from_agent(encode_from_agent(header, hello)) == (header, hello)


@given(header=headers, beat=beats)
def test_heartbeat_round_trip(header: Header, beat: Heartbeat) -> None:
    assert decode_from_agent(encode_from_agent(header, beat)) == (header, beat)


@given(said=said_facts())
def test_fact_round_trip(said: tuple[Header, events.NodeEvent]) -> None:
    assert decode_from_agent(encode_from_agent(*said)) == said


@given(said=said_by_masters())
def test_master_round_trip(said: tuple[Header, MasterBody]) -> None:
    assert decode_from_master(encode_from_master(*said)) == said


job_statuses = st.builds(
    JobStatus,
    job=ids.map(JobId),
    phase=texts,
    generation=generations,
    attempt=ranks,
    world_size=ranks,
    nodes=st.lists(
        st.builds(
            NodeStatus,
            node=ids.map(NodeId),
            state=texts,
            node_rank=maybe(st.integers(0, limits.NODES_MAX)),
            address=addresses,
            heartbeat_age_s=maybe(seconds),
            connected=st.booleans(),
            processes=processes,
            progress=progress,
            saver_address=addresses,
            notes=notes,
        ),
        max_size=3,
    ).map(tuple),
    master=st.builds(ProcessInfo, role=st.just(Role.MASTER), pid=st.integers(1, limits.INT32_MAX)),
    master_node=texts,
    memory_step=maybe(counts),
    durable_step=maybe(counts),
    memory_age_s=maybe(seconds),
    durable_age_s=maybe(seconds),
    goodput=st.builds(
        GoodputStatus,
        wall_s=seconds,
        phases=st.lists(st.tuples(texts, seconds), max_size=3).map(tuple),
    ),
    budgets=st.lists(
        st.builds(BudgetStatus, cause=texts, used=ranks, limit=ranks, window_s=seconds), max_size=3
    ).map(tuple),
    incidents=st.lists(
        st.builds(
            IncidentStatus,
            number=ranks,
            kind=texts,
            node=texts,
            rank=maybe(ranks),
            reason=texts,
            generation=generations,
            at_wall_s=seconds,
            last_step=maybe(counts),
            resumed_step=maybe(counts),
            restored_from=texts,
            recovered_s=maybe(seconds),
            error=texts,
        ),
        max_size=3,
    ).map(tuple),
    waiting_for=texts,
    epoch=counts,
    software=texts,
    slow=maybe(
        st.builds(
            SlowStatus,
            node=ids.map(NodeId),
            ranks=st.lists(ranks, max_size=3).map(tuple),
            awake=seconds,
            running=seconds,
            others_awake=seconds,
        )
    ),
)


@given(status=job_statuses)
def test_status_round_trip(status: JobStatus) -> None:
    assert decode_status(encode_status(status)) == status


@given(data=st.binary(max_size=300))
def test_no_bytes_break_the_receiver(data: bytes) -> None:
    for decode in (decode_from_agent, decode_from_master, decode_status):
        with contextlib.suppress(BadMessage):
            decode(data)


@given(said=said_facts(), position=st.integers(0, 10_000), value=st.integers(0, 255))
def test_a_damaged_byte_gives_a_valid_message_or_a_clear_error(
    said: tuple[Header, events.NodeEvent], position: int, value: int
) -> None:
    data = bytearray(encode_from_agent(*said))
    data[position % len(data)] = value
    with contextlib.suppress(BadMessage):
        _, body = decode_from_agent(bytes(data))
        assert isinstance(body, (Hello, Heartbeat, *FACT_KINDS))


@given(text=st.text(max_size=20_000))
def test_clipped_text_fits_and_keeps_both_ends(text: str) -> None:
    clipped = clip(text)
    assert len(clipped) <= TEXT_CHARS_MAX
    clipped.encode()  # valid UTF-8, whatever it was before
    if len(text) > TEXT_CHARS_MAX:
        assert CUT in clipped
        assert clipped[0] == text[0].encode("utf-8", "replace").decode()


def test_every_fact_of_an_agent_has_a_message() -> None:
    """Of the core's node events, only those that the master finds out itself have none."""
    own = {events.NodeJoined, events.NodeSuspected, events.NodeRecovered, events.NodeDied}
    kinds = {
        value
        for value in vars(events).values()
        if isinstance(value, type) and issubclass(value, events.NodeEvent) and value is not events.NodeEvent
    }
    assert set(FACT_KINDS) == kinds - own == set(FACT_FIELDS)


@pytest.mark.parametrize("kind", [AgentPhase, WorkerPhase, Role, Tier, StopKind, RefusalKind])
def test_enums_have_a_twin_on_the_wire(kind: type[Enum]) -> None:
    from aimaster.rpc import wire

    maps = [value for value in vars(wire).values() if isinstance(value, wire.EnumMap)]
    (found,) = [one for one in maps if set(one._to_wire) == set(kind)]
    assert {found.member(found.number(member)) for member in kind} == set(kind)
    with pytest.raises(BadMessage):
        found.member(0)
    with pytest.raises(BadMessage):
        found.member(99)
