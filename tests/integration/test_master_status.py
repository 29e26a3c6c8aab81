"""`aimaster status` and `aimaster master` as commands, against real masters, with and without TLS."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aimaster.rpc.security import Credentials, make_secret_file, read_secret_file
from tests.integration.master_process import JOB, PATIENCE_S, FakeAgent, MasterProcess, master_at, until

AIMASTER = (sys.executable, "-c", "import sys; from aimaster.cli import main; sys.exit(main())")


def command(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AIMASTER, *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env=os.environ | (env or {}),
    )


async def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(command, *words)


def write_place(base: Path, node: str, endpoint: str, *, job: str = JOB, secret: Path | None = None) -> Path:
    """A run directory as an agent leaves it."""
    path = base / job / node
    path.mkdir(parents=True)
    word = {
        "job_id": job,
        "node_id": node,
        "endpoint": endpoint,
        "secret_file": str(secret) if secret else None,
    }
    (path / "endpoint.json").write_text(json.dumps(word))
    return path


def test_status_over_tls_at_every_level_of_folders(tmp_path: Path) -> None:
    async def scenario() -> None:
        secret = make_secret_file(tmp_path)
        credentials = Credentials.from_secret(read_secret_file(secret), job=JOB)
        extra = ("--secret-file", str(secret), "--node-id", "n1")
        async with master_at(tmp_path / "state", extra=extra) as master:
            agent = FakeAgent(master.endpoint, "n1", workers=2, credentials=credentials)
            await until(lambda: agent.running)
            agent.first_step(3)
            await agent.link.flush(PATIENCE_S)
            assert master.process is not None
            arguments = Path(f"/proc/{master.process.pid}/cmdline").read_bytes()
            assert read_secret_file(secret).value not in arguments
            node_dir = write_place(tmp_path / "run", "n1", master.listen, secret=secret)
            for folder in (node_dir, node_dir.parent, tmp_path / "run"):
                done = await run_command("status", "--json", "--run-dir", str(folder))
                assert done.returncode == 0, done.stderr
                picture = json.loads(done.stdout)
                assert (picture["schema"], picture["source"], picture["phase"]) == (1, "master", "running")
                roles = {(one["role"], one["pid"], one["node"]) for one in picture["processes"]}
                assert roles == {("master", master.process.pid, "n1"), ("agent", os.getpid(), "n1")}
                assert picture["nodes"][0]["connected"]
            while not (picture := json.loads(done.stdout))["nodes"][0]["ranks"]:
                done = await run_command("status", "--json", "--run-dir", str(node_dir))
            assert [rank["rank"] for rank in picture["nodes"][0]["ranks"]] == [0, 1]
            text = await run_command("status", "--run-dir", str(node_dir))
            assert f"job {JOB}: running, generation 1" in text.stdout
            assert "rank 1: training, steps 7" in text.stdout
            assert text.stderr == ""
            await agent.vanish()

    asyncio.run(scenario())


def test_without_a_master_status_tells_what_agents_wrote_down(tmp_path: Path) -> None:
    async def scenario() -> tuple[Path, str]:
        async with master_at(tmp_path / "state") as master:
            return write_place(tmp_path / "run", "n1", master.listen), master.listen

    node_dir, endpoint = asyncio.run(scenario())
    own = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    rows = [
        {"role": "agent", "pid": os.getpid(), "rank": None, "started": int(own)},
        {"role": "worker", "pid": os.getpid(), "rank": 0, "started": int(own) + 1},  # the pid was used again
        {"role": "saver", "pid": 2**22 + 1, "rank": None},  # ended
        {"role": "unheard of", "pid": 1},
        "garbage",
    ]
    (node_dir / "processes.json").write_text(json.dumps({"processes": rows}))
    done = command("status", "--json", "--run-dir", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    picture = json.loads(done.stdout)
    assert (picture["schema"], picture["source"]) == (1, "run_dir")
    assert picture["processes"] == [{"role": "agent", "pid": os.getpid(), "node": "n1", "rank": None}]
    assert endpoint in picture["trouble"]
    text = command("status", "--run-dir", str(tmp_path / "run"))
    assert "no master answers" in text.stdout
    (node_dir / "processes.json").write_text("{half a fi")
    assert json.loads(command("status", "--json", "--run-dir", str(node_dir)).stdout)["processes"] == []


def test_a_secret_that_differs_is_said(tmp_path: Path) -> None:
    async def scenario() -> None:
        ours, theirs = tmp_path / "ours", tmp_path / "theirs"
        ours.mkdir()
        theirs.mkdir()
        extra = ("--secret-file", str(make_secret_file(theirs)))
        async with master_at(tmp_path / "state", extra=extra) as master:
            wrong = ("--job-id", JOB, "--secret-file", str(make_secret_file(ours)))
            done = await run_command("status", "--endpoint", master.listen, *wrong)
            assert done.returncode == 3
            assert "secret differs" in done.stderr
            done = await run_command("status", "--endpoint", master.listen)
            assert done.returncode == 3
            assert "asks for the job secret" in done.stderr
            right = ("--job-id", JOB, *extra)
            done = await run_command("status", "--endpoint", master.listen, *right)
            assert done.returncode == 0, done.stderr

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (("status", "--run-dir", "EMPTY"), 3, "no job of this user"),
        (("status", "--run-dir", "SEVERAL"), 2, "several jobs are found: job-a, job-b"),
        (("status", "--run-dir", "SEVERAL", "--job-id", "job-c"), 2, "job-c is not found"),
        (("status", "--endpoint", "127.0.0.1:1"), 3, "connection refused"),
        (("status", "--endpoint", "nonsense"), 2, "HOST:PORT"),
        (("status", "--nonsense"), 2, "No such option"),
        (("nonsense",), 2, "No such command"),
        (("master", "--job-id", "../x"), 2, "job id"),
        (("master", "--job-id", "j", "--listen", "0.0.0.0:0"), 3, "--insecure"),
        (("master", "--job-id", "j", "--listen", "192.0.2.1:0", "--insecure"), 3, "cannot listen"),
        (("master", "--job-id", "j", "--heartbeat-interval", "-1"), 2, "heartbeat"),
    ],
)
def test_trouble_is_one_clear_message(
    tmp_path: Path, words: tuple[str, ...], code: int, sentence: str
) -> None:
    (tmp_path / "EMPTY").mkdir()
    for job in ("job-a", "job-b"):
        write_place(tmp_path / "SEVERAL", "n1", "127.0.0.1:1", job=job)
    named = [str(tmp_path / word) if word in ("EMPTY", "SEVERAL") else word for word in words]
    done = command(*named, env={"XDG_STATE_HOME": str(tmp_path / "state")})
    assert done.returncode == code, done.stderr
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_master_on_its_own_leads_and_stops_at_a_signal(tmp_path: Path) -> None:
    async def scenario() -> None:
        secret = make_secret_file(tmp_path)
        words = ["master", "--job-id", JOB, "--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state")]
        process = await asyncio.create_subprocess_exec(
            *AIMASTER, *words, "--secret-file", str(secret), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        try:
            assert process.stdout is not None
            line = (await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)).decode()
            assert line.startswith("master ready at 127.0.0.1:")
            done = await run_command(
                *("status", "--json", "--endpoint", line.split()[-1], "--job-id", JOB),
                *("--secret-file", str(secret)),
            )
            picture = json.loads(done.stdout)
            assert picture["waiting_for"] == "the first agent"
            assert picture["processes"] == [{"role": "master", "pid": process.pid, "node": "", "rank": None}]
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    asyncio.run(scenario())


def test_a_bug_of_ours_ends_with_a_report(tmp_path: Path) -> None:
    broken = "import aimaster.cli.status as s; s.show = lambda *a, **k: 1 / 0; "
    code = broken + "import sys; from aimaster.cli import main; sys.exit(main(['status']))"

    def run(**env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)} | env,
        )

    done = run()
    assert done.returncode == 70
    assert "Traceback" not in done.stderr
    (report,) = tmp_path.rglob("*.txt")
    assert str(report) in done.stderr
    assert "ZeroDivisionError" in report.read_text()
    assert "Traceback" in run(AIMASTER_DEBUG="1").stderr


def test_a_master_ends_with_the_agent_that_started_it(tmp_path: Path) -> None:
    """However the agent ends: here by SIGKILL, which leaves it no time for anything."""
    code = (
        "import os, subprocess, sys\n"
        "r, w = os.pipe()\n"
        "child = subprocess.Popen([sys.executable, '-m', 'aimaster.master', '--job-id', 'j', '--listen',"
        " '127.0.0.1:0', '--state-dir', sys.argv[1], '--ready-fd', str(w)], pass_fds=(w,),"
        " stderr=subprocess.DEVNULL)\n"
        "os.close(w)\n"
        "os.read(r, 4096)\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()

    async def gone() -> None:
        await until(lambda: not _lives(pid))

    asyncio.run(gone())


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_master_says_why_it_cannot_start(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "journal.db").write_bytes(b"garbage" * 1000)
        master = MasterProcess(tmp_path)
        word = await master.start()
        assert word["error"] == "journal_corrupt"
        assert str(tmp_path) in str(word["where"])
        assert await master.ended() == 3

    asyncio.run(scenario())
