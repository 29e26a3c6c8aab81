"""Standard streams of workers behave as under torchrun."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.workers import AgentRun, run_agent, start_agent

DEADLINE_S = 90.0
LAUNCHERS_OWN = {"TORCHELASTIC_SIGNALS_TO_HANDLE", "LINES", "COLUMNS"}
"""What torchrun sets for itself, and its workers inherit."""
ONE: list[dict[str, Any]] = [{"start": {}}, {"exits_of": 1}, {"stop": 5}]
TWO: list[dict[str, Any]] = [{"start": {}}, {"exits_of": 2}, {"stop": 5}, {"last_lines": 1}]
TALK = """\
import os, sys
sys.stdout.write(f"out of {os.environ['RANK']}\\n")
sys.stderr.write(f"err of {os.environ['RANK']}\\n")
os.system("echo shell of $RANK")
"""
"""One write a line, for two ranks share torchrun's own pipe; print() takes one for each part."""


@pytest.fixture
def talk(tmp_path: Path) -> Path:
    path = tmp_path / "talk.py"
    path.write_text(TALK)
    return path


def _run(tmp: Path, script: Path, **spec: Any) -> AgentRun:
    return run_agent(tmp / "agent", target=str(script), warm=False, **spec)


def _tree(folder: Path) -> dict[str, str]:
    """Relative path and content of every file, with what is drawn replaced."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = re.sub(r"^run_[^/]*", "run_RANDOM", str(path.relative_to(folder)))
            found[name] = path.read_text()
    return found


def test_output_passes_without_a_prefix(tmp_path: Path, talk: Path) -> None:
    run = _run(tmp_path, talk, nproc=2, actions=TWO)
    assert sorted(run.stdout.splitlines()) == ["out of 0", "out of 1", "shell of 0", "shell of 1"]
    assert sorted(run.stderr.splitlines()) == ["err of 0", "err of 1"]
    assert run.seen[3]["last_lines"] == "err of 1"


def test_a_prefix_on_request(tmp_path: Path, talk: Path) -> None:
    run = _run(tmp_path, talk, nproc=2, actions=TWO, stdio={"prefix": True})
    assert sorted(run.stderr.splitlines()) == ["[rank0]:err of 0", "[rank1]:err of 1"]


def test_a_rank_that_is_left_out_is_silent_and_its_last_lines_are_kept(tmp_path: Path, talk: Path) -> None:
    run = _run(tmp_path, talk, nproc=2, actions=TWO, stdio={"filter": [0]})
    assert run.stdout.splitlines() == ["out of 0", "shell of 0"]
    assert run.stderr.splitlines() == ["err of 0"]
    assert run.seen[3]["last_lines"] == "err of 1"


def test_redirects_go_to_files_and_nowhere_else(tmp_path: Path, talk: Path) -> None:
    stdio = {"redirects": 3, "log_dir": str(tmp_path / "logs")}
    run = _run(tmp_path, talk, nproc=2, actions=TWO, stdio=stdio)
    assert (run.stdout, run.stderr) == ("", "")
    assert _tree(tmp_path / "logs") == {
        "run_RANDOM/attempt_0/0/stdout.log": "out of 0\nshell of 0\n",
        "run_RANDOM/attempt_0/0/stderr.log": "err of 0\n",
        "run_RANDOM/attempt_0/1/stdout.log": "out of 1\nshell of 1\n",
        "run_RANDOM/attempt_0/1/stderr.log": "err of 1\n",
    }
    assert run.seen[3]["last_lines"] == "err of 1"


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--tee", "3"), ("--redirects", "1"), ("--tee", "2", "--redirects", "1")])
def test_files_and_console_are_those_of_torchrun(tmp_path: Path, talk: Path, flags: tuple[str, ...]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-id", "run"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    theirs = subprocess.run(
        [*torchrun, *flags, "--log-dir", str(tmp_path / "theirs"), str(talk)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    options = {name.lstrip("-"): int(value) for name, value in zip(flags[::2], flags[1::2], strict=True)}
    stdio = {**options, "log_dir": str(tmp_path / "ours")}
    ours = _run(tmp_path, talk, nproc=2, actions=TWO, stdio=stdio)
    assert sorted(ours.stdout.splitlines()) == sorted(theirs.stdout.splitlines())
    said = [line for line in theirs.stderr.splitlines() if "err of" in line]
    assert sorted(ours.stderr.splitlines()) == sorted(said)
    assert _tree(tmp_path / "ours") == _tree(tmp_path / "theirs")


def test_stdin_reaches_the_worker(tmp_path: Path) -> None:
    script = tmp_path / "cat.py"
    script.write_text("import sys\nsys.stdout.buffer.write(sys.stdin.buffer.read().upper())\n")
    run = run_agent(tmp_path / "agent", target=str(script), warm=False, actions=ONE, stdin=b"typed\n" * 5000)
    assert run.stdout == "TYPED\n" * 5000


def test_bytes_pass_unchanged_and_whole(tmp_path: Path) -> None:
    script = tmp_path / "much.py"
    script.write_text(
        "import os, sys\nblock = bytes(range(256)) * 256\n"
        "for _ in range(200):\n    sys.stdout.buffer.write(block)\n"
    )
    process = start_agent(
        tmp_path / "agent",
        target=str(script),
        warm=False,
        actions=ONE,
        popen={"stdout": subprocess.PIPE},
    )
    data, _ = process.communicate()
    assert data == bytes(range(256)) * 256 * 200


def test_a_reader_that_goes_away_does_not_end_the_training(tmp_path: Path) -> None:
    script = tmp_path / "lines.py"
    script.write_text("for n in range(50_000):\n    print('line', n, flush=True)\n")
    process = start_agent(
        tmp_path / "agent",
        target=str(script),
        warm=False,
        actions=ONE,
        popen={"stdout": subprocess.PIPE, "text": True},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert process.wait() == 0
    result = (tmp_path / "agent" / "result.json").read_text()
    assert '"exit_code": 0' in result
    assert "line 49999" in result


def test_nobody_holds_the_callers_streams_after_the_end(tmp_path: Path) -> None:
    """A process that a worker leaves behind is ended; the pipes end with the agent."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import subprocess, sys\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('left', flush=True)\n"
    )
    run = _run(tmp_path, script, actions=ONE)  # returns only at the end of both pipes
    assert run.stdout == "left\n"


