"""Workers are watched at once, and nothing that comes from them outlives a stop or their agent."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from aimaster.agent import proc
from tests.workers import run_agent, start_agent

DEADLINE_S = 90.0

ESCAPES = """\
import os, subprocess, sys, time

out = sys.argv[1]


def note(name, pid):
    with open(f"{out}/{name}.tmp", "w") as file:
        file.write(str(pid))
    os.rename(f"{out}/{name}.tmp", f"{out}/{name}")


SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
# A plain child, one in another session, one with no environment in another session.
note("plain", subprocess.Popen(SLEEP).pid)
note("session", subprocess.Popen(SLEEP, start_new_session=True).pid)
note("bare", subprocess.Popen(SLEEP, start_new_session=True, env={}).pid)
# Daemons: forked twice, so that nobody is their parent; with and without an environment.
for name, env in (("daemon", dict(os.environ)), ("bare_daemon", {})):
    pid = os.fork()
    if pid == 0:
        os.setsid()
        child = os.fork()
        if child == 0:
            note(name, os.getpid())
            os.execve(SLEEP[0], SLEEP, env)
        os._exit(0)
    os.waitpid(pid, 0)
# Forked and never executed: its environment, as the kernel shows it, is the one of its ancestor.
pid = os.fork()
if pid == 0:
    os.setsid()
    note("forked", os.getpid())
    time.sleep(600)
while len([name for name in os.listdir(out) if "." not in name]) < 6:
    time.sleep(0.01)
