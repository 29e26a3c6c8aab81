"""The kernel's counter of processes that were killed for want of memory, in both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from aimaster.agent.oom import OomKills


@pytest.mark.parametrize(
    ("membership", "file"),
    [
        pytest.param("0::/user/job\n", "user/job/memory.events", id="version 2"),
        pytest.param("0::/../other\n", "memory.events", id="version 2 in a container"),
        pytest.param("5:cpu:/\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control", id="version 1"),
    ],
)
def test_only_kills_since_the_mark_count(tmp_path: Path, membership: str, file: str) -> None:
    place = tmp_path / file
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("low 0\noom_kill_disable 0\noom_kill 2\n")
    kills = OomKills(root=tmp_path, membership=membership)
    assert (kills.since(), kills.sentence()) == (0, "")
    place.write_text("low 0\noom_kill 5\n")
    assert kills.since() == 3
    assert kills.sentence().startswith("oom_kill: ")
    kills.mark()
    assert kills.since() == 0


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path) -> None:
    assert OomKills(root=tmp_path, membership="").since() == 0
    assert OomKills(root=tmp_path, membership="0::/x\n").since() == 0
    (tmp_path / "memory.events").write_text("oom_kill many\n")
    assert OomKills(root=tmp_path, membership="0::/\n").since() == 0
