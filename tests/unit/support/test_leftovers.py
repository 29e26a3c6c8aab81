"""The leftover check finds what tests leave behind, and only that."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import pytest

from tests import leftovers
from tests.conftest import is_ours
from tests.leftovers import Watcher

DETACHED = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv('/bin/sleep', ['sleep', '600'])"


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "GRACE_S", 0.3)


def test_nothing_left_is_no_complaint() -> None:
    watcher = Watcher.start()
    subprocess.run(["true"], check=True)
    assert watcher.end_leftovers() == []


def test_child_is_found_and_ended() -> None:
    watcher = Watcher.start()
    child = subprocess.Popen(["sleep", "600"])
    found = watcher.end_leftovers()
    assert len(found) == 1
    assert "sleep 600" in found[0]
    assert child.wait(30) == -9


def test_detached_orphan_is_found_by_its_token() -> None:
    watcher = Watcher.start()
    subprocess.run([sys.executable, "-c", DETACHED], check=True)
    assert len(watcher.end_leftovers()) == 1
    deadline = time.monotonic() + 30
    while watcher.leftovers():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_older_processes_are_let_be() -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        watcher = Watcher.start()
        assert watcher.end_leftovers() == []
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()


def test_open_socket_and_memory_file_are_found() -> None:
    watcher = Watcher.start()
    server = socket.create_server(("127.0.0.1", 0))
    memory = os.memfd_create("forgotten")
    try:
        assert len(watcher.end_leftovers()) == 2
    finally:
        server.close()
        os.close(memory)
    assert watcher.end_leftovers() == []


def test_no_variable_of_ours_reaches_a_test() -> None:
    assert [name for name in os.environ if is_ours(name)] == []


def test_seed_can_be_given(seed: int) -> None:
    assert 0 <= seed < 2**31
