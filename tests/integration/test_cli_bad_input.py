"""`aimaster run` given what cannot work: one clear message, the documented exit code, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = [sys.executable, "-c", "import sys; from aimaster.cli import main; sys.exit(main())", "run"]
TIMEOUT_S = 120


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("raise SystemExit('must not run')\n")
    (tmp_path / "broken.py").write_text("def f(:\n    pass\n")
    (tmp_path / "file").write_text("")
    return tmp_path


def aimaster_run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    places = {"AIMASTER_RUN_DIR": str(folder / "r"), "XDG_STATE_HOME": str(folder / "s")}
    return subprocess.run(
        [*RUN, *words],
        cwd=folder,
        env={**os.environ, **places},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--nproc-per-nod", "2", "--nope", "train.py"], 2, "--nope"),
        (["--ckpt-dri", "x", "train.py"], 2, "did you mean --ckpt-dir"),
        ([], 2, "no script"),
        (["--nnodes", "3:2", "train.py"], 2, "--nnodes"),
        (["absent.py"], 2, "absent.py"),
        (["-m", "absent_module"], 2, "absent_module"),
        (["--", "absent-command"], 2, "absent-command"),
        (["--nproc-per-node", "2", "--", "sh", "-c", "true"], 2, "--nproc-per-node"),
        (["sh", "-c", "true"], 2, "aimaster run -- sh"),
        (["broken.py"], 20, "SyntaxError"),
        (["--ckpt-dir", "file", "train.py"], 3, "--ckpt-dir"),
        (["--ckpt-dir", "/proc/none", "train.py"], 3, "--ckpt-dir"),
        (["--nnodes", "2", "--rdzv-endpoint", "10.1.2.3:1", "train.py"], 3, "--insecure"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
)
def test_bad_input(folder: Path, words: list[str], code: int, said: str) -> None:
    done = aimaster_run(folder, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert {path.name for path in folder.iterdir()} == {"train.py", "broken.py", "file"}


def test_help_is_quick_and_goes_to_stdout(folder: Path) -> None:
    done = aimaster_run(folder, "--help")
    assert done.returncode == 0
    assert "Exit codes:" in done.stdout
    assert done.stderr == ""


def test_parsing_loads_nothing_heavy(folder: Path) -> None:
    code = (
        "import sys; from aimaster.cli.run import run; run(['--help'])\n"
        "heavy = {'torch', 'numpy', 'grpc', 'easyckpt', 'rich', 'typer'} & set(sys.modules)\n"
        "sys.exit(' '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"loaded: {done.stderr}"
