"""Which modules of the last attempt are imported ahead."""

from __future__ import annotations

import sys
from pathlib import Path

from aimaster.agent import modules


def _read(tmp_path: Path, rows: list[tuple[str, str]]) -> tuple[str, ...]:
    path = tmp_path / "modules.txt"
    path.write_text("".join(f"{name}\t{origin}\n" for name, origin in rows))
    found = modules.read_list(path, modules.library_roots())
    assert found[: len(modules.ALWAYS)] == modules.ALWAYS
    return found[len(modules.ALWAYS) :]


def test_libraries_in_the_order_of_loading_and_nothing_of_the_user(tmp_path: Path) -> None:
    import json.decoder

    import numpy

    own = tmp_path / "venv"
    rows = [
        ("numpy", str(numpy.__file__)),
        ("mine", str(tmp_path / "mine.py")),
        ("json.decoder", str(json.decoder.__file__)),
        ("__main__", str(json.decoder.__file__)),
        ("aimaster.worker.hook", str(numpy.__file__)),
        ("sys", "built-in"),
        ("not a name", str(numpy.__file__)),
        ("lib.near", f"{numpy.__file__}/../../../../{own.name}/x.py"),
    ]
    assert _read(tmp_path, rows) == ("numpy", "json.decoder")


def test_a_link_into_the_users_folder_is_the_users(tmp_path: Path) -> None:
    root = next(path for path in modules.library_roots() if path.startswith(sys.prefix))
    assert modules._is_ahead("x", f"{root}x/__init__.py", (root,))
    link = tmp_path / "lib"
    (tmp_path / "mine").mkdir()
    link.symlink_to(tmp_path / "mine")
    assert not modules._is_ahead("x", str(link / "x.py"), (str(link) + "/",))


def test_no_list_and_a_broken_one(tmp_path: Path) -> None:
    assert modules.read_list(tmp_path / "none", modules.library_roots()) == modules.ALWAYS
    (tmp_path / "broken").write_bytes(b"\xff\x00\n\t\t\n\n" * 100)
    assert modules.read_list(tmp_path / "broken", modules.library_roots()) == modules.ALWAYS
