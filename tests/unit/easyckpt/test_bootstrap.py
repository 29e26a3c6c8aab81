"""Who a process is, by its environment; and that nobody becomes rank 0 by accident."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from easyckpt.api import Checkpointer
from easyckpt.bootstrap import _socket_path, read_placement
from easyckpt.errors import Misuse, SaverUnavailable


def test_a_process_alone_is_rank_0_of_1() -> None:
    placement = read_placement({})
    assert (placement.rank, placement.world_size, placement.saver) == (0, 1, "")


def test_ranks_of_a_launcher() -> None:
    placement = read_placement(
        {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "run"}
    )
    assert (placement.rank, placement.world_size, placement.store_port, placement.job_id) == (3, 4, 1, "run")


def test_under_an_agent_the_saver_and_the_generation_are_given() -> None:
    ours = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "EASYCKPT_SAVER": "/s",
        "EASYCKPT_GENERATION": "7",
        "AIMASTER_JOB_ID": "j",
    }
    placement = read_placement(ours)
    assert (placement.saver, placement.generation, placement.job_id) == ("/s", 7, "j")
    for name in ("RANK", "WORLD_SIZE", "EASYCKPT_GENERATION"):
        with pytest.raises(Misuse, match=name):
            read_placement({key: value for key, value in ours.items() if key != name})


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2"},
        {"RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "http"},
    ],
)
def test_an_incomplete_environment_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(Misuse):
        read_placement(environment)


def test_a_folder_that_others_can_reach_into_is_refused(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    clean_env.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / f"easyckpt-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(Misuse, match="this user alone"):
        _socket_path("x")
    folder.chmod(0o700)
    assert _socket_path("x") == _socket_path("x") != _socket_path("y")


def test_a_temp_folder_whose_name_is_too_long_for_a_socket_is_not_used(
    tmp_path: Path, clean_env: pytest.MonkeyPatch
) -> None:
    clean_env.setattr("tempfile.tempdir", str(tmp_path / ("x" * 100)))
    clean_env.delenv("XDG_RUNTIME_DIR", raising=False)
    with pytest.raises(SaverUnavailable, match="107 bytes"):
        _socket_path("x")
    clean_env.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert _socket_path("x").startswith(str(tmp_path / "easyckpt-"))


@pytest.mark.parametrize(
    "arguments",
    [{}, {"root": "r", "keep": 0}, {"root": "r", "disk_interval": 0}, {"root": "r", "disk_interval": True}],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(Misuse):
        Checkpointer(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [-1, 1.5, "3", True, 10**16])
def test_steps_that_cannot_be_are_refused(tmp_path: Path, step: object) -> None:
    with pytest.raises(Misuse, match="step"):
        Checkpointer(tmp_path).save({}, step=step)  # type: ignore[arg-type]


def test_the_saver_and_the_package_start_without_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, easyckpt, easyckpt.saver.__main__, easyckpt.saver.client; print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
