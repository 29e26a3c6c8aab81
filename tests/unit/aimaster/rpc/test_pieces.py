"""Small pieces of the wire: pending facts, back-off, endpoints, hostile values."""

from __future__ import annotations

import random

import pytest

from aimaster.core.events import NodeEvent, StepCommitted, WorkersStarted
from aimaster.errors import BadMessage, UsageError
from aimaster.ids import Generation, Incarnation, NodeId
from aimaster.rpc import limits
from aimaster.rpc.convert import decode_from_agent, decode_from_master
from aimaster.rpc.gen import contract
from aimaster.rpc.pending import PendingFacts
from aimaster.rpc.retry import Backoff
from aimaster.rpc.transport import Endpoint

HEADER = {"job_id": "job-1", "node_id": "n1", "incarnation": "i1", "seq": 1}


def started() -> NodeEvent:
    return WorkersStarted(node=NodeId("n1"), incarnation=Incarnation("i1"), generation=Generation(1))


def committed(step: int, *, durable: bool = False) -> StepCommitted:
    return StepCommitted(
        node=NodeId("n1"),
        incarnation=Incarnation("i1"),
        generation=Generation(1),
        step=step,
        durable=durable,
    )


def test_facts_are_kept_until_acknowledged_and_sent_again() -> None:
    pending = PendingFacts()
    assert pending.add(started())
    assert pending.add(started())
    assert [fact.seq for fact in pending.take_unsent()] == [1, 2]
    assert pending.take_unsent() == ()
    pending.acknowledge(1)
    pending.start_again(1)
    assert pending.add(started())
    assert [fact.seq for fact in pending.take_unsent()] == [2, 3]
    pending.acknowledge(3)
    assert len(pending) == 0


def test_a_newer_commit_replaces_an_older_one_also_one_that_is_under_way() -> None:
    pending = PendingFacts()
    assert not pending.add(committed(1))
    pending.take_unsent()
    pending.add(committed(2))
    pending.add(committed(2, durable=True))
    pending.add(started())
    pending.add(committed(3))
    assert [(fact.seq, getattr(fact, "step", None)) for fact in pending.take_unsent()] == [
        (3, 2),
        (4, None),
        (5, 3),
    ]


def test_too_many_facts_cost_the_oldest_and_are_counted() -> None:
    pending = PendingFacts(kept_max=3)
    for _ in range(5):
        pending.add(started())
    assert [fact.seq for fact in pending.take_unsent()] == [3, 4, 5]
    assert pending.given_up == 2


def test_backoff_grows_to_its_bound_and_starts_again() -> None:
    backoff = Backoff(random.Random(1), first_s=1.0, longest_s=4.0)
    bounds = (1.0, 2.0, 4.0, 4.0)
    for bound in bounds:
        assert 0 <= backoff.next_s() <= bound
    many = [backoff.next_s() for _ in range(200)]
    assert max(many) > 3.0
    assert min(many) < 1.0  # full jitter: spread over all of it
    backoff.reset()
    assert backoff.next_s() <= 1.0