note("ready", os.getpid())
END
"""


def _escapes(tmp: Path, end: str) -> tuple[Path, Path]:
    script = tmp / "escapes.py"
    script.write_text(ESCAPES.replace("END", end))
    out = tmp / "out"
    out.mkdir()
    return script, out


def _noted(out: Path) -> dict[str, int]:
    return {path.name: int(path.read_text()) for path in out.iterdir()}


def _lives(pid: int) -> bool:
    entry = proc.stat(pid)
    return entry is not None and not entry.ended


def _gone(pids: dict[str, int]) -> bool:
    deadline = time.monotonic() + DEADLINE_S
    while any(_lives(pid) for pid in pids.values()):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("end", ["time.sleep(600)", "sys.exit(0)", "os.kill(os.getpid(), 9)"])
@pytest.mark.parametrize("warm", [pytest.param(True, marks=pytest.mark.slow), False])
def test_everything_that_came_from_a_worker_is_gone_after_a_stop(
    tmp_path: Path, end: str, warm: bool
) -> None:
    script, out = _escapes(tmp_path, end)
    helper = [sys.executable, "-c", "import time; time.sleep(600)"]
    actions: list[dict[str, Any]] = [
        {"helper": helper},
        {"start": {}},
        {"file": str(out / "ready")},
        *([] if "sleep" in end else [{"exits_of": 1}]),
        {"stop": 10},
        {"tell": str(tmp_path / "told")},
        {"end_helper": None},
    ]
    run = run_agent(tmp_path / "agent", target=str(script), args=[str(out)], actions=actions, warm=warm)
    stop = run.seen[-3]["stop"]
    assert stop["unkillable"] == []
    assert stop["killed"] >= 6
    assert run.seen[-1]["end_helper"] is True  # the agent's own processes are left alone
    noted = _noted(out)
    assert len(noted) == 7
    assert not [name for name, pid in noted.items() if _lives(pid)]


@pytest.mark.parametrize("warm", [pytest.param(True, marks=pytest.mark.slow), False])
def test_workers_and_template_end_with_their_agent(tmp_path: Path, warm: bool) -> None:
    script = tmp_path / "sleep.py"
    script.write_text(f"import time\nopen({str(tmp_path / 'up')!r}, 'a').write('x')\ntime.sleep(600)\n")
    agent = start_agent(
        tmp_path / "agent",
        target=str(script),
        nproc=2,
        warm=warm,
        actions=[{"start": {}}, {"tell": str(tmp_path / "told")}, {"for_ever": None}],
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "told").exists() and time.monotonic() < deadline and agent.poll() is None:
            time.sleep(0.02)
        (start,) = json.loads((tmp_path / "agent" / "result.json").read_text())
    finally:
        agent.kill()
        agent.wait()
    pids = start["start"]["pids"] + start["start"]["template"]
    assert len(pids) == (3 if warm else 2)
    assert _gone({str(pid): pid for pid in pids})


def test_the_next_agent_of_a_node_clears_what_the_last_one_left(tmp_path: Path) -> None:
    script, out = _escapes(tmp_path, "time.sleep(600)")
    agent = start_agent(
        tmp_path / "agent",
        target=str(script),
        args=[str(out)],
        warm=False,
        run_dir=str(tmp_path / "run"),
        actions=[
            {"start": {}},
            {"file": str(out / "ready")},
            {"tell": str(tmp_path / "told")},
            {"for_ever": 0},
        ],
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (tmp_path / "told").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        agent.kill()
        agent.wait()
    noted = _noted(out)
    bare = {name: noted.pop(name) for name in ("bare", "bare_daemon")}
    try:
        assert _lives(noted["daemon"])
        run_agent(
            tmp_path / "next",
            target=str(script),
            warm=False,
            run_dir=str(tmp_path / "run"),
            actions=[{"stop": 1}],
        )
        assert _gone(noted)
    finally:
        # Without a mark nobody can prove whose they are once their agent is dead.
        for pid in bare.values():
            os.kill(pid, signal.SIGKILL)


def test_the_end_of_a_killed_worker_is_seen_at_once(tmp_path: Path) -> None:
    script = tmp_path / "sleep.py"
    script.write_text(
        f"import time, sys\nprint('last words', flush=True)\nopen({str(tmp_path / 'up')!r}, 'w').write('x')\n"
        "time.sleep(600)\n"
    )
    run = run_agent(
        tmp_path / "agent",
        target=str(script),
        warm=False,
        actions=[{"start": {}}, {"file": str(tmp_path / "up")}, {"kill": 0}, {"last_lines": 0}],
    )
    assert run.seen[-1]["last_lines"] == "last words"


def test_a_worker_that_ignores_sigterm_or_is_stopped_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "stubborn.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"open({str(tmp_path)!r} + '/up' + os.environ['RANK'], 'w').write('x')\n"
        "if os.environ['RANK'] == '1':\n    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "time.sleep(600)\n"
    )
    run = run_agent(
        tmp_path / "agent",
        target=str(script),
        nproc=2,
        warm=False,
        actions=[
            {"start": {}},
            {"file": str(tmp_path / "up0")},
            {"file": str(tmp_path / "up1")},
            {"stop": 0.3},
        ],
    )
    stop = run.seen[-1]["stop"]
    assert [entry["signal"] for entry in stop["exits"]] == [9, 9]
    assert stop["killed"] == 2


def test_sigterm_lets_a_worker_end_by_its_own_will_and_spares_its_children(tmp_path: Path) -> None:
    script = tmp_path / "graceful.py"
    script.write_text(
        "import os, signal, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "def end(*_):\n"
        "    time.sleep(0.3)\n"
        "    print('child lives', child.poll() is None, flush=True)\n"
        "    sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"open({str(tmp_path / 'up')!r}, 'w').write('x')\n"
        "time.sleep(600)\n"
    )
    run = run_agent(
        tmp_path / "agent",
        target=str(script),
        warm=False,
        actions=[{"start": {}}, {"file": str(tmp_path / "up")}, {"stop": 60}],
    )
    stop = run.seen[-1]["stop"]
    assert [entry["exit_code"] for entry in stop["exits"]] == [7]
    assert stop["killed"] == 1
    assert run.stdout == "child lives True\n"


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    run = run_agent(
        tmp_path / "agent",
        kind="no_python",
        target="/no/such/program",
        actions=[{"start": {}}, {"exits_of": 1}],
    )
    (end,) = run.seen[1]["exits_of"]
    assert end["exit_code"] == 127
    assert "/no/such/program: No such file" in end["error"]


def test_sighup_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    script = tmp_path / "hup.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGHUP)\nprint('alive')\n")
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = run_agent(
            tmp_path / "agent", target=str(script), warm=False, actions=[{"start": {}}, {"exits_of": 1}]
        )
    finally:
        signal.signal(signal.SIGHUP, old)
    assert run.stdout == "alive\n"


def test_a_command_is_one_unit_with_its_fields_filled(tmp_path: Path) -> None:
    run = run_agent(
        tmp_path / "agent",
        kind="command",
        nproc=4,
        target="sh",
        args=["-c", 'echo {nnodes} {node_rank} {master_addr} {other} "${RANK:-none}" $AIMASTER_NODE_RANK'],
        actions=[{"start": {}}, {"exits_of": 1}, {"stop": 5}],
    )
    assert len(run.seen[0]["start"]["pids"]) == 1
    assert run.stdout == "1 0 127.0.0.1 {other} none 0\n"


def test_ranks_of_a_command_are_seen_by_the_hook(tmp_path: Path) -> None:
    """A launcher's own workers claim their records; the launcher, which imports torch too, does not."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "opt = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1)\n"
        "for _ in range(5):\n    opt.step()\n"
        "import time\ntime.sleep(600)\n"
    )
    (tmp_path / "launch.py").write_text(
        "import os, subprocess, sys, torch\n"
        "env = [dict(os.environ, LOCAL_RANK=str(i), RANK=str(i + 4)) for i in range(2)]\n"
        f"all = [subprocess.Popen([sys.executable, {str(tmp_path / 'train.py')!r}], env=e) for e in env]\n"
        "[p.wait() for p in all]\n"
    )
    run = run_agent(
        tmp_path / "agent",
        kind="command",
        target=sys.executable,
        args=[str(tmp_path / "launch.py")],
        actions=[{"start": {}}, {"ranks": 2}, {"steps": 5}, {"stop": 5}],
    )
    assert [(entry["local_rank"], entry["rank"]) for entry in run.seen[2]["steps"]] == [(0, 4), (1, 5)]
    assert run.seen[3]["stop"]["unkillable"] == []


