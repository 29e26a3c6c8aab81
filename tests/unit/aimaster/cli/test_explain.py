"""`aimaster explain` and `aimaster events`: the story of an incident, from a journal and nothing else."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from aimaster.cli.app import app
from aimaster.cli.follow import _Led, follow
from aimaster.core.events import HangKind, RestartScope, StackGroup, WorkersHung
from aimaster.core.sights import Activity, Wait
from aimaster.errors import AimasterError, MasterUnreachable, UsageError
from aimaster.ids import Incarnation, NodeId
from aimaster.journal.base import Entry
from aimaster.journal.sqlite import SqliteJournal
from tests.runs import AIMASTER, DEADLINE_S
from tests.unit.aimaster.core.play import Play
from tests.unit.aimaster.journal.stories import a_job, records, write


def folder_of(play: Play, folder: Path) -> Path:
    with SqliteJournal.open(folder / "journal.db") as journal:
        write(journal, play)
    return folder


def call(*words: str | Path) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def explained(folder: Path, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(call("explain", *words, "--json", "--state-dir", folder))
    return found


def test_the_first_cause_is_told_and_the_echo_is_called_one(tmp_path: Path) -> None:
    play = Play((2, 2))
    play.run("a", "b")
    current = play.view().generation
    play.exited(
        "a", code=1, error="RuntimeError: gloo/transport/tcp/pair.cc:547 Connection closed by peer", step=40
    )
    play.exited("b", code=1, error="OSError: [Errno 28] No space left on device", step=40, generation=current)
    play.restart()
    play.stepped("a", 41)
    story = explained(folder_of(play, tmp_path))
    assert (story["rule"], story["blame"], story["who"]) == ("disk_full", "storage", "rank 1 on b")
    assert any("peer_closed" in line for line in story["echoes"])
    assert story["incident"]["recovered_s"] is not None
    assert [phase["phase"] for phase in story["downtime"]] == ["stop", "rendezvous", "warm up"]
    down_s = sum(phase["seconds"] for phase in story["downtime"])
    assert down_s == pytest.approx(story["incident"]["recovered_s"])


def test_a_hang_is_told_with_its_stacks_and_limit(tmp_path: Path) -> None:
    play = Play((2, 2))
    play.run("a", "b")
    groups = (
        StackGroup(
            ranks="0", activity=Activity.IDLE, wait=Wait.COLLECTIVE, where="backward",
            collective="all_reduce #41", stack="backward (/x/_tensor.py:1)\n<module> (/x/train.py:9)",
        ),
        StackGroup(
            ranks="1", activity=Activity.STOPPED, wait=Wait.OTHER, where="<module>", collective="", stack=""
        ),
    )  # fmt: skip
    play.stepped("a", 1)
    play.now += 9.0
    play.tell(
        WorkersHung(
            generation=play.view().generation, kind=HangKind.STOPPED, node=NodeId("b"), culprits=(1,),
            stalled_s=3.5, limit_s=3.0, step=40, groups=groups,
        )
    )  # fmt: skip
    folder = folder_of(play, tmp_path)
    text = call("explain", "--state-dir", folder)
    for part in ("no rank made a step for 3.5 s after step 40", "rank 1 on b", "all_reduce #41", "limit 3 s"):
        assert part in text
    story = explained(folder)
    assert (story["rule"], story["incident"]["kind"]) == ("rank_stopped", "worker_hung")
    assert story["incident"]["hang"]["groups"][0]["collective"] == "all_reduce #41"
    assert story["downtime"][0] == {"phase": "detect", "seconds": pytest.approx(3.5)}


def test_any_incident_may_be_asked_for_and_the_others_are_named(tmp_path: Path) -> None:
    folder = folder_of(a_job(), tmp_path)
    assert explained(folder)["incident"]["id"] == 2
    assert explained(folder, "1")["rule"] == "killed"
    assert "1: worker_killed" in call("explain", "--state-dir", folder)
    with pytest.raises(UsageError, match="no incident 7"):
        call("explain", "7", "--state-dir", folder)


def test_own_rules_speak_first_from_a_flag_or_from_the_jobs_folder(tmp_path: Path) -> None:
    folder = folder_of(a_job(), tmp_path)
    own = tmp_path / "own.yaml"
    own.write_text("- {name: ours, match: {signal: 9}, cause: us, blame: user, retry: once, do: ask}")
    assert explained(folder, "1", "--rules", str(own))["rule"] == "ours"
    own.rename(folder / "rules.yaml")
    assert explained(folder, "1")["rule"] == "ours"


def test_a_node_that_started_again_alone_is_told_as_such(tmp_path: Path) -> None:
    play = Play((2, 2), scope=RestartScope.NODE)
    play.run("a", "b")
    play.join("c")
    play.exited("b")
    play.prepared("b")
    play.started("b")
    play.stepped("b", 5)
    play.died("b")
    play.prepared("c")
    play.started("c")
    play.stepped("c", 6)
    folder = folder_of(play, tmp_path)
    told = call("explain", "1", "--state-dir", folder)
    assert "the workers of b were started again while the others went on, as attempt 1" in told
    assert "--restart-scope node says" in told
    told = call("explain", "2", "--state-dir", folder)
    assert "c took the place of b while the others went on, as attempt 2" in told


def test_events_are_one_line_each(tmp_path: Path) -> None:
    play = a_job()
    folder = folder_of(play, tmp_path)
    lines = call("events", "--state-dir", folder).splitlines()
    assert len(lines) == len(play.seen)
    assert "worker failed: rank 1 on b by signal 9" in "\n".join(lines)
    rows = [
        json.loads(line)
        for line in call("events", "--json", "--last", "3", "--state-dir", folder).splitlines()
    ]
    assert [row["seq"] for row in rows] == list(range(len(play.seen) - 2, len(play.seen) + 1))
    assert all(row["schema"] == 1 and row["event"]["is"] for row in rows)


def test_a_job_without_incidents_and_no_job_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play((1, 1))
    play.run("a")
    assert "no incident" in call("explain", "--state-dir", folder_of(play, tmp_path))
    assert explained(tmp_path)["incident"] is None
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "empty"))
    for words in (("explain",), ("events",), ("explain", "--job-id", "nobody")):
        with pytest.raises(AimasterError):
            call(*words)
    with pytest.raises(UsageError):
        call("explain", "--job-id", "../x")


WARNINGS = """/x/site-packages/torch/utils/data.py:12: UserWarning: 8 workers are too many
  warnings.warn(message)
