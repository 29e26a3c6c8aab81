"""Agents and the master's server over real gRPC on loopback."""

from __future__ import annotations

import asyncio
import socket

import grpc
import grpc.aio
import pytest

from aimaster.core.commands import EndNode, Prepare, Reason
from aimaster.core.events import NodeSuspected, StepCommitted, WorkersStarted
from aimaster.errors import AlreadyRunning, JobMismatch, ProtocolMismatch
from aimaster.ids import Generation, Incarnation, JobId, NodeId
from aimaster.rpc.client import LinkState
from aimaster.rpc.gen import contract
from aimaster.rpc.messages import ProcessInfo, Role
from aimaster.rpc.transport import Endpoint
from tests.unit.aimaster.rpc.recording_master import (
    PATIENCE_S,
    Agent,
    RecordingMaster,
    hello,
    serving,
    until,
)


def started(generation: int, *, node: str = "n1", incarnation: str = "i1") -> WorkersStarted:
    return WorkersStarted(
        node=NodeId(node), incarnation=Incarnation(incarnation), generation=Generation(generation)
    )


def prepare(generation: int, *, node: str = "n1") -> Prepare:
    return Prepare(node=NodeId(node), generation=Generation(generation), reason=Reason.ENOUGH_NODES)


def test_hello_facts_beats_and_commands() -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master) as (server, endpoint):
            agent = Agent(endpoint).start()
            await until(lambda: agent.connected)
            agent.link.report(started(1))
            agent.link.report(started(2))
            assert await agent.link.flush(PATIENCE_S)
            assert [fact.seq for fact in master.facts] == [1, 2]
            assert server.send(prepare(3))
            await until(lambda: agent.commands)
            await until(lambda: len(master.beats) >= 3)
            await agent.close()
            await until(lambda: master.gone)
            assert agent.commands == [prepare(3)]
            assert not server.send(prepare(4))
        assert agent.states == [LinkState.CONNECTING, LinkState.CONNECTED, LinkState.CLOSED]

    asyncio.run(scenario())


def test_processes_are_said_again_only_when_they_change() -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master) as (_, endpoint):
            agent = Agent(endpoint).start()
            await until(lambda: len(master.beats) >= 2)
            assert all(beat.processes is None for _, beat in master.beats)
            agent.processes = (*agent.processes, ProcessInfo(role=Role.WORKER, pid=7, rank=0))
            await until(lambda: any(beat.processes == agent.processes for _, beat in master.beats))
            heard = len(master.beats)
            await until(lambda: len(master.beats) >= heard + 3)
            assert master.beats[-1][1].processes is None
            await agent.close()

    asyncio.run(scenario())


def test_facts_survive_a_master_that_was_away_and_arrive_once() -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master) as (_, endpoint):
            agent = Agent(endpoint).start()
            agent.link.report(started(1))
            assert await agent.link.flush(PATIENCE_S)
            master.silent = True  # journals nothing any more
            agent.link.report(started(2))
            await until(lambda: len(master.facts) == 2)
            assert not await agent.link.flush(0.1)
        await until(lambda: agent.link.lost_since is not None)
        agent.link.report(started(3))
        master.silent = False
        master.facts.pop()
        async with serving(master, port=endpoint.port, epoch=2):
            await until(lambda: agent.connected)
            assert await agent.link.flush(PATIENCE_S)
            assert agent.link.lost_since is None
            await agent.close()
        assert [fact.seq for fact in master.facts] == [1, 2, 3]

    asyncio.run(scenario())


def test_only_the_newest_commit_waits() -> None:
    async def scenario() -> None:
        master = RecordingMaster(interval_s=5.0)
        async with serving(master) as (_, endpoint):
            agent = Agent(endpoint).start()
            await until(lambda: agent.connected)
            for step in range(1000):
                agent.link.report(
                    StepCommitted(
                        node=agent.identity.node,
                        incarnation=agent.identity.incarnation,
                        generation=Generation(1),
                        step=step,
                        durable=step % 100 == 0,
                    )
                )
            assert await agent.link.flush(PATIENCE_S)
            await agent.close()
        assert [(fact.step, fact.durable) for fact in master.facts] == [(900, True), (999, False)]

    asyncio.run(scenario())


def test_an_older_generation_or_a_repeated_command_is_not_passed_on() -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        end = EndNode(node=NodeId("n1"), exit_code=0, reason=Reason.JOB_FINISHED)
        async with serving(master) as (server, endpoint):
            agent = Agent(endpoint).start()
            await until(lambda: agent.connected)
            for command in (prepare(5), prepare(5), prepare(4), prepare(6), end):
                server.send(command)
            await until(lambda: end in agent.commands)
            await agent.close()
        assert agent.commands == [prepare(5), prepare(6), end]

    asyncio.run(scenario())


