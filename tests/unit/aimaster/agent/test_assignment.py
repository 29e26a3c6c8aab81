"""What workers are told: torchrun's contract, ours beside it, and what must not reach them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from aimaster.agent import assignment as words
from aimaster.agent.assignment import Assignment, NodeIdentity
from aimaster.config import ProgramConfig, ProgramKind
from aimaster.ids import Generation, JobId, NodeId

IDENTITY = NodeIdentity(
    job=JobId("job"),
    node=NodeId("n1"),
    run_id="as given",
    run_dir=Path("/run/x"),
    ckpt_dir="/ckpt",
    saver_socket=Path("/s.sock"),
)
SECOND = Assignment(
    generation=Generation(7),
    attempt=3,
    node_rank=1,
    nodes=3,
    first_rank=2,
    world_size=6,
    master_addr="10.0.0.1",
    master_port=4321,
)


def _env(base: dict[str, str], *, nproc: int = 2, local_rank: int = 1, identity: NodeIdentity = IDENTITY):
    common = words.common_env(base, identity, nproc=nproc)
    return words.worker_env(common, identity, assignment=SECOND, local_rank=local_rank, nproc=nproc)


def test_ranks() -> None:
    env = _env({})
    wanted = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "6",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "6",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_RUN_ID": "as given",
        "AIMASTER_GENERATION": "7",
        "EASYCKPT_DIR": "/ckpt",
        "EASYCKPT_SAVER": "/s.sock",
        "EASYCKPT_GENERATION": "7",
    }
    assert {name: env[name] for name in wanted} == wanted


def test_secrets_and_marks_of_the_agent_stay_with_it() -> None:
    base = {"AIMASTER_JOB_SECRET": "s", "AIMASTER_OWNER": "o", "AIMASTER_AGENT": "/outer", "HOME": "/h"}
    common = words.common_env(base, IDENTITY, nproc=1)
    assert "s" not in common.values()
    assert common["HOME"] == "/h"
    assert not {"AIMASTER_OWNER", "AIMASTER_AGENT"} & common.keys()


@pytest.mark.parametrize(
    ("base", "nproc", "threads"), [({}, 2, "1"), ({}, 1, None), ({"OMP_NUM_THREADS": "5"}, 2, "5")]
)
def test_openmp_threads(base: dict[str, str], nproc: int, threads: str | None) -> None:
    assert words.common_env(base, IDENTITY, nproc=nproc).get("OMP_NUM_THREADS") == threads


def test_the_flight_recorder_is_on_unless_the_user_decided() -> None:
    name = words.flight_recorder_name()
    assert int(words.common_env({}, IDENTITY, nproc=1)[name]) > 0
    for own in words.FLIGHT_RECORDER_NAMES:
        common = words.common_env({own: "0"}, IDENTITY, nproc=1)
        assert [common.get(key) for key in sorted(words.FLIGHT_RECORDER_NAMES) if key in common] == ["0"]


def test_nothing_of_one_worker_is_in_what_all_have_in_common() -> None:
    common = words.common_env(dict.fromkeys(words.PER_WORKER, "old"), IDENTITY, nproc=2)
    assert not words.PER_WORKER & common.keys()
    assert "old" not in _env(dict.fromkeys(words.PER_WORKER, "old")).values()


@pytest.mark.parametrize(("visible", "device"), [(None, "1"), ("4,6", "6")])
def test_virtual_local_rank(visible: str | None, device: str) -> None:
    identity = NodeIdentity(
        job=JobId("j"), node=NodeId("n"), run_id="j", run_dir=Path("/r"), virtual_local_rank=True
    )
    base = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    env = _env(base, identity=identity)
    assert (env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"], env["AIMASTER_LOCAL_RANK"]) == ("0", device, "1")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES=4"):
        _env({"CUDA_VISIBLE_DEVICES": "4"}, identity=identity)


@pytest.mark.parametrize(
    ("kind", "words_before"),
    [
        (ProgramKind.SCRIPT, ["py", "-u", "it"]),
        (ProgramKind.MODULE, ["py", "-u", "-m", "it"]),
        (ProgramKind.RUN_PATH, ["py", "-u", "-m", "aimaster.worker.entry", "it"]),
        (ProgramKind.NO_PYTHON, ["it"]),
    ],
)
def test_command_lines(kind: ProgramKind, words_before: list[str]) -> None:
    program = ProgramConfig(kind=kind, target="it", args=("--x", "${local_rank}", "$HOME", "{nnodes}"))
    line = words.argv(program, "py", local_rank=1, assignment=SECOND)
    assert line == [*words_before, "--x", "1", "$HOME", "{nnodes}"]


def test_fields_of_a_command() -> None:
    program = ProgramConfig(
        kind=ProgramKind.COMMAND,
        target="torchrun",
        args=(
            "--nnodes={nnodes}",
            "{node_rank}",
            "{master_addr}:{master_port}",
            '{"json": {}}',
            "${local_rank}",
        ),
    )
    line = words.argv(program, "py", local_rank=0, assignment=SECOND)
    assert line == ["torchrun", "--nnodes=3", "1", "10.0.0.1:4321", '{"json": {}}', "${local_rank}"]


def test_a_node_that_starts_alone_is_a_world_of_its_own() -> None:
    env = _env({}, identity=replace(IDENTITY, own_world=True))
    assert (env["RANK"], env["WORLD_SIZE"]) == ("1", "2")
    assert (env["ROLE_RANK"], env["ROLE_WORLD_SIZE"]) == ("3", "6")
    assert (env["GROUP_RANK"], env["GROUP_WORLD_SIZE"]) == ("1", "3")
    assert env["EASYCKPT_DIR"] == "/ckpt/node1"
