"""Modules that look at a worker's variables when they are imported are found, with whoever imports them."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from aimaster.agent.importwatch import ImportWatch


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("watched_")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "read",
    [
        "os.environ.get('RANK')",
        "os.getenv('RANK', '0')",
        "'RANK' in os.environ",
        "os.environ.setdefault('RANK', '1')",
    ],
)
def test_every_way_to_read(modules: Path, monkeypatch: pytest.MonkeyPatch, read: str) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (modules / "watched_reads.py").write_text(f"import os\nHOME = os.environ.get('HOME')\nX = {read}\n")
    (modules / "watched_imports.py").write_text("import watched_reads\n")
    (modules / "watched_clean.py").write_text(
        "import os\nX = os.environ.get('HOME')\ndef f(): return os.getenv('RANK')\n"
    )
    with ImportWatch(frozenset({"RANK"})) as watch:
        importlib.import_module("watched_clean")
        importlib.import_module("watched_imports")
    monkeypatch.delenv("RANK", raising=False)
    ours = {name: why for name, why in watch.tainted.items() if name.startswith("watched_")}
    assert ours == dict.fromkeys(
        ("watched_reads", "watched_imports"), "watched_reads reads RANK when it is imported"
    )
    assert type(os.environ) is os._Environ


def test_the_environment_works_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    with ImportWatch(frozenset({"RANK"})):
        monkeypatch.setenv("A_NAME", "a value")
        assert os.environ["A_NAME"] == "a value"
        with pytest.raises(KeyError):
            os.environ["NO_SUCH_NAME"]
        assert dict(os.environ)["A_NAME"] == "a value"