TRACEABLE = """
import ctypes, sys, time
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # PR_SET_PTRACER_ANY, for Yama
with open(f"{sys.argv[1]}/up", "w") as file:
    file.write("up")
time.sleep(600)
"""
TRACE = """
import ctypes, sys, time
SEIZE = 0x4206
if ctypes.CDLL(None, use_errno=True).ptrace(SEIZE, int(sys.argv[1]), None, None) != 0:
    sys.exit(1)
print("traced", flush=True)
time.sleep(600)
"""


def test_a_worker_that_a_debugger_keeps_is_named_and_the_agent_goes_on(tmp_path: Path) -> None:
    """A traced process that was killed stays until its tracer has looked: the nearest thing to one that hangs
    in the kernel."""
    script = tmp_path / "sleep.py"
    script.write_text(TRACEABLE)
    tracer = tmp_path / "trace.py"
    tracer.write_text(TRACE)
    actions: list[dict[str, Any]] = [
        {"start": {}},
        {"file": str(tmp_path / "up")},
        {"trace": [sys.executable, str(tracer)]},
        {"kill_s_max": 0.5},
        {"stop": 0.1},
        {"end_helper": None},
        {"kill_s_max": DEADLINE_S},
        {"stop": 0.1},
        {"start": {}},
        {"stop": 0.1},
    ]
    run = run_agent(tmp_path / "agent", target=str(script), args=[str(tmp_path)], warm=False, actions=actions)
    if not run.seen[2]["trace"]:
        pytest.skip("no process may trace another one here")
    pid = run.seen[0]["start"]["pids"][0]
    assert [str(pid) in what for what in run.seen[4]["stop"]["unkillable"]] == [True]
    assert run.seen[5]["end_helper"] is True
    assert run.seen[7]["stop"]["unkillable"] == []
    assert run.seen[9]["stop"]["unkillable"] == []
