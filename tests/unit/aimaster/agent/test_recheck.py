"""Looks at this node, with the real checks: what was found, who is told, and when workers may start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import pytest

from aimaster.agent.recheck import CHECKS, Rechecks
from aimaster.agent.reports import WorkerExit
from aimaster.cli.run import config_from
from aimaster.core.diagnosis import Rule
from aimaster.core.events import NodeChecked, NodeEvent, Suspicion
from aimaster.ids import Generation, Incarnation, JobId, NodeId
from aimaster.rpc.messages import Identity
from aimaster.rules.table import load_rules
from sanitycheck.catalogue import by_id
from sanitycheck.check import Lane

ONE = Generation(1)
LONG_S = 240.0


class Node:
    """A node that looks at itself, and what it told."""

    def __init__(self, folder: Path, *flags: str) -> None:
        script = folder / "train.py"
        script.write_text("")
        self.checkpoints = folder / "checkpoints"
        words = ["--standalone", "--ckpt-dir", str(self.checkpoints), *flags, str(script)]
        config = config_from(words, {})
        assert config is not None
        self.told: list[NodeEvent] = []
        self.held = threading.Event()
        """A look at a failure begins when it is set."""
        self.held.set()
        self.looks = Rechecks(
            config,
            Identity(job=JobId("j"), node=NodeId("n"), incarnation=Incarnation("1")),
            rules=self._rules,
            report=self.told.append,
        )

    def _rules(self) -> Sequence[Rule]:
        assert self.held.wait(LONG_S)
        return load_rules()

    async def settled(self) -> str | None:
        """What stands against workers here."""
        return await self.looks.settled(ONE, unless=asyncio.Event())

    def fails(self, error: str) -> None:
        self.looks.worker_ended(
            WorkerExit(
                generation=ONE,
                attempt=0,
                local_rank=0,
                rank=0,
                pid=1,
                exit_code=1,
                signal=None,
                steps=None,
                saved_step=None,
                error=error,
                error_digest="",
                last_lines="",
            )
        )

    def looked(self) -> list[NodeChecked]:
        return [event for event in self.told if isinstance(event, NodeChecked)]


def in_loop(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 300))


BROKEN = "OSError: [Errno 5] Input/output error: '/data/x'"


def test_a_node_that_cannot_keep_checkpoints_takes_no_workers_until_it_is_mended(tmp_path: Path) -> None:
    async def play() -> None:
        node = Node(tmp_path)
        node.checkpoints.write_text("a file where a folder should be")
        node.fails(BROKEN)
        against = await node.settled()
        assert "store.ckpt_path: fail" in (against or "")
        assert "store.ckpt_path" in node.looks.note
        (told,) = node.looked()
        assert (told.why, told.blocking) == (Suspicion.FAILURE, True)
        assert told.findings[0].startswith("store.ckpt_path: fail")
        assert await node.settled() != ""
        node.checkpoints.unlink()
        assert await node.settled() == ""
        assert [one.blocking for one in node.looked()] == [True, True, False]
        await node.looks.close()

    in_loop(play())


def test_where_checks_only_warn_workers_start_and_people_are_told(tmp_path: Path) -> None:
    async def play() -> None:
        node = Node(tmp_path, "--sanity-check", "warn")
        node.checkpoints.write_text("a file where a folder should be")
        node.fails(BROKEN)
        assert await node.settled() == ""
        assert [one.blocking for one in node.looked()] == [True]

    in_loop(play())


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ((), "ZeroDivisionError: division by zero"),
        ((), ""),
        (("--sanity-check", "off"), BROKEN),
    ],
)
def test_what_says_nothing_about_the_node_costs_no_look(
    tmp_path: Path, flags: tuple[str, ...], error: str
) -> None:
    async def play() -> None:
        node = Node(tmp_path, *flags)
        node.fails(error)
        assert await node.settled() == ""
        assert node.told == []
        assert node.looks.note == ""

    in_loop(play())


def test_a_flood_of_suspicions_is_one_look(tmp_path: Path) -> None:
    async def play() -> None:
        node = Node(tmp_path)
        for _ in range(20):
            node.looks.suspect(Suspicion.SLOW, ONE)
        await node.settled()
        assert [one.why for one in node.looked()] == [Suspicion.SLOW]

    in_loop(play())


def test_a_look_that_is_given_up_leaves_nothing_behind(tmp_path: Path) -> None:
    async def play() -> None:
        node = Node(tmp_path)
        node.looks.suspect(Suspicion.SILENCE, ONE)
        await asyncio.sleep(0)
        await node.looks.close()
        assert node.told == []

    in_loop(play())


def test_whoever_is_called_away_does_not_wait_for_a_look_and_it_counts_for_the_next(tmp_path: Path) -> None:
    async def play() -> None:
        node = Node(tmp_path)
        node.checkpoints.write_text("a file where a folder should be")
        node.held.clear()
        node.fails(BROKEN)
        away = asyncio.Event()
        waits = asyncio.create_task(node.looks.settled(ONE, unless=away))
        await asyncio.sleep(0)
        assert not waits.done()
        away.set()
        assert await waits is None
        assert await node.looks.settled(ONE, unless=away) is None
        node.held.set()
        assert "store.ckpt_path: fail" in (await node.settled() or "")
        assert [one.blocking for one in node.looked()] == [True]

    in_loop(play())


@pytest.mark.parametrize("why", list(Suspicion))
def test_no_look_loads_what_trains(why: Suspicion) -> None:
    for name in CHECKS[why]:
        lane = by_id(name).lane
        assert lane is Lane.LIGHT or (name == "store.ckpt_path" and why not in _WHILE_WORKERS_RUN)


_WHILE_WORKERS_RUN = (Suspicion.SLOW, Suspicion.SILENCE)
