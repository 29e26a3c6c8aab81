"""What a program imports is known to its next job; losing that costs warmth and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from aimaster.agent.modules import MEMORIES_MAX, memory_path, recall, remember


def test_list_of_one_job_is_the_first_of_the_next(tmp_path: Path) -> None:
    memory = memory_path(tmp_path / "memory", ("python", "script", "train.py"))
    (tmp_path / "one.txt").write_text("numpy\n")
    remember(tmp_path / "one.txt", memory)
    recall(memory, tmp_path / "two.txt")
    assert (tmp_path / "two.txt").read_text() == "numpy\n"


def test_list_that_is_here_already_is_newer(tmp_path: Path) -> None:
    memory = memory_path(tmp_path / "memory", ("python", "script", "train.py"))
    (tmp_path / "one.txt").write_text("old\n")
    remember(tmp_path / "one.txt", memory)
    (tmp_path / "two.txt").write_text("new\n")
    recall(memory, tmp_path / "two.txt")
    assert (tmp_path / "two.txt").read_text() == "new\n"


def test_programs_are_told_apart_by_their_real_place(tmp_path: Path) -> None:
    (tmp_path / "link.py").symlink_to(tmp_path / "train.py")
    named = [
        memory_path(tmp_path, ("python", "script", str(tmp_path / name))) for name in ("train.py", "link.py")
    ]
    assert named[0] == named[1]
    assert memory_path(tmp_path, ("python", "module", str(tmp_path / "train.py"))) != named[0]


def test_oldest_memories_go_first(tmp_path: Path) -> None:
    source = tmp_path / "one.txt"
    source.write_text("numpy\n")
    folder = tmp_path / "memory"
    for number in range(MEMORIES_MAX + 3):
        path = memory_path(folder, ("python", "script", str(number)))
        remember(source, path)
        os.utime(path, (number, number))
    remember(source, memory_path(folder, ("python", "script", "last")))
    assert len(list(folder.iterdir())) == MEMORIES_MAX
    assert not memory_path(folder, ("python", "script", "0")).exists()


def test_folder_that_cannot_be_made_is_no_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = memory_path(tmp_path / "file", ("python", "script", "train.py"))
    remember(tmp_path / "file", memory)
    recall(memory, tmp_path / "two.txt")
    assert not (tmp_path / "two.txt").exists()
