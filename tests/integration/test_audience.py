"""Those whom a real job tells of itself while it runs: a webhook, a command, TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.runs import script, start_run, until
from tests.unit.aimaster.master.test_notify import SECRET, serving

FAILS_ONCE = """
import os, time
assert not [name for name in os.environ if "WEBHOOK" in name], "no business of the training's"
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise SystemExit(7)
while not os.path.exists("enough"):
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_a_job_tells_whom_it_was_asked_to_tell(tmp_path: Path) -> None:
    heard, board = tmp_path / "heard.jsonl", tmp_path / "board"
    words = ["--notify-command", shlex.join(["sh", "-c", f"cat >> {heard}; echo >> {heard}"])]
    if importlib.util.find_spec("tensorboard") is not None:
        words += ["--tensorboard", str(board)]
    with serving(500) as server:
        env = {"AIMASTER_NOTIFY_WEBHOOK": server.url}
        run = start_run(tmp_path, *words, script(tmp_path, FAILS_ONCE), env=env)
        until(lambda: len(server.bodies) == 2 and heard.exists(), "the incident is told, at the second try")
        (tmp_path / "enough").touch()
        assert run.wait() == 0, run.stderr
    told: list[dict[str, Any]] = [json.loads(line) for line in heard.read_text().splitlines()]
    assert [one["kind"] for one in told] == ["incident", "ended"]
    assert [one["exit_code"] for one in told] == [None, 0]
    assert server.bodies[0] == server.bodies[1] == told[0], "the first try was refused"
    assert server.bodies[-1] == told[1]
    logs = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert logs
    assert not [path for path in logs if SECRET.encode() in path.read_bytes()]
    assert SECRET not in run.stderr
    if "--tensorboard" in words:
        assert list(board.glob("*tfevents*"))