@pytest.mark.parametrize("text", ["127.0.0.1:80", "host.name:0", "[::1]:65535", "[fe80::1%eth0]:1"])
def test_endpoints_read_as_written(text: str) -> None:
    assert str(Endpoint.parse(text)) == text


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "h:x", "h:65536", "::1:80", "h:-1", "h:¹"])
def test_what_is_no_endpoint_says_what_to_write(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        Endpoint.parse(text)


def hello(**changes: object) -> object:
    fields = {
        "workers": 1,
        "min_nodes": 1,
        "max_nodes": 1,
        "phase": 1,
        "wanted_node_rank": -1,
        "max_restarts": -1,
    }
    return contract.Hello(**(fields | changes))


HUGE = "x" * (limits.TEXT_CHARS_MAX + 1)
HOSTILE = {
    "no header": contract.AgentMessage(hello=hello()),
    "path as job": contract.AgentMessage(header=HEADER | {"job_id": "../../etc"}, hello=hello()),
    "path as node": contract.AgentMessage(header=HEADER | {"node_id": "/root"}, hello=hello()),
    "endless node": contract.AgentMessage(header=HEADER | {"node_id": "n" * 1000}, hello=hello()),
    "seq too large": contract.AgentMessage(header=HEADER | {"seq": 2**64 - 1}, hello=hello()),
    "no body": contract.AgentMessage(header=HEADER),
    "no workers": contract.AgentMessage(header=HEADER, hello=hello(workers=0)),
    "min above max": contract.AgentMessage(header=HEADER, hello=hello(min_nodes=3, max_nodes=2)),
    "unknown phase": contract.AgentMessage(header=HEADER, hello=hello(phase=77)),
    "unset phase": contract.AgentMessage(header=HEADER, hello=hello(phase=0)),
    "address with a line": contract.AgentMessage(header=HEADER, hello=hello(address="a\nLD_PRELOAD=x")),
    "endless address": contract.AgentMessage(header=HEADER, hello=hello(address="a" * 10_000)),
    "endless software": contract.AgentMessage(header=HEADER, hello=hello(software="a" * 10_000)),
    "many processes": contract.AgentMessage(
        header=HEADER, hello=hello(processes=[{"role": 1, "pid": 1, "rank": -1}] * 5000)
    ),
    "pid 0": contract.AgentMessage(header=HEADER, hello=hello(processes=[{"role": 1, "pid": 0, "rank": -1}])),
    "not a number": contract.AgentMessage(
        header=HEADER, heartbeat={"phase": 1, "progress": [{"phase": 1, "age_s": float("nan")}]}
    ),
    "negative age": contract.AgentMessage(
        header=HEADER, heartbeat={"phase": 1, "progress": [{"phase": 1, "age_s": -1.0}]}
    ),
    "fact without a number": contract.AgentMessage(
        header=HEADER | {"seq": 0}, workers_started={"generation": 1}
    ),
    "port too large": contract.AgentMessage(header=HEADER, node_prepared={"rendezvous_port": 70_000}),
    "no exit": contract.AgentMessage(header=HEADER, worker_exited={"generation": 1}),
    "signal 0": contract.AgentMessage(header=HEADER, worker_exited={"generation": 1, "signal": 0}),
    "huge error": contract.AgentMessage(
        header=HEADER,
        worker_exited={"generation": 1, "exit_code": 1, "error": HUGE},
    ),
    "step below -1": contract.AgentMessage(header=HEADER, worker_exited={"exit_code": 1, "step": -2}),
    "unknown tier": contract.AgentMessage(header=HEADER, restored={"tier": 9}),
    "exit code 256": contract.AgentMessage(header=HEADER, goodbye={"exit_code": 256}),
}


@pytest.mark.parametrize("message", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_messages_up_are_refused_by_name(message: object) -> None:
    with pytest.raises(BadMessage) as caught:
        decode_from_agent(message.SerializeToString())  # type: ignore[attr-defined]
    assert len(str(caught.value)) < 1000, "an error repeats a bounded part of what was sent"


def start(**changes: object) -> object:
    return contract.StartWorkers(**({"generation": 1, "nodes": 1, "world_size": 1} | changes))


HOSTILE_DOWN = {
    "rank outside": contract.MasterMessage(header=HEADER, start_workers=start(first_rank=1)),
    "node outside": contract.MasterMessage(header=HEADER, start_workers=start(node_rank=1)),
    "empty world": contract.MasterMessage(header=HEADER, start_workers=start(world_size=0)),
    "address with a space": contract.MasterMessage(header=HEADER, start_workers=start(master_addr="a b")),
    "unknown reason": contract.MasterMessage(header=HEADER, prepare={"generation": 1, "reason": "whim"}),
    "exit code": contract.MasterMessage(
        header=HEADER, end_node={"exit_code": 1000, "reason": "job_finished"}
    ),
    "no interval": contract.MasterMessage(header=HEADER, welcome={"agent_orphan_timeout_s": 1.0}),
    "endless interval": contract.MasterMessage(
        header=HEADER, welcome={"heartbeat_interval_s": float("inf"), "agent_orphan_timeout_s": 1.0}
    ),
}


@pytest.mark.parametrize("message", HOSTILE_DOWN.values(), ids=HOSTILE_DOWN.keys())
def test_hostile_messages_down_are_refused_by_name(message: object) -> None:
    with pytest.raises(BadMessage):
        decode_from_master(message.SerializeToString())  # type: ignore[attr-defined]


def test_an_unknown_field_of_a_newer_peer_is_ignored() -> None:
    message = contract.AgentMessage(header=HEADER, workers_started={"generation": 3})
    newer = message.SerializeToString() + bytes([0xFA, 0x3F, 0x01, 0x61])  # field 1023, one byte
    _, fact = decode_from_agent(newer)
    assert fact == WorkersStarted(
        node=NodeId("n1"), incarnation=Incarnation("i1"), seq=1, generation=Generation(3)
    )
