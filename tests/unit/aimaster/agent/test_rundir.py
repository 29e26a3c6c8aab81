"""Run directories: one live agent each, taken over after a crash, removed with nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from aimaster.agent.rundir import (
    SOCKET_NAME_BYTES_MAX,
    SOCKET_PATH_BYTES_MAX,
    STATES_KEPT_MAX,
    claim_run_dir,
    default_base,
    default_state_dir,
    prune_states,
)
from aimaster.errors import AlreadyRunning, FolderUnusable
from aimaster.ids import JobId, NodeId

JOB = JobId("j1")


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder whose name is so short that a socket's path fits into it, however pytest names its own."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


def test_folder_is_private_and_removed_with_what_is_above_it(tmp_path: Path) -> None:
    base = tmp_path / "base"
    run_dir = claim_run_dir(base, JOB, wanted=NodeId("a"), env={})
    assert run_dir.path == base / "j1" / "a"
    assert run_dir.path.stat().st_mode & 0o777 == 0o700
    (run_dir.path / "leftover").write_text("x")
    run_dir.remove()
    assert not base.exists()


def test_remove_leaves_another_node_alone(tmp_path: Path) -> None:
    first = claim_run_dir(tmp_path, JOB, wanted=NodeId("a"), env={})
    second = claim_run_dir(tmp_path, JOB, wanted=NodeId("b"), env={})
    first.remove()
    assert not first.path.exists()
    assert second.path.exists()
    second.remove()
    assert list(tmp_path.iterdir()) == [] if tmp_path.exists() else True


def test_two_agents_without_a_name_get_two_places(tmp_path: Path) -> None:
    first = claim_run_dir(tmp_path, JOB, wanted=None, env={})
    second = claim_run_dir(tmp_path, JOB, wanted=None, env={})
    assert first.node != second.node
    assert first.sockets != second.sockets
    first.remove()
    second.remove()


def test_node_ids_are_unique_on_a_machine_whatever_the_run_dir(short: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(short / "own")}
    first = claim_run_dir(short / "one", JOB, wanted=None, env=env)
    second = claim_run_dir(short / "two", JOB, wanted=None, env=env)
    assert first.node != second.node
    assert first.shared == second.shared
    first.remove()
    second.remove()
    assert not (short / "one").exists()
    assert not (short / "two").exists()
    assert list((short / "own").rglob("*")) == []


def test_last_agent_takes_away_what_a_killed_one_has_left(short: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(short / "own")}
    killed = claim_run_dir(short / "one", JOB, wanted=NodeId("killed"), env=env)
    last = claim_run_dir(short / "two", JOB, wanted=NodeId("last"), env=env)
    killed.release()  # what the kernel does for a killed process
    last.remove()
    assert list((short / "own").rglob("*")) == []


def test_wanted_place_of_a_live_agent_is_refused(tmp_path: Path) -> None:
    held = claim_run_dir(tmp_path, JOB, wanted=NodeId("a"), env={})
    with pytest.raises(AlreadyRunning, match="place of node a"):
        claim_run_dir(tmp_path, JOB, wanted=NodeId("a"), env={})
    held.remove()


def test_place_of_a_killed_agent_is_taken_over_with_its_files(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, signal, os\n"
        "from aimaster.agent.rundir import claim_run_dir\n"
        "d = claim_run_dir(pathlib.Path(sys.argv[1]), 'j1', wanted='a', env={})\n"
        "(d.path / 'kept').write_text('kept')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    again = claim_run_dir(tmp_path, JOB, wanted=NodeId("a"), env={})
    assert (again.path / "kept").read_text() == "kept"
    again.remove()


def test_socket_paths_fit_even_under_a_long_base(tmp_path: Path) -> None:
    long_base = tmp_path / ("x" * 100)
    with tempfile.TemporaryDirectory(prefix="am") as short:
        run_dir = claim_run_dir(long_base, JOB, wanted=NodeId("a"), env={"XDG_RUNTIME_DIR": short})
        path = run_dir.socket("n" * (SOCKET_NAME_BYTES_MAX - len(".sock")))
        assert len(os.fsencode(path)) <= SOCKET_PATH_BYTES_MAX
        run_dir.remove()
        assert list(Path(short).iterdir()) == []


def test_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FolderUnusable, match="cannot use the folder"):
        claim_run_dir(blocked, JOB, wanted=NodeId("a"), env={})


def test_defaults_follow_the_environment() -> None:
    assert default_base({"AIMASTER_RUN_DIR": "/r"}) == Path("/r")
    assert default_base({"XDG_RUNTIME_DIR": "/run/u"}) == Path(f"/run/u/aimaster-{os.getuid()}")
    assert default_state_dir({"XDG_STATE_HOME": "/s"}, JOB) == Path("/s/aimaster/j1")
    assert default_state_dir({"HOME": "/h"}, JOB) == Path("/h/.local/state/aimaster/j1")


def test_oldest_states_go_first_and_never_the_one_in_use(tmp_path: Path) -> None:
    folders = [tmp_path / f"job{n}" for n in range(STATES_KEPT_MAX + 3)]
    for age, folder in enumerate(folders):
        folder.mkdir()
        os.utime(folder, (age, age))
    prune_states(tmp_path, keep=folders[0])
    assert [f.exists() for f in folders[:4]] == [True, False, False, True]