def test_a_master_of_an_older_epoch_is_not_obeyed() -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master, epoch=7) as (_, endpoint):
            agent = Agent(endpoint).start()
            await until(lambda: agent.connected)
        await until(lambda: not agent.connected)
        async with serving(master, port=endpoint.port, epoch=6) as (server, _):
            await until(lambda: "epoch" in agent.link.trouble)
            server.send(prepare(1))
            assert agent.states.count(LinkState.CONNECTED) == 1
        async with serving(master, port=endpoint.port, epoch=8) as (server, _):
            await until(lambda: agent.connected)
            await agent.close()
        assert agent.commands == []

    asyncio.run(scenario())


def test_another_job_and_another_protocol_are_refused_with_what_to_do() -> None:
    async def scenario() -> None:
        async with serving(RecordingMaster()) as (_, endpoint):
            other = Agent(endpoint, job=JobId("job-2"))
            with pytest.raises(JobMismatch, match="--rdzv-id"):
                await asyncio.wait_for(other.link.run(), PATIENCE_S)
            future = Agent(endpoint, said=hello(protocol_min=90, protocol_max=91))
            with pytest.raises(ProtocolMismatch, match="same aimaster-ft on every node"):
                await asyncio.wait_for(future.link.run(), PATIENCE_S)

    asyncio.run(scenario())


def test_of_two_agents_with_one_node_id_the_living_one_stays() -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master) as (_, endpoint):
            first = Agent(endpoint, incarnation="i1").start()
            await until(lambda: first.connected)
            second = Agent(endpoint, incarnation="i2")
            with pytest.raises(AlreadyRunning, match="--node-id"):
                await asyncio.wait_for(second.link.run(), PATIENCE_S)
            assert first.connected
            await first.close()
            third = Agent(endpoint, incarnation="i3").start()
            await until(lambda: third.connected)
            await third.close()

    asyncio.run(scenario())


def test_a_silent_session_gives_way_to_a_new_agent() -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master) as (_, endpoint):
            # Says hello like an agent, then nothing: the agent's host is gone, its connection is not.
            ghost = Agent(endpoint, incarnation="i1")
            async with grpc.aio.insecure_channel(str(endpoint)) as channel:
                call = channel.stream_stream(contract.SESSION_METHOD)()
                await call.write(ghost.link._encode(hello()))
                await call.read()
                agent = Agent(endpoint, incarnation="i2").start()
                await until(lambda: agent.connected)
                assert [identity.incarnation for identity, _ in master.hellos] == ["i1", "i2"]
                call.cancel()
            assert agent.connected
            await agent.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("data", [b"", b"\xff\xff\xff", b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 600_000])
def test_what_is_no_agent_ends_its_own_stream_only(data: bytes) -> None:
    async def scenario() -> None:
        master = RecordingMaster()
        async with serving(master) as (_, endpoint):
            agent = Agent(endpoint).start()
            await until(lambda: agent.connected)
            async with grpc.aio.insecure_channel(str(endpoint)) as channel:
                call = channel.stream_stream(contract.SESSION_METHOD)()
                await call.write(data)
                assert await call.code() in (
                    grpc.StatusCode.INVALID_ARGUMENT,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                )
            seen = len(master.beats)
            await until(lambda: len(master.beats) > seen)
            assert agent.states.count(LinkState.CONNECTED) == 1
            await agent.close()

    asyncio.run(scenario())


def test_the_link_reports_only_an_agents_own_facts() -> None:
    async def scenario() -> None:
        async with serving(RecordingMaster()) as (_, endpoint):
            agent = Agent(endpoint)
            with pytest.raises(TypeError):
                agent.link.report(
                    NodeSuspected(node=NodeId("n1"), incarnation=Incarnation("i1"), silent_s=1.0)
                )

    asyncio.run(scenario())


def test_a_link_to_something_that_says_nothing_can_be_closed() -> None:
    """gRPC gives such a connection up after twenty seconds only."""

    async def scenario() -> None:
        with socket.socket() as stranger:
            stranger.bind(("127.0.0.1", 0))
            stranger.listen()
            stranger.setblocking(False)
            agent = Agent(Endpoint(host="127.0.0.1", port=stranger.getsockname()[1])).start()
            connection, _ = await asyncio.get_running_loop().sock_accept(stranger)
            with connection:
                await agent.link.close()
                assert agent.task is not None
                await asyncio.wait_for(agent.task, 10)
        assert agent.states == [LinkState.CONNECTING, LinkState.CLOSED]

    asyncio.run(scenario())


def test_an_agent_that_does_not_read_is_cut_off() -> None:
    async def scenario() -> None:
        master = RecordingMaster(interval_s=60.0)
        async with serving(master) as (server, endpoint):
            deaf = Agent(endpoint)
            async with grpc.aio.insecure_channel(str(endpoint)) as channel:
                call = channel.stream_stream(contract.SESSION_METHOD)()
                await call.write(deaf.link._encode(hello()))
                await until(lambda: server.connected(NodeId("n1")))
                for generation in range(1, 200):
                    server.send(prepare(generation))
                await until(lambda: master.gone)
                assert not server.connected(NodeId("n1"))
                call.cancel()

    asyncio.run(scenario())
