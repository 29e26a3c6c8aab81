"""The DeepSpeed example as a user runs it: alone, under torchrun, resumed, killed, and as the whole demo."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.extensions import DEEPSPEED

pytest.importorskip("deepspeed", reason="deepspeed is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

EXAMPLE = Path(__file__).parents[2] / "examples" / "hello_deepspeed"
SMALL = ("--hidden_size", "64", "--layers", "1", "--vocab_size", "600")
STEPS = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(script: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> list[str]:
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *launcher,
    ]
    return [*torchrun, str(script), *SMALL, *arguments]


def environment() -> dict[str, str]:
    """For a launcher.

    torchrun 2.13 keeps one store over restarts, in which gloo of the next attempt reads the addresses of the
    last one: "failed to connect", or a hang, in about every second restart. A store of its own helps.
    """
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {**os.environ, **own_store, **DEEPSPEED}


def train(script: Path, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Run the script under torchrun to its end; returns what it printed."""
    done = subprocess.run(
        command(script, "--cache_dir", str(folder.parent / "cache"), *arguments, launcher=launcher),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def step_lines(folder: Path) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for path in sorted(folder.glob("rank*.jsonl")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    return lines


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script without its easyckpt lines, run once; every other run must export the same."""
    folder = tmp_path_factory.mktemp("example") / "plain"
    folder.mkdir()
    for name in ("text_data.py", "ds_config.json"):
        shutil.copy(EXAMPLE / name, folder)
    lines = (EXAMPLE / "train.py").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.endswith("# easyckpt\n")]
    assert 5 <= len(lines) - len(kept) <= 10, "a few lines, as the documentation says"
    (folder / "train.py").write_text("".join(kept))
    assert "easyckpt." not in "".join(kept).split('"""', 2)[2]
    arguments = ("--steps", str(STEPS), "--export", "final.safetensors", "--step_log", "steps")
    printed = train(folder / "train.py", folder, *arguments)
    assert f"step {STEPS}/{STEPS} loss" in printed
    return folder


@pytest.fixture
def folder(plain: Path, request: pytest.FixtureRequest) -> Path:
    made = plain.parent / request.node.name
    made.mkdir()
    return made


def test_easyckpt_lines_change_no_bit_and_tensorboard_gets_the_loss(plain: Path, folder: Path) -> None:
    train(
        EXAMPLE / "train.py", folder, "--steps", str(STEPS), "--checkpoint_dir", "ckpt",
        "--export", "final.safetensors", "--tensorboard", "board", "--step_log", "steps",
    )  # fmt: skip
    assert (folder / "final.safetensors").read_bytes() == (plain / "final.safetensors").read_bytes()
    losses = [(line["rank"], line["step"], line["loss"]) for line in step_lines(folder / "steps")]
    assert losses == [(line["rank"], line["step"], line["loss"]) for line in step_lines(plain / "steps")]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "board"))
    board.Reload()
    assert [event.step for event in board.Scalars("loss")] == list(range(1, STEPS + 1))


def test_a_second_job_goes_on_where_the_first_ended(plain: Path, folder: Path) -> None:
    half = STEPS // 2
    for steps in (half, STEPS):
        train(
            EXAMPLE / "train.py", folder, "--steps", str(steps), "--checkpoint_dir", "ckpt",
            "--export", "final.safetensors", "--step_log", "steps",
        )  # fmt: skip
    assert (folder / "final.safetensors").read_bytes() == (plain / "final.safetensors").read_bytes()
    lines = step_lines(folder / "steps")
    assert sorted(line["step"] for line in lines if line["rank"] == 0) == list(range(1, STEPS + 1))
    assert {line["resumed_step"] for line in lines if line["step"] > half} == {half}


def test_a_killed_rank_under_torchrun_ends_bit_equal(plain: Path, folder: Path) -> None:
    """torchrun restarts all ranks; they resume from what the saver holds in memory."""
    arguments = (
        "--cache_dir", str(folder.parent / "cache"), "--steps", str(STEPS), "--checkpoint_dir", "ckpt",
        "--export", "final.safetensors", "--step_log", "steps",
    )  # fmt: skip
    with open(folder / "output", "wb") as output:
        process = subprocess.Popen(
            command(EXAMPLE / "train.py", *arguments, launcher=("--max-restarts", "1")),
            cwd=folder, env=environment(), stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + 300
        while not (
            mine := [one for one in step_lines(folder / "steps") if one["rank"] == 1 and one["step"] >= 10]
        ):
            assert process.poll() is None, (folder / "output").read_text()[-4000:]
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(mine[0]["pid"], signal.SIGKILL)
        assert process.wait(400) == 0, (folder / "output").read_text()[-4000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert (folder / "final.safetensors").read_bytes() == (plain / "final.safetensors").read_bytes()
    second = [line for line in step_lines(folder / "steps") if line["pid"] not in {mine[0]["pid"]}]
    assert {line["restored_from"] for line in second if line["generation"] > mine[0]["generation"]} == {
        "memory"
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--steps", "0"), "--steps and --save_interval"), (("--no_such_flag",), "unrecognized arguments")],
)
def test_bad_arguments_are_one_message(arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "train.py"), *arguments],
        env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_demo_at_reduced_size(tmp_path: Path) -> None:
    """Everything that `make demo` does; the promised times are for an idle machine and are widened here."""
    folder = tmp_path / "demo"
    done = subprocess.run(
        [
            sys.executable, str(EXAMPLE / "demo.py"), "--folder", str(folder), "--steps", "100",
            "--hidden_size", "128", "--layers", "2", "--time_factor", "10",
        ],
        env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    report = json.loads((folder / "report.json").read_text())
    assert report["problems"] == []
    assert report["bit_equal"] is True
    assert report["leftovers"] == {"processes": 0, "sockets": 0, "shm_bytes": 0}
    assert report["loss_last"] < report["loss_first"]
    killed, hung, lost = report["faults"]
    assert (killed["kind"], killed["restored_from"]) == ("worker_killed", "memory")
    assert (hung["kind"], hung["restored_from"]) == ("worker_hung", "memory")
    assert (lost["kind"], lost["restored_from"]) == ("node_lost", "peer")
    assert max(fault["recomputed_steps"] for fault in report["faults"]) <= 1
    assert all(f"incident {number} at" in done.stdout for number in (1, 2, 3)), "each one's story is told"
    change_one_weight(folder / "faulted" / "final.safetensors")
    judged = subprocess.run(
        [sys.executable, str(EXAMPLE / "check.py"), str(folder), "--time_factor", "10"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert judged.returncode == 1
    assert json.loads((folder / "report.json").read_text())["bit_equal"] is False
    assert "1 of" in judged.stdout


def change_one_weight(path: Path) -> None:
    """Flip the lowest bit of one element."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x01
    path.write_bytes(data)
