"""A worker forked from the template is equal to one that was started by itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers import run_agent

HERE = Path(__file__).parent
VOLATILE = (
    *("MASTER_PORT", "AIMASTER_MASTER_PORT", "TORCHELASTIC_ERROR_FILE"),
    *("AIMASTER_PROGRESS_PAGE", "AIMASTER_AGENT", "AIMASTER_OWNER"),
)


def _describe(tmp: Path, name: str, **spec: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What two workers say of themselves, and what the agent saw."""
    out = tmp / name
    actions = [{"start": {"BESIDE": "1"}}, {"exits_of": 2}, {"stop": 5}]
    run = run_agent(tmp / f"agent-{name}", nproc=2, args=[str(out), "${local_rank}"], actions=actions, **spec)
    assert run.seen[1]["exits_of"][1]["exit_code"] == 5, run.stderr
    said = [json.loads((tmp / f"{name}.{rank}.json").read_text()) for rank in (0, 1)]
    for entry in said:
        for variable in VOLATILE:
            assert variable in entry["same"]["env"]
            entry["same"]["env"].pop(variable)
        entry["same"]["argv"].remove(str(out))
        entry["same"]["orig_argv"].remove(str(out))
        entry["same"]["cmdline"] = entry["same"]["cmdline"][:3]  # arguments are the template's own
    return said, run.seen


def _compare(tmp: Path, **spec: Any) -> None:
    warm, seen = _describe(tmp, "warm", **spec)
    cold, _ = _describe(tmp, "cold", warm=False, **spec)
    assert seen[0]["start"]["warmth"] == "warm"
    for rank in (0, 1):
        for key in sorted({*warm[rank]["same"], *cold[rank]["same"]}):
            assert warm[rank]["same"].get(key) == cold[rank]["same"].get(key), (rank, key)
    draws = [draw for entry in (*warm, *cold) for draw in entry["draws"]]
    assert len(set(draws)) == len(draws), draws


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the script and a module beside it, which only the script can import."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text((HERE / "worker_self.py").read_text())
    (folder / "beside.py").write_text("import os\nWHERE = [os.environ['RANK'], __file__]\n")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["2", None])
def test_script(project: Path, tmp_path: Path, clean_env: pytest.MonkeyPatch, threads: str | None) -> None:
    if threads is None:
        clean_env.delenv("OMP_NUM_THREADS", raising=False)
    else:
        clean_env.setenv("OMP_NUM_THREADS", threads)
    _compare(tmp_path, target=str(project / "train.py"))


@pytest.mark.slow
def test_module(project: Path, tmp_path: Path, clean_env: pytest.MonkeyPatch) -> None:
    clean_env.setenv("PYTHONPATH", "elsewhere")
    _compare(tmp_path, kind="module", target="train", cwd=project)


@pytest.mark.slow
def test_run_path(project: Path, tmp_path: Path) -> None:
    _compare(tmp_path, kind="run_path", target=str(project / "train.py"), cwd=project)


@pytest.mark.slow
def test_a_sitecustomize_of_the_user_runs_as_ever(
    project: Path, tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import warnings\nwarnings.simplefilter('ignore', BytesWarning)\n")
    clean_env.setenv("PYTHONPATH", str(own))
    _compare(tmp_path, target=str(project / "train.py"))


ENDINGS = """\
import atexit, os, signal, sys, threading, time, warnings

CASE = os.environ["CASE"]


def fail():
    raise ValueError("no")


def warn():
    warnings.warn("there", stacklevel=3)


if CASE == "exception":
    try:
        fail()
    except ValueError as error:
        raise KeyError(1) from error
if CASE == "text":
    sys.exit("a last word")
if CASE == "none":
    sys.exit()
if CASE == "big":
    raise SystemExit(300)
if CASE == "interrupt":
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
if CASE == "terminated":
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)
if CASE == "abort":
    os.abort()
if CASE == "hook":
    sys.excepthook = lambda *a: print("hook", a[0].__name__, a[2].tb_next)
    1 / 0
if CASE == "thread":
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
if CASE == "handler":
    atexit.register(lambda: print(f"bye {late}", flush=True))
    late = 3
if CASE == "warning":
    warnings.warn("here")
    warn()
if CASE == "stdin":
    print(input())
if CASE == "syntax":
    import wrong
"""


@pytest.mark.slow
def test_every_way_to_end(tmp_path: Path) -> None:
    """Output and exit code of a forked worker are those of plain Python, byte for byte."""
    script = tmp_path / "ends.py"
    script.write_text(ENDINGS)
    (tmp_path / "wrong.py").write_text("def f(:\n    pass\n")
    cases = [line.split('"')[1] for line in ENDINGS.splitlines() if line.startswith("if CASE")]
    assert len(cases) == 13
    actions = []
    for case in cases:
        actions += [{"start": {"CASE": case}}, {"exits_of": 1}, {"stop": 5}]
    run = run_agent(tmp_path / "agent", target=str(script), actions=actions, stdin=b"typed\n")
    out = err = ""
    for number, case in enumerate(cases):
        start, exits, _ = run.seen[3 * number : 3 * number + 3]
        assert start["start"]["warmth"] == "warm", case
        plain = subprocess.run(
            [sys.executable, "-u", str(script)],
            input=b"typed\n",
            capture_output=True,
            check=False,
            env={**os.environ, "CASE": case},
        )
        (end,) = exits["exits_of"]
        code = end["exit_code"] if end["exit_code"] is not None else -end["signal"]
        assert code == plain.returncode, case
        out, err = out + plain.stdout.decode(), err + plain.stderr.decode()
    assert run.stderr == err
    assert run.stdout == out
