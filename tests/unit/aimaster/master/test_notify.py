"""Notices: which steps of a job are worth one, and how they come to a webhook and a command."""

from __future__ import annotations

import http.server
import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aimaster.config import WatchConfig
from aimaster.core.notices import Notice, NoticeKind, Notices
from aimaster.errors import UsageError
from aimaster.ids import JobId
from aimaster.master.notify import QUEUE_MAX, CommandTarget, Notifier, Undelivered, WebhookTarget, body_of
from aimaster.master.options import watch_from
from tests.runs import DEADLINE_S, until
from tests.unit.aimaster.core.play import Play
from tests.unit.aimaster.journal.stories import a_job

SECRET = "T000-very-secret"
QUICK_S = 0.001


class Server:
    """A real server that answers as it is told, and keeps what it was sent."""

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.may_answer.wait(DEADLINE_S)
                code = outer.answers.pop(0) if outer.answers else 200
                outer.paths.append(self.path)
                outer.bodies.append(json.loads(body))
                self.send_response(code)
                if 300 <= code < 400:
                    self.send_header("Location", "/elsewhere")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/hook/{SECRET}"


@contextmanager
def serving(*answers: int) -> Iterator[Server]:
    server = Server(list(answers))
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.may_answer.set()
        server.http.shutdown()
        thread.join()
        server.http.server_close()


def body(text: str = "worker failed") -> bytes:
    return body_of(Notice(kind=NoticeKind.INCIDENT, sentence=text), job=JobId("j"), at_wall_s=1.0)


def kinds(play: Play, notices: Notices) -> list[str]:
    found = [notices.take(event, decision) for event, decision, _ in play.seen]
    return [notice.kind.value for notice in found if notice is not None]


def test_what_is_worth_a_notice() -> None:
    assert kinds(a_job(), Notices()) == ["incident", "recovered", "incident", "ended"]


def test_a_master_that_takes_over_in_trouble_tells_of_the_recovery() -> None:
    play = Play((1, 1))
    play.run("a")
    play.stepped("a", 1)
    assert kinds(play, Notices(in_trouble=True)) == ["recovered"]
    assert kinds(play, Notices()) == []


def test_the_end_says_how() -> None:
    play = Play((1, 1), max_restarts=0)
    play.run("a")
    play.exited("a", code=7, step=3)
    notices = Notices()
    (notice,) = [found for event, decision, _ in play.seen if (found := notices.take(event, decision))]
    assert (notice.kind, notice.exit_code) == (NoticeKind.ENDED, 20)
    assert "exit code 7" in notice.sentence


def test_a_webhook_that_fails_twice_is_told_in_the_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with serving(500, 503) as server:
        notifier = Notifier([WebhookTarget(server.url)], first_pause_s=QUICK_S)
        notifier.put(body())
        until(lambda: len(server.bodies) == 3, "the third try")
        notifier.close(DEADLINE_S)
    assert {one["text"] for one in server.bodies} == {"aimaster job j: worker failed"}
    assert (server.bodies[0]["schema"], server.bodies[0]["kind"]) == (1, "incident")
    assert SECRET not in caplog.text
    assert "HTTP 500" in caplog.text
    assert "127.0.0.1" in caplog.text


@pytest.mark.parametrize("answer", [404, 302])
def test_a_webhook_that_will_never_do_is_asked_once(answer: int) -> None:
    with serving(answer) as server:
        notifier = Notifier([WebhookTarget(server.url)], first_pause_s=QUICK_S)
        notifier.put(body("one"))
        notifier.put(body("two"))
        notifier.close(DEADLINE_S)
    assert [one["text"][-3:] for one in server.bodies] == ["one", "two"]
    assert all(path.startswith("/hook/") for path in server.paths), "no redirect is followed"


def test_a_server_that_hangs_holds_nobody_up_and_the_queue_is_bounded(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with serving() as server:
        server.may_answer.clear()
        heard = tmp_path / "heard"
        command = CommandTarget(f'{sys.executable} -c \'open("{heard}", "a").write(input() and "x")\'')
        notifier = Notifier([WebhookTarget(server.url), command], first_pause_s=QUICK_S)
        for number in range(QUEUE_MAX + 50):
            notifier.put(body(str(number)))
        until(heard.exists, "the command is told all the same")
        assert "newer ones are dropped" in caplog.text
        notifier.close(0.0)
    assert len(server.bodies) <= QUEUE_MAX + 2


def test_a_port_where_nobody_listens_is_tried_again_and_named_without_its_path() -> None:
    with serving() as server:
        url = server.url
    trouble = WebhookTarget(url).send(body())
    assert trouble is not None
    assert not trouble.for_good
    assert SECRET not in trouble.why


def test_a_command_has_the_object_on_its_input_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIMASTER_JOB_SECRET", SECRET)
    out = tmp_path / "out.json"
    program = "import json, os, sys; print(json.dumps([json.load(sys.stdin), dict(os.environ)]))"
    script = tmp_path / "tell.sh"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{program}' > {out}\n")
    script.chmod(0o700)
    assert CommandTarget(str(script)).send(body()) is None
    said, env = json.loads(out.read_text())
    assert said["text"] == "aimaster job j: worker failed"
    assert SECRET not in env.values()


def test_a_command_that_fails_or_hangs_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CommandTarget("sh -c 'exit 3'").send(body()) == Undelivered(why="exit code 3")
    missing = CommandTarget("/nowhere/at/all").send(body())
    assert missing is not None
    assert missing.for_good
    monkeypatch.setattr("aimaster.master.notify.COMMAND_TIMEOUT_S", 0.05)
    late = CommandTarget("sh -c 'sleep 600 & sleep 600'").send(body())
    assert late is not None
    assert "not done" in late.why


def is_dead(pid: str) -> bool:
    """Gone, or dead and not waited for yet by whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_command_that_is_given_up_is_gone_with_what_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    notifier = Notifier([CommandTarget(f"sh -c 'sleep 600 & echo $! $$ > {pids}; wait'")])
    notifier.put(body())
    until(lambda: pids.exists() and pids.read_text().endswith("\n"), "it runs")
    notifier.close(0.0)
    for pid in pids.read_text().split():
        until(lambda pid=pid: is_dead(pid), f"{pid} is gone")  # type: ignore[misc]


@pytest.mark.parametrize(
    "url", ["nonsense", "ftp://host/x", "http://", f"http://host/{SECRET} x", "http://h:x/"]
)
def test_what_is_no_address_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        watch_from(WatchConfig(webhook=url), {})
    assert SECRET not in str(caught.value)
    assert SECRET not in repr(WatchConfig(webhook=url))


@pytest.mark.parametrize("command", ["", "  ", "say 'x"])
def test_what_is_no_command_is_refused(command: str) -> None:
    with pytest.raises(UsageError, match="command line"):
        watch_from(WatchConfig(command=command), {})
