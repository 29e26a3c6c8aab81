"""A real master process over real gRPC: it leads a job, survives SIGKILL, and ends when it should."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from aimaster.journal.incidents import incidents
from aimaster.journal.sqlite import SqliteJournal
from aimaster.rpc.asking import fetch_status
from aimaster.rpc.security import Credentials
from aimaster.rpc.status import JobStatus
from aimaster.rpc.transport import Endpoint
from tests.integration.master_process import JOB, PATIENCE_S, FakeAgent, MasterProcess, master_at, until


async def status_of(endpoint: Endpoint, credentials: Credentials | None = None) -> JobStatus:
    return await asyncio.to_thread(
        fetch_status, endpoint, credentials or Credentials.insecure(), job=JOB, timeout_s=PATIENCE_S
    )


def test_a_job_from_its_first_agent_to_its_last_goodbye(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master_at(tmp_path) as master:
            agents = [FakeAgent(master.endpoint, name, nnodes=(2, 2), workers=2) for name in ("n1", "n2")]
            await until(lambda: all(agent.running for agent in agents))
            assert sorted(agent.start.first_rank for agent in agents if agent.start) == [0, 2]
            assert {agent.start.world_size for agent in agents if agent.start} == {4}
            for agent in agents:
                agent.first_step(1)
            status = await status_of(master.endpoint)
            assert (status.phase, status.generation, status.world_size) == ("running", 1, 4)
            assert [node.connected for node in status.nodes] == [True, True]
            assert master.process is not None
            assert status.master.pid == master.process.pid
            for agent in agents:
                agent.worker_ends(0)
                agent.worker_ends(1)
            await until(lambda: all(agent.ended for agent in agents))
            assert [agent.ended.exit_code for agent in agents if agent.ended] == [0, 0]
            assert await master.ended() == 0

    asyncio.run(scenario())


def test_a_failed_worker_restarts_everyone_and_becomes_an_incident(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master_at(tmp_path) as master:
            agents = [FakeAgent(master.endpoint, name, nnodes=(2, 2)) for name in ("n1", "n2")]
            await until(lambda: all(agent.running for agent in agents))
            agents[0].worker_ends(exit_code=None, step=7, error="x" * 4096)
            await until(lambda: all(len(agent.starts) == 2 for agent in agents))
            for agent in agents:
                agent.first_step(8)
            status = await status_of(master.endpoint)
            while status.incidents[0].recovered_s is None:
                status = await status_of(master.endpoint)
            (incident,) = status.incidents
            assert (incident.kind, incident.generation, incident.last_step) == ("worker_killed", 1, 7)
            assert len(incident.error) == 4096
            assert status.generation == 2
            for agent in agents:
                await agent.vanish()

    asyncio.run(scenario())


def test_sigkill_of_the_master_changes_nothing_for_the_training(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master_at(tmp_path) as master:
            agents = [FakeAgent(master.endpoint, name, nnodes=(2, 2)) for name in ("n1", "n2")]
            await until(lambda: all(agent.running for agent in agents))
            for round_ in range(3):
                await master.kill()
                agents[0].first_step(round_)  # said to nobody yet
                word = await master.start("--revive")
                assert word.get("epoch") == round_ + 2
                await until(lambda: all(agent.connected for agent in agents))
                assert await agents[0].link.flush(PATIENCE_S)
            status = await status_of(master.endpoint)
            assert (status.phase, status.generation, status.epoch) == ("running", 1, 4)
            assert [len(agent.starts) for agent in agents] == [1, 1]
            assert [agent.prepares for agent in agents] == [[1], [1]]
            for agent in agents:
                agent.worker_ends(0)
            await until(lambda: all(agent.ended for agent in agents))
            assert await master.ended() == 0

    asyncio.run(scenario())


def test_a_lost_node_is_replaced_by_a_spare(tmp_path: Path) -> None:
    times = ("--heartbeat-interval", "0.2", "--suspect-after", "2", "--dead-after", "4")

    async def scenario() -> None:
        async with master_at(tmp_path, *times) as master:
            agents = [FakeAgent(master.endpoint, name, nnodes=(2, 2)) for name in ("n1", "n2")]
            await until(lambda: all(agent.running for agent in agents))
            spare = FakeAgent(master.endpoint, "n3", nnodes=(2, 2))
            await until(lambda: spare.connected)
            lost = agents[1].start
            await agents[1].vanish()
            await until(lambda: spare.running)
            assert spare.start is not None
            assert lost is not None
            assert spare.start.node_rank == lost.node_rank
            assert agents[0].starts[-1].generation == spare.start.generation
            for agent in (agents[0], spare):
                await agent.vanish()
        with SqliteJournal.read(tmp_path / "journal.db") as journal:
            (incident,) = incidents(journal.entries())
        assert (incident.kind.value, incident.node) == ("node_lost", "n2")

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_frozen_master_blames_no_node(tmp_path: Path) -> None:
    import signal

    times = ("--heartbeat-interval", "0.2", "--suspect-after", "2", "--dead-after", "4")

    async def scenario() -> None:
        async with master_at(tmp_path, *times) as master:
            agent = FakeAgent(master.endpoint, "n1")
            await until(lambda: agent.running)
            assert master.process is not None
            master.process.send_signal(signal.SIGSTOP)
            # Not a wait for an event: the master has to be away for longer than it gives a node.
            await asyncio.sleep(6.0)
            master.process.send_signal(signal.SIGCONT)
            status = await status_of(master.endpoint)
            while not status.nodes[0].connected:
                status = await status_of(master.endpoint)
            assert (status.phase, status.generation, status.incidents) == ("running", 1, ())
            assert len(agent.starts) == 1
            await agent.vanish()

    asyncio.run(scenario())


def test_a_second_master_learns_that_the_port_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master_at(tmp_path / "one") as master:
            for state_dir in (tmp_path / "one", tmp_path / "two"):
                second = MasterProcess(state_dir, listen=master.listen)
                word = await second.start()
                assert word["error"] == "port_in_use"
                assert word["where"] == master.listen
                assert await second.ended() == 3

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("listen", "error"),
    [("192.0.2.1:0", "setup_error"), ("no-such-host.invalid:0", "setup_error"), ("nonsense", "usage_error")],
)
def test_an_address_that_cannot_be_listened_at(tmp_path: Path, listen: str, error: str) -> None:
    async def scenario() -> None:
        master = MasterProcess(tmp_path, listen=listen)
        word = await master.start()
        assert word["error"] == error, word
        assert word["next_step"]
        assert await master.ended() in (2, 3)

    asyncio.run(scenario())


def test_the_port_of_another_job_is_not_taken_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with master_at(tmp_path) as master:
            first = FakeAgent(master.endpoint, "n1")
            await until(lambda: first.running)
            other = FakeAgent(master.endpoint, "n2", nnodes=(3, 3))
            with pytest.raises(Exception, match="same command line"):
                await asyncio.wait_for(other.task, PATIENCE_S)
            await first.vanish()

    asyncio.run(scenario())


def test_a_finished_job_is_set_aside_and_its_name_can_be_used_again(tmp_path: Path) -> None:
    async def one_life() -> None:
        async with master_at(tmp_path) as master:
            agent = FakeAgent(master.endpoint, "n1")
            await until(lambda: agent.running)
            assert agent.start is not None
            assert agent.start.generation == 1
            agent.worker_ends(0)
            assert await master.ended() == 0
            await until(lambda: agent.ended)

    asyncio.run(one_life())
    asyncio.run(one_life())
    assert (tmp_path / "journal-1.db").exists()
    with SqliteJournal.read(tmp_path / "journal-1.db") as journal:
        assert len(list(journal.entries())) > 0


@pytest.mark.slow
def test_two_hundred_agents_join_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        count = 200
        async with master_at(
            tmp_path, "--heartbeat-interval", "2", "--suspect-after", "20", "--dead-after", "40"
        ) as m:
            agents = [FakeAgent(m.endpoint, f"n{i}", nnodes=(count, count)) for i in range(count)]
            await until(lambda: all(agent.running for agent in agents))
            assert sorted(agent.start.node_rank for agent in agents if agent.start) == list(range(count))
            assert {agent.start.generation for agent in agents if agent.start} == {1}
            await m.kill()
            await m.start("--revive")
            await until(lambda: all(agent.connected for agent in agents))
            status = await status_of(m.endpoint)
            assert status.generation == 1
            for agent in agents:
                agent.worker_ends(0)
            await until(lambda: all(agent.ended for agent in agents))
            assert await m.ended() == 0
            await asyncio.gather(*(agent.task for agent in agents))

    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(scenario())
