"""``dcp.save`` and ``dcp.load`` through our storage, and DCP's own folders in and out."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

import easyckpt
from easyckpt.cli import main
from easyckpt.errors import CorruptCheckpoint, Misuse
from easyckpt.interop import export_step, import_state
from easyckpt.interop.dcp import DcpReader, DcpWriter
from easyckpt.interop.picklescan import check_imports

WORKER = Path(__file__).with_name("dcp_worker.py")
WAIT_S = 150


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch says that there is no process group, which is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def state(fill: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"w": torch.arange(6.0).view(2, 3) * fill, "half": torch.full((3,), fill).bfloat16()},
        "scalar": torch.tensor(fill),
        "empty": torch.empty(0, 4),
        "columns": (torch.arange(12).view(3, 4) * int(fill)).t(),
        "values": {"step": 7, "name": "run", "list": [1, (2.5, None)]},
        "odd.key": torch.full((2,), fill),
    }


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return bool(one == two)


def save(root: Path, step: int, value: dict[str, Any] | None = None, **options: Any) -> None:
    writer = DcpWriter(str(root), step=step)
    dcp.save(value if value is not None else state(), storage_writer=writer, no_dist=True, **options)


def load(root: Path, **options: Any) -> dict[str, Any]:
    loaded = state(0.0)
    loaded["values"] = {"step": 0, "name": "", "list": []}
    dcp.load(loaded, storage_reader=DcpReader(str(root), **options), no_dist=True)
    return loaded


def test_what_is_saved_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 7)
    assert same(load(tmp_path), state())
    assert main(["verify", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    names = {tensor["name"] for tensor in json.loads(capsys.readouterr().out)["tensors"]}
    assert "dcp.model.w" in names


def test_the_newest_or_a_given_step(tmp_path: Path) -> None:
    for step in (7, 8, 9):
        save(tmp_path, step, state(float(step)))
    assert same(load(tmp_path)["scalar"], torch.tensor(9.0))
    assert same(load(tmp_path, step=8)["scalar"], torch.tensor(8.0))
    assert len(list((tmp_path / "generations").iterdir())) == 1, "one process is one life"
    save(tmp_path, 9, state(99.0))  # after going back to 8
    assert same(load(tmp_path)["scalar"], torch.tensor(99.0)), "what was left behind is not seen"


def test_an_asynchronous_save_has_the_values_of_the_call(tmp_path: Path) -> None:
    value = state()
    saving = dcp.async_save(value, storage_writer=DcpWriter(str(tmp_path), step=3))
    for tensor in value["model"].values():
        tensor.zero_()
    saving.result(timeout=WAIT_S)
    assert same(load(tmp_path, step=3), state())
    refused = dcp.async_save(value, storage_writer=DcpWriter(str(tmp_path), step=2))
    with pytest.raises(dcp.api.CheckpointException, match="not newer"):
        refused.result(timeout=WAIT_S)


def test_a_step_that_is_not_newer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 7)
    with pytest.raises(dcp.api.CheckpointException, match="not newer"):
        save(tmp_path, 7)
    assert same(load(tmp_path), state())


def test_the_step_may_be_in_the_checkpoint_id(tmp_path: Path) -> None:
    root = str(tmp_path)
    dcp.save(state(), checkpoint_id="run/step-12", storage_writer=DcpWriter(root), no_dist=True)
    loaded = state(0.0)
    dcp.load(loaded, checkpoint_id="run/step-12", storage_reader=DcpReader(root), no_dist=True)
    assert same(loaded, state())
    with pytest.raises(Misuse, match="number"):
        dcp.save(state(), checkpoint_id="final", storage_writer=DcpWriter(root), no_dist=True)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    save(tmp_path, 7)
    (body,) = tmp_path.glob("data/**/*.safetensors")
    raw = bytearray(body.read_bytes())
    raw[4100] ^= 1
    body.write_bytes(raw)
    with pytest.raises((CorruptCheckpoint, dcp.api.CheckpointException), match="differ from their hash"):
        load(tmp_path)


class Evil:
    """What a pickle could do."""

    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_byte_items_run_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 7, {"evil": Evil()})
    with pytest.raises(dcp.api.CheckpointException, match="only unpickling"):
        dcp.load({"evil": None}, storage_reader=DcpReader(str(tmp_path)), no_dist=True)
    assert "ran" not in capsys.readouterr().out
    reader = DcpReader(str(tmp_path), trust_pickles=True)
    dcp.load({"evil": None}, storage_reader=reader, no_dist=True)
    assert "ran" in capsys.readouterr().out


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    save(tmp_path, 7)
    with pytest.raises(dcp.api.CheckpointException, match="cannot be stored"):
        save(tmp_path, 8, {"w": torch.ones(3).to_sparse()})
    assert same(load(tmp_path), state())
    save(tmp_path, 9)
    assert load(tmp_path) is not None


def test_steps_of_the_checkpointer_are_read_too(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    with easyckpt.Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save({"model": net}, step=1).wait("durable", timeout=120)
    other = {"model": {key: torch.zeros_like(value) for key, value in net.state_dict().items()}}
    dcp.load(other, storage_reader=DcpReader(str(tmp_path)), no_dist=True)
    assert same(other["model"], dict(net.state_dict()))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.arange(20.0).view(5, 4)).square().mean().backward()
        optimizer.step()
    return net, optimizer


def test_an_export_is_loaded_by_dcp_itself(tmp_path: Path) -> None:
    net, optimizer = trained()
    with easyckpt.Checkpointer(str(tmp_path / "ckpt")) as checkpointer:
        held = {"model": net, "optimizer": optimizer, "epoch": 2}
        checkpointer.save(held, step=2).wait("durable", timeout=120)
    export_step(str(tmp_path / "ckpt"), str(tmp_path / "dcp"), to="dcp")
    fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(fresh, other)
    loaded = {"model": model_state, "optimizer": optimizer_state, "epoch": 0}
    dcp.load(loaded, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    fresh.load_state_dict(loaded["model"])
    set_optimizer_state_dict(fresh, other, loaded["optimizer"])
    assert loaded["epoch"] == 2
    assert same(dict(fresh.state_dict()), dict(net.state_dict()))
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert other.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("by_name", [False, True])
def test_a_dcp_folder_is_imported(tmp_path: Path, by_name: bool) -> None:
    net, optimizer = trained()
    if by_name:
        model_state, optimizer_state = get_state_dict(net, optimizer)
    else:
        model_state, optimizer_state = net.state_dict(), optimizer.state_dict()
    held = {"model": model_state, "optimizer": optimizer_state, "meta": {"epoch": 2, "tags": ["a"]}}
    dcp.save(held, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    root = str(tmp_path / "ckpt")
    assert main(["import", str(tmp_path / "dcp"), root, "--step", "2"]) == 0
    fresh = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    target: dict[str, Any] = {"model": fresh, "optimizer": other, "meta": {}}
    with easyckpt.Checkpointer(root) as checkpointer:
        assert checkpointer.load(target) == 2
    assert same(dict(fresh.state_dict()), dict(net.state_dict()))
    assert same(other.state_dict()["state"], optimizer.state_dict()["state"])
    assert other.param_groups[0]["lr"] == 0.1
    assert target["meta"] == {"epoch": 2, "tags": ["a"]}


def test_metadata_that_would_run_code_is_not_loaded(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(Misuse, match=r"builtins\.print"):
        import_state(str(tmp_path / "dcp"), str(tmp_path / "ckpt"), step=1)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_the_scan_sees_every_import(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps([torch.Size, Path("a"), Evil(), {"x": print}], protocol=protocol))
    with pytest.raises(Misuse, match="print"):
        check_imports(path, frozenset({"torch.Size", "pathlib.PosixPath"}))
    path.write_bytes(pickle.dumps([torch.Size, torch.Size, "builtins", "print"], protocol=protocol))
    allowed = frozenset({"torch.Size", "copyreg._reconstructor", "builtins.*"})
    check_imports(path, allowed)


def test_a_name_that_is_put_together_is_unknown(tmp_path: Path) -> None:
    """Texts that come from elsewhere than the two opcodes before are never taken for the name."""
    path = tmp_path / "pickle"
    strange = b"\x80\x04\x8c\x02os\x8c\x06system0\x8c\x05torch\x8c\x04Size\x30\x30\x93."
    path.write_bytes(strange)
    with pytest.raises(Misuse, match=r"import \?"):
        check_imports(path, frozenset({"torch.Size"}))
    path.write_bytes(b"not a pickle")
    with pytest.raises(CorruptCheckpoint):
        check_imports(path, frozenset())


def run_ranks(what: str, root: Path, log: Path, *, world: int) -> dict[str, str]:
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), what, str(root), str(log)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=WAIT_S)
            assert worker.returncode == 0, errors[-3000:]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    found: dict[str, str] = json.loads(log.read_text())
    return found


@pytest.mark.slow
def test_fsdp2_on_two_ranks_loads_on_three_and_one(tmp_path: Path) -> None:
    root = tmp_path / "ckpt"
    two = run_ranks("save", root, tmp_path / "two.json", world=2)
    assert len(two) > 10
    for world in (3, 1):
        assert run_ranks("load", root, tmp_path / f"{world}.json", world=world) == two
