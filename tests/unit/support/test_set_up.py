"""The set-up script and the Makefile, as far as they can be tried without installing anything."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tools" / "set_up.py"


@pytest.fixture
def set_up() -> ModuleType:
    spec = importlib.util.spec_from_file_location("set_up", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_all_that_is_missing_is_named_at_once(tmp_path: Path) -> None:
    """With nothing on PATH the script says what it needs, and leaves before it makes or fetches anything."""
    copy = tmp_path / "tools" / "set_up.py"
    copy.parent.mkdir()
    shutil.copy(SCRIPT, copy)
    done = subprocess.run(
        [sys.executable, str(copy)], env={"PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    for word in ("g++", "git", "make", "apt-get install"):
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tools"]


def test_compiler_named_by_variable_counts(set_up: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CXX", "clang++")
    assert not any("compiler" in line for line in set_up.look_at_machine())


def test_stamp_follows_its_inputs(
    set_up: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in set_up.INPUTS:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(set_up, "ROOT", str(tmp_path))
    monkeypatch.setattr(set_up, "STAMP", str(tmp_path / "stamp"))
    before = set_up.stamp_text()
    assert not set_up.stamp_is(before)
    (tmp_path / "stamp").write_text(before)
    assert set_up.stamp_is(before)
    with (tmp_path / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    assert not set_up.stamp_is(set_up.stamp_text())


def test_cuda_builds_are_known_by_what_they_bring(set_up: ModuleType) -> None:
    assert set_up.is_cuda('nvidia-nccl-cu13==2.29.7; platform_system == "Linux"')
    assert set_up.is_cuda("cuda-toolkit[cublas]==13.0.3")
    assert not set_up.is_cuda("sympy>=1.13.3")


def test_torch_is_the_one_of_the_constraints(set_up: ModuleType) -> None:
    assert set_up.TORCH in (ROOT / "constraints.txt").read_text().splitlines()


def test_makefile_says_what_is_missing_and_what_it_can() -> None:
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    done = subprocess.run([make, "help"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert {"demo", "test", "lint"} <= {line.split()[0] for line in done.stdout.splitlines()}
    done = subprocess.run(
        [make, "PYTHON=python-that-is-not-there", "venv"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "python-that-is-not-there" in done.stderr
