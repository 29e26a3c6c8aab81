"""A DeepSpeed engine that is saved, loaded into a new process and trained on, compared bit by bit.

All cases of one kind run in one launch, since importing DeepSpeed costs more than training them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.extensions import DEEPSPEED

pytest.importorskip("deepspeed", reason="deepspeed is not installed")

WORKER = Path(__file__).with_name("deepspeed_worker.py")
CASES = (
    "zero1_bf16",
    "zero1_fp32",
    "zero1_bf16_fp32_sums",
    "zero1_accumulation",
    "zero1_aligned",
    "zero1_fp16",
    "zero2_bf16",
    "zero2_round_robin",
    "zero3_bf16",
    "zero3_fp32",
    "stage0_bf16",
    "stage0_fp16",
    "stage0_fp32",
    "sgd",
)
RANKS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def launch(*arguments: str, ranks: int = RANKS) -> None:
    """Run the worker under torchrun; its output is shown when it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(WORKER), *arguments],
        env={**os.environ, **DEEPSPEED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of all cases: trained straight through, and resumed in new processes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    launch("straight", str(folder), *CASES)
    launch("resume", str(folder), *CASES)
    return folder


def assert_equal_files(folder: Path, case: str) -> None:
    for rank in range(RANKS):
        for suffix in ("safetensors", "plain", "json"):
            for one, other in (("saved", "loaded"), ("straight", "resume")):
                first = (folder / f"{case}.{one}.{rank}.{suffix}").read_bytes()
                second = (folder / f"{case}.{other}.{rank}.{suffix}").read_bytes()
                assert first == second, f"{case}: {one} and {other} differ in {suffix} of rank {rank}"
        straight = (folder / f"{case}.straight.{rank}.safetensors").read_bytes()
        assert straight != (folder / f"{case}.saved.{rank}.safetensors").read_bytes(), "nothing was trained"


@pytest.mark.parametrize("case", CASES)
def test_restored_state_and_continuation_are_bit_equal(trained: Path, case: str) -> None:
    assert_equal_files(trained, case)


def test_ranges_cover_every_master_once(trained: Path) -> None:
    """The flat ranges of all ranks together are each trained parameter, without gap or overlap."""
    spans: dict[str, list[tuple[int, int]]] = {}
    elements: dict[str, int] = {}
    for rank in range(RANKS):
        layout = json.loads((trained / f"zero1_bf16.saved.{rank}.json").read_text())
        for _, name, kind, _, shape, offsets, sizes, *_ in layout["chunks"]:
            if kind == "flat":
                elements[name] = math.prod(shape)
                spans.setdefault(name, []).append((offsets[0], offsets[0] + sizes[0]))
    assert {name.split(".", 2)[1] for name in spans} == {"master", "state"}
    assert any(len(parts) == 2 for parts in spans.values()), "no parameter was cut; the case tests nothing"
    for name, parts in spans.items():
        position = 0
        for begin, end in sorted(parts):
            assert begin == position, name
            position = end
        assert position == elements[name], name


def test_cpu_offload_with_deepspeeds_own_adam(tmp_path: Path) -> None:
    """Its bias corrections live in C++; builds the op for about two minutes the first time."""
    launch("straight", str(tmp_path), "offload")
    launch("resume", str(tmp_path), "offload")
    assert_equal_files(tmp_path, "offload")


def test_refusals_name_the_reason_and_change_nothing(tmp_path: Path) -> None:
    launch("refuse", str(tmp_path), ranks=1)
    said = json.loads((tmp_path / "refusals.0.json").read_text())
    assert "gradients are waiting" in said["between backward and step"]
    assert "gradients are waiting" in said["half of an accumulation"]
    assert "0.1.0 was not tried" in said["another version"]
    assert "EASYCKPT_DEEPSPEED_UNTESTED" in said["another version"]
