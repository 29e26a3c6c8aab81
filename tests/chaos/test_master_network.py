"""Agents and a master on hosts of their own: a pulled cable is noticed, and harms nothing if it is short."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import Cluster, Host

PATIENCE_S = 60.0
PORT = 29_400

AGENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[4])
from aimaster.rpc.transport import Endpoint
from tests.integration.master_process import FakeAgent

async def main():
    agent = FakeAgent(Endpoint.parse(sys.argv[1]), sys.argv[2], nnodes=(2, 2))
    said = None
    while not agent.task.done():
        await asyncio.sleep(0.02)
        now = (agent.connected, len(agent.starts), agent.start.generation if agent.start else 0)
        if now != said:
            said = now
            with open(sys.argv[3], "a") as file:
                print(*[int(one) for one in now], file=file)

asyncio.run(main())
"""

pytestmark = [pytest.mark.netns, pytest.mark.slow]


def start_master(host: Host, state_dir: Path, *times: str) -> None:
    words = [sys.executable, "-m", "aimaster.master", "--job-id", "job-1", "--listen", f"0.0.0.0:{PORT}"]
    host.popen([*words, "--state-dir", str(state_dir), "--last-call", "0.5", "--insecure", *times])


def start_agent(host: Host, master: Host, node: str, story: Path) -> Path:
    root = str(Path(__file__).resolve().parents[2])
    host.popen([sys.executable, "-c", AGENT, f"{master.address}:{PORT}", node, str(story), root])
    return story


def told(story: Path) -> list[tuple[int, int, int]]:
    """What an agent went through: connected or not, starts of workers, generation."""
    if not story.exists():
        return []
    return [tuple(int(word) for word in line.split()) for line in story.read_text().splitlines()]  # type: ignore[misc]


def until(condition: Callable[[], object], what: str) -> None:
    """Poll: what happens on another host gives no signal here."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def running(cluster: Cluster, tmp_path: Path, *times: str) -> list[Path]:
    """A job of two agents on hosts 1 and 2, led from host 0, with its workers started."""
    start_master(cluster[0], tmp_path / "state", *times)
    stories = [
        start_agent(cluster[number], cluster[0], f"n{number}", tmp_path / f"story{number}")
        for number in (1, 2)
    ]
    until(lambda: all((1, 1, 1) in told(story) for story in stories), "the job does not start")
    return stories


def test_a_short_cut_is_survived(make_cluster: Callable[[int], Cluster], tmp_path: Path) -> None:
    cluster = make_cluster(3)
    # A beat is missed for long enough that the link gives up, but the node is not yet.
    times = ("--heartbeat-interval", "0.5", "--suspect-after", "30", "--dead-after", "60")
    stories = running(cluster, tmp_path, *times)
    cluster[2].cut()
    until(lambda: told(stories[1])[-1][0] == 0, "the agent does not notice the cut")
    cluster[2].heal()
    until(lambda: told(stories[1])[-1][0] == 1, "the agent does not come back")
    assert told(stories[0])[-1] == (1, 1, 1)
    assert told(stories[1])[-1] == (1, 1, 1), "workers were started again"


def test_a_long_cut_loses_the_node_and_it_comes_back(
    make_cluster: Callable[[int], Cluster], tmp_path: Path
) -> None:
    cluster = make_cluster(3)
    times = ("--heartbeat-interval", "0.5", "--suspect-after", "3", "--dead-after", "6")
    stories = running(cluster, tmp_path, *times)
    cluster[2].cut()
    until(lambda: incidents(tmp_path / "state"), "the loss is not noticed")
    cluster[2].heal()
    until(lambda: all(told(story)[-1][:2] == (1, 2) for story in stories), "they do not start again")
    (incident,) = incidents(tmp_path / "state")
    assert (incident["kind"], incident["node"]) == ("node_lost", "n2")


def incidents(state_dir: Path) -> list[dict[str, str]]:
    """By the journal, read in another process as a command would."""
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from aimaster.journal.incidents import incidents\n"
        "from aimaster.journal.sqlite import SqliteJournal\n"
        "with SqliteJournal.read(Path(sys.argv[1])) as journal:\n"
        "    found = incidents(journal.entries())\n"
        "print(json.dumps([{'kind': one.kind.value, 'node': one.node} for one in found]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(state_dir / "journal.db")],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found
