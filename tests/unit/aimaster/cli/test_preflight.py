"""What is looked at before anything starts: programs that are not there, syntax, folders."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aimaster.cli.preflight import check_before_start
from aimaster.cli.run import config_from
from aimaster.errors import AimasterError, ExitCode, FolderUnusable, ScriptMissing, UsageError, UserError


def look(*words: str) -> str:
    """Run the check; returns what it wrote to stderr."""
    config = config_from(list(words), {})
    assert config is not None
    stderr = io.StringIO()
    check_before_start(config, stderr=stderr)
    return stderr.getvalue()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must not run')\n")
    return path


def test_good_programs(script: Path) -> None:
    package = script.parent / "pkg"
    (package / "sub").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    (package / "__main__.py").write_text("pass\n")
    (package / "sub" / "__init__.py").write_text("")
    (package / "sub" / "deep.py").write_text("pass\n")
    for words in (
        ("train.py",),
        (str(script),),
        ("-m", "pkg"),
        ("-m", "pkg.sub.deep"),
        ("-m", "timeit"),
        ("-m", "aimaster.ids"),
        ("pkg",),
        ("--", "sh", "-c", "true"),
        ("--no-python", "/bin/sh"),
        ("--run-path", str(script)),
    ):
        assert look(*words) == "", words


@pytest.mark.parametrize(
    "words",
    [
        ("absent.py",),
        ("absent",),
        ("-m", "absent_module"),
        ("-m", "json.absent"),
        ("-m", "os.path.absent"),
        ("-m", "json"),
        ("--", "absent-command"),
        ("--no-python", "absent-command"),
        ("--run-path", "absent.py"),
    ],
)
def test_missing_programs(script: Path, words: tuple[str, ...]) -> None:
    if words == ("-m", "json"):  # executable since Python 3.14
        (script.parent / "json").mkdir()
        (script.parent / "json" / "__init__.py").write_text("")
    with pytest.raises(ScriptMissing) as caught:
        look(*words)
    assert caught.value.exit_code is ExitCode.USAGE


def test_command_without_separator_is_explained(script: Path) -> None:
    with pytest.raises(ScriptMissing, match="aimaster run -- sh"):
        look("sh", "-c", "true")


@pytest.mark.parametrize("text", ["def f(:\n", "x = 1\n  y = 2\n", "a\0b", "é = '\n"])
def test_syntax_error_is_shown_as_python_shows_it(script: Path, text: str) -> None:
    script.write_text(text)
    config = config_from(["train.py"], {})
    assert config is not None
    stderr = io.StringIO()
    with pytest.raises(UserError) as caught:
        check_before_start(config, stderr=stderr)
    assert caught.value.exit_code is ExitCode.USER_ERROR
    assert "Error: " in stderr.getvalue()
    assert "aimaster" not in stderr.getvalue()


WITHOUT_SITE_PACKAGES = """
import sys
sys.path = [place for place in sys.path if not place.endswith("site-packages")]
from aimaster.cli.run import config_from
from aimaster.cli.preflight import check_before_start
from aimaster.errors import TorchMissing
check_before_start(config_from(["--no-warm", "train.py"], {}), stderr=sys.stderr)
try:
    check_before_start(config_from(["train.py"], {}), stderr=sys.stderr)
except TorchMissing as error:
    print(error)
"""


def test_missing_torch_is_said_before_anything_starts(script: Path) -> None:
    repository = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_SITE_PACKAGES],
        env={**os.environ, "PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "aimaster-ft[torch]" in done.stdout
    assert "--no-warm" in done.stdout


def test_declared_encoding_is_honoured(script: Path) -> None:
    script.write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    assert look("train.py") == ""


def test_warnings_of_the_compiler_are_left_to_the_workers(script: Path) -> None:
    script.write_text("x = 1 is 1\n")
    assert look("train.py") == ""


def test_folders_are_made(script: Path) -> None:
    look("--ckpt-dir", "a/b", "--log-dir", "c", "train.py")
    assert (script.parent / "a" / "b").is_dir()
    assert (script.parent / "c").is_dir()
    look("--ckpt-dir", "memory://x", "--log-dir", os.devnull, "train.py")


@pytest.mark.parametrize("flag", ["--ckpt-dir", "--log-dir"])
@pytest.mark.parametrize("place", ["train.py", "train.py/below", "/proc/nothing/here"])
def test_unusable_folders(script: Path, flag: str, place: str) -> None:
    with pytest.raises(AimasterError) as caught:
        look(flag, place, "train.py")
    assert isinstance(caught.value, FolderUnusable)
    assert caught.value.exit_code is ExitCode.SETUP
    assert flag in str(caught.value)
    assert caught.value.next_step


def test_wrong_rules_end_before_anything_starts(script: Path) -> None:
    rules = script.with_name("own.yaml")
    rules.write_text("- {name: a, match: {text: '('}, cause: c, blame: user, retry: once, do: d}")
    with pytest.raises(UsageError, match=r"own\.yaml, row 1"):
        look("--rules", str(rules), "train.py")
    rules.write_text("- {name: a, match: {text: x}, cause: c, blame: user, retry: once, do: d}")
    assert look("--rules", str(rules), "train.py") == ""
