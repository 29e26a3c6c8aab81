"""DeepSpeed's own calls through easyckpt, its own folders, and universal checkpoints that it loads itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt.cli import main
from easyckpt.errors import Misuse
from easyckpt.integrations.deepspeed import attach
from easyckpt.interop import export_step, import_state
from tests.extensions import DEEPSPEED

WORKER = Path(__file__).with_name("deepspeed_interop_worker.py")


def launch(what: str, folder: Path, *, ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*command, str(WORKER), what, str(folder)],
        env={**os.environ, **DEEPSPEED},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def results(folder: Path, what: str, rank: int) -> dict:
    return json.loads((folder / f"{what}-{rank}.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_deepspeed_job_goes_on_from_each(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    launch("save", tmp_path, ranks=2)
    assert main(["export", str(tmp_path / "ours"), str(tmp_path / "universal"), "--to", "deepspeed"]) == 0
    launch("load", tmp_path, ranks=2)
    for rank in range(2):
        wanted = results(tmp_path, "save", rank)["undisturbed"]
        found = results(tmp_path, "load", rank)
        assert found == {"ours": wanted, "theirs": wanted, "universal": wanted}
    convert(tmp_path / "theirs" / "global_step3", tmp_path / "converted" / "global_step3")
    for name in ("universal", "converted"):
        into_a_plain_job(tmp_path / name, str(tmp_path / f"plain-{name}"))


def convert(source: Path, target: Path) -> None:
    """By DeepSpeed's own program."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
            *("--input_folder", str(source), "--output_folder", str(target)),
        ],
        env={**os.environ, **DEEPSPEED},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def into_a_plain_job(source: Path, root: str) -> None:
    """A job that knows nothing of DeepSpeed, at another size."""
    tag = source / "global_step3"
    assert main(["import", str(tag), root, "--step", "3"]) == 0
    net = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    with easyckpt.Checkpointer(root) as checkpointer:
        found_step = checkpointer.load({"model": net, "optimizer": optimizer}, strict=False)
    assert found_step == 3
    assert optimizer.state[net[0].weight]["step"] == 3
    for name, parameter in net.named_parameters():
        wanted = torch.load(tag / "zero" / name / "fp32.pt", weights_only=True)["param"]
        assert torch.equal(parameter, wanted.view(parameter.shape))
        moment = torch.load(tag / "zero" / name / "exp_avg.pt", weights_only=True)["param"]
        assert torch.equal(optimizer.state[parameter]["exp_avg"], moment.view(parameter.shape))


def test_a_module_and_its_optimizer_go_there_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    groups = [{"params": [net[0].weight, net[2].weight]}, {"params": [net[0].bias], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for _ in range(2):
        net(torch.rand(5, 3)).square().mean().backward()
        optimizer.step()
    with easyckpt.Checkpointer(str(tmp_path / "ckpt")) as checkpointer:
        checkpointer.save({"model": net, "optimizer": optimizer}, step=2).wait("durable", timeout=100)
    export_step(str(tmp_path / "ckpt"), str(tmp_path / "universal"), to="deepspeed")
    tag = tmp_path / "universal" / "global_step2" / "zero"
    assert torch.equal(torch.load(tag / "0.weight" / "fp32.pt", weights_only=True)["param"], net[0].weight)
    import_state(str(tmp_path / "universal"), str(tmp_path / "back"), step=2)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    other = torch.optim.AdamW(
        [{"params": [fresh[0].weight, fresh[2].weight]}, {"params": [fresh[0].bias]}], lr=0.5
    )
    with easyckpt.Checkpointer(str(tmp_path / "back")) as checkpointer:
        checkpointer.load({"model": fresh, "optimizer": other}, strict=False)
    assert torch.equal(fresh[2].weight, net[2].weight)
    assert torch.equal(fresh[1].running_mean, net[1].running_mean)
    assert other.param_groups[1]["weight_decay"] == 0.0
    assert other.param_groups[0]["lr"] == 0.1
    for one, two in ((fresh[0].weight, net[0].weight), (fresh[0].bias, net[0].bias)):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(other.state[one][key], optimizer.state[two][key])


def test_only_an_engine_is_attached() -> None:
    with pytest.raises(Misuse, match="no DeepSpeed engine"):
        attach(nn.Linear(2, 2))