[rank1]:[W1201 14:48:50.1 ProcessGroupGloo.cpp:12] Warning: disk is full of warnings
step 41 is done"""


def test_what_was_printed_before_a_signal_is_not_called_its_cause(tmp_path: Path) -> None:
    play = Play((1, 1))
    play.run("a")
    play.exited("a", error=WARNINGS, step=41)
    story = explained(folder_of(play, tmp_path))
    assert story["rule"] == "killed"
    assert story["evidence"] == [
        "its last output, which need not have to do with it:",
        "    step 41 is done",
    ]


def test_what_the_rule_went_by_is_quoted_alone(tmp_path: Path) -> None:
    play = Play((1, 1))
    play.run("a")
    play.exited("a", error=f"the kernel: oom-kill\n{WARNINGS}", step=41)
    own = tmp_path / "own.yaml"
    own.write_text("- {name: oom, match: {text: oom-kill}, cause: us, blame: user, retry: once, do: ask}")
    story = explained(folder_of(play, tmp_path), "--rules", str(own))
    assert story["evidence"] == ["the kernel: oom-kill"]


def test_events_are_followed_to_the_end_of_the_job(tmp_path: Path) -> None:
    """A real follower beside a journal that grows; it ends by itself with the job."""
    play = a_job()
    written = records(play)
    with SqliteJournal.open(tmp_path / "journal.db") as journal:
        journal.begin_life(Incarnation("m1"), policy=play.machine.policy, at_s=0.0, wall_s=0.0)
        journal.append(written[:3])
        follower = subprocess.Popen(
            [*AIMASTER, "events", "--follow", "--last", "2", "--json", "--state-dir", str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert follower.stdout is not None
        seen = [json.loads(follower.stdout.readline())["seq"] for _ in range(2)]
        for record in written[3:]:
            journal.append([record])
        rest, _ = follower.communicate(timeout=DEADLINE_S)
        seen += [json.loads(line)["seq"] for line in rest.splitlines()]
    assert follower.returncode == 0
    assert seen == list(range(2, len(written) + 1))


def test_a_journal_that_nobody_writes_any_more_is_not_followed_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play((1, 1))
    play.run("a")
    path = tmp_path / "journal.db"
    journal = SqliteJournal.open(path)
    write(journal, play)
    seen: list[int] = []
    monkeypatch.setattr("aimaster.cli.follow.GONE_S", 0.0)
    monkeypatch.setattr("aimaster.cli.follow.EVERY_S", 0.01)
    looked = threading.Event()
    held = _Led._is_held

    def look(self: _Led) -> bool:
        found = held(self)
        if found:
            looked.set()
        return found

    monkeypatch.setattr(_Led, "_is_held", look)

    def close() -> None:
        looked.wait(DEADLINE_S)
        journal.close()

    closer = threading.Thread(target=close)
    closer.start()
    with pytest.raises(MasterUnreachable, match="nobody has led"):
        follow(path, last=None, say=lambda entry: seen.append(entry.seq))
    closer.join()
    assert seen == list(range(1, len(play.seen) + 1))


def test_a_new_job_in_the_same_place_ends_the_following(tmp_path: Path) -> None:
    play = a_job()
    path = tmp_path / "journal.db"
    with SqliteJournal.open(path) as journal:
        journal.begin_life(Incarnation("m1"), policy=play.machine.policy, at_s=0.0, wall_s=0.0)
        journal.append(records(play)[:-1])
    seen: list[int] = []

    def say(entry: Entry) -> None:
        seen.append(entry.seq)
        if entry.seq == len(play.seen) - 1:
            path.unlink()
            with SqliteJournal.open(path) as other:
                other.begin_life(Incarnation("m2"), policy=play.machine.policy, at_s=0.0, wall_s=0.0)
                other.append(records(play)[:1])

    follow(path, last=None, say=say)
    assert seen == list(range(1, len(play.seen)))
