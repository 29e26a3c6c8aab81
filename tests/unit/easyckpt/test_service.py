"""When a saver ends, and what makes it stay."""

from __future__ import annotations

import asyncio
from pathlib import Path

from easyckpt.saver.protocol import Begin
from easyckpt.saver.service import Saver, SaverConfig

DRAIN_S = 5.0


def place(generation: int) -> Begin:
    return Begin(generation=generation, node_rank=0, nodes=1, first_rank=0, ranks=1, world_size=1)


def test_who_begins_when_the_end_is_decided_is_not_turned_away(tmp_path: Path) -> None:
    async def scenario() -> None:
        saver = Saver(SaverConfig(socket_path=str(tmp_path / "s"), job_id="job"))
        saver.listen()
        saver.begin(place(1))
        running = asyncio.ensure_future(saver.run())
        for generation in (2, 3):
            await asyncio.sleep(0)
            saver.shutdown(DRAIN_S)
            saver.begin(place(generation))
            await asyncio.wait({running}, timeout=0.2)  # nothing tells that it stays
            assert not running.done()
            assert saver.welcome().generation == generation
        saver.shutdown(DRAIN_S)
        await asyncio.wait_for(running, 30)
        assert not (tmp_path / "s").exists()

    asyncio.run(scenario())
