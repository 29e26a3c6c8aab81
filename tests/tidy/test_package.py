"""What an installation brings: every file of the packages, every command, and nothing at import."""

from __future__ import annotations

import fnmatch
import importlib
import subprocess
import sys
from typing import Any

import pytest

from tests.tidy.source import PACKAGES, files, text_of

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads toml")


@pytest.fixture
def project() -> dict[str, Any]:
    parsed: dict[str, Any] = tomllib.loads(text_of("pyproject.toml"))
    return parsed


def test_data_files_are_packed(project: dict[str, Any]) -> None:
    patterns = project["tool"]["setuptools"]["package-data"]
    data = [
        name for name in files() if name.startswith(tuple(f"{p}/" for p in PACKAGES)) and name[-3:] != ".py"
    ]
    packed = {f"{package}/{pattern}" for package in PACKAGES for pattern in patterns[package]}
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in packed)] == []


def test_commands_lead_to_functions(project: dict[str, Any]) -> None:
    scripts = project["project"]["scripts"]
    assert set(scripts) == set(PACKAGES)
    hooks = project["project"]["entry-points"]["torch.backends"]
    for target in (*scripts.values(), *hooks.values()):
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), target


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_does_nothing(package: str) -> None:
    """No thread, no child, no output; torch only where the package cannot do without."""
    code = (
        f"import sys, threading, os, {package}\n"
        "children = open(f'/proc/self/task/{os.getpid()}/children').read()\n"
        "print(threading.active_count(), repr(children), 'torch' in sys.modules, 'grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    threads, children, torch, grpc = done.stdout.split()
    assert children == "''"
    assert grpc == "False"
    if package != "easyckpt":
        assert (threads, torch) == ("1", "False")
