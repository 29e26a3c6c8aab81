"""SIGKILL of the master at any moment, again and again, while a job lives, fails and ends.

Whatever the moment: no worker is started twice in one generation, no failure is counted twice, nothing that
an agent was told or has said is forgotten, and the journal replays to the state that it says.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from aimaster.core.events import WorkerExited
from aimaster.journal.incidents import incidents
from aimaster.journal.replay import replay
from aimaster.journal.sqlite import SqliteJournal
from tests.integration.master_process import PATIENCE_S, FakeAgent, MasterProcess, master_at, until

FAILURES = 3


async def keep_killing(master: MasterProcess, rng: random.Random, *, over: asyncio.Event) -> int:
    """Kill it at moments drawn by chance and start it again, until the job is over. The first comes early."""
    kills = 0
    while not over.is_set():
        longest = 30.0 if kills else 0.4
        await asyncio.sleep(min(rng.expovariate(1 / 0.4), longest))  # the moment is the point
        assert master.process is not None
        if over.is_set() or master.process.returncode == 0:
            break
        await master.kill()
        kills += 1
        word = await master.start("--revive")
        assert "endpoint" in word, (word, master.log())
    return kills


async def live_and_fail(agents: list[FakeAgent], rng: random.Random) -> None:
    """Attempts that fail, then one that finishes."""
    for attempt in range(FAILURES + 1):
        await until(lambda attempt=attempt: all(len(agent.starts) == attempt + 1 for agent in agents))
        for agent in agents:
            agent.first_step(100 * attempt + 1)
        await asyncio.sleep(rng.uniform(0, 1.0))  # so that kills fall before, between and after
        if attempt < FAILURES:
            rng.choice(agents).worker_ends(exit_code=None, step=100 * attempt + 50)
    for agent in agents:
        agent.worker_ends(0)
    await until(lambda: all(agent.ended for agent in agents))
    await asyncio.wait_for(asyncio.gather(*(agent.task for agent in agents)), PATIENCE_S)


@pytest.mark.slow
@pytest.mark.parametrize("round_", range(3))
def test_killed_at_many_points(tmp_path: Path, seed: int, round_: int) -> None:
    async def scenario() -> int:
        rng = random.Random(seed + round_)
        over = asyncio.Event()
        async with master_at(tmp_path) as master:
            agents = [FakeAgent(master.endpoint, f"n{i}", nnodes=(3, 3)) for i in range(3)]
            killer = asyncio.create_task(keep_killing(master, rng, over=over))
            await live_and_fail(agents, rng)
            over.set()
            kills = await killer
            assert await master.ended() == 0
        for agent in agents:
            generations = [start.generation for start in agent.starts]
            assert generations == sorted(set(generations)), "a generation was started twice"
            assert [start.attempt for start in agent.starts] == list(range(FAILURES + 1))
        return kills

    kills = asyncio.run(scenario())
    with SqliteJournal.read(tmp_path / "journal.db") as journal:
        entries = list(journal.entries())
        assert replay(journal).digest() == entries[-1].record.digest
        assert len(incidents(entries)) == FAILURES
        failures = [e for e in entries if isinstance(e.record.event, WorkerExited) and not e.record.event.ok]
        assert len(failures) == FAILURES, "a failure was taken in twice, or not at all"
        assert len(journal.lives()) == kills + 1
    assert kills > 0