@pytest.mark.parametrize("warm", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_terminal_is_a_terminal_for_the_worker_and_pdb_works(tmp_path: Path, warm: bool) -> None:
    script = tmp_path / "debug.py"
    script.write_text(
        "import os, sys\n"
        "print('terminals', *(s.isatty() for s in (sys.stdin, sys.stdout, sys.stderr)))\n"
        "print('size', os.get_terminal_size(1).columns)\n"
        "value = 41\n"
        "breakpoint()\n"
        "print('went on')\n"
    )
    ours, theirs = pty.openpty()
    _set_columns(theirs, 123)
    process = start_agent(
        tmp_path / "agent",
        target=str(script),
        warm=warm,
        actions=ONE,
        popen={"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True},
    )
    os.close(theirs)
    text = _read_until(ours, b"(Pdb) ")
    os.write(ours, b"p value + 1\n")
    text += _read_until(ours, b"(Pdb) ")
    os.write(ours, b"c\n")
    text += _read_until(ours, b"went on")
    assert process.wait() == 0
    os.close(ours)
    assert b"terminals True True True\r\n" in text
    assert b"size 123" in text
    assert b"\r\n42\r\n" in text
    assert b"\r\r\n" not in text


def _set_columns(fd: int, columns: int) -> None:
    import fcntl
    import struct
    import termios

    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))


def _read_until(fd: int, wanted: bytes) -> bytes:
    data, deadline = b"", time.monotonic() + DEADLINE_S
    while wanted not in data and time.monotonic() < deadline:
        if select.select([fd], [], [], 0.5)[0]:
            try:
                data += os.read(fd, 65536)
            except OSError:
                break
    assert wanted in data, data
    return data


@pytest.mark.slow
def test_the_environment_is_that_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "dump.py"
    script.write_text(
        "import json, os, sys\n"
        "json.dump([dict(os.environ), sys.argv], open(sys.argv[1] + os.environ['RANK'], 'w'))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-id", "run"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    subprocess.run([*torchrun, str(script), str(tmp_path / "a"), "${local_rank}"], check=True)
    spec = {"args": [str(tmp_path / "b"), "${local_rank}"], "nproc": 2, "actions": TWO}
    _run(tmp_path, script, **spec)
    for rank in "01":
        theirs, their_argv = json.loads((tmp_path / f"a{rank}").read_text())
        ours, our_argv = json.loads((tmp_path / f"b{rank}").read_text())
        assert our_argv[2:] == their_argv[2:]
        changing = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_MAX_RESTARTS"}
        # Its workers use the launcher's own store; ours make one, as under its static rendezvous.
        changing |= {"TORCHELASTIC_USE_AGENT_STORE"}
        assert changing <= ours.keys() & theirs.keys()
        for name in theirs.keys() - changing - LAUNCHERS_OWN:
            assert ours.get(name) == theirs[name], name
        more = {name for name in ours if name not in theirs}
        assert all(name.startswith(("AIMASTER_", "EASYCKPT_", "TORCH_FR_")) for name in more), more
