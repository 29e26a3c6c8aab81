"""Exports are read by the other side's own reader, imports are loaded into live objects."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import easyckpt
from easyckpt.cli import main
from easyckpt.errors import CorruptCheckpoint, Misuse, UnsupportedValue
from easyckpt.interop import ImportOptions, export_step, import_state
from easyckpt.interop.commit import commit_state
from easyckpt.interop.statedict import from_state_dict
from easyckpt.storage import open_storage


class Net(nn.Module):
    """Tied weights, buffers, a bf16 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 16)
        self.head.weight = self.body[0].weight
        self.low = nn.Linear(4, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean() + self.low(x[:, :4].bfloat16()).float().mean()


def trained(steps: int = 3, *, named: bool = False) -> dict[str, Any]:
    torch.manual_seed(1)
    net = Net()
    parameters: Any = net.named_parameters() if named else net.parameters()
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    state = {"model": net, "optimizer": optimizer, "scheduler": scheduler, "epoch": 0, "losses": [0.5]}
    for _ in range(steps):
        step(state)
    return state


def step(state: dict[str, Any]) -> float:
    loss = state["model"](torch.linspace(-1, 1, 64).view(8, 8))
    state["optimizer"].zero_grad()
    loss.backward()
    state["optimizer"].step()
    state["scheduler"].step()
    return loss.item()


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    """Both go on with the same bits."""
    for _ in range(2):
        assert step(one) == step(two)
    for (name, a), b in zip(
        one["model"].state_dict().items(), two["model"].state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name


def saved(root: Path, state: dict[str, Any], *, at: int = 3) -> str:
    with easyckpt.Checkpointer(str(root)) as checkpointer:
        checkpointer.save(state, step=at).wait("durable", timeout=120)
    return str(root)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return saved(tmp_path / "ckpt", trained())


def test_an_exported_torch_file_is_loaded_weights_only(folder: str, tmp_path: Path) -> None:
    target = tmp_path / "out" / "step.pt"
    assert main(["export", folder, str(target), "--to", "torch"]) == 0
    file = torch.load(target, weights_only=True)
    assert file["easyckpt_step"] == 3
    assert file["epoch"] == 0
    fresh, live = trained(0), trained()
    fresh["model"].load_state_dict(file["model"])
    fresh["optimizer"].load_state_dict(file["optimizer"])
    fresh["scheduler"].load_state_dict(file["scheduler"])
    assert_same(fresh, live)
    one, two = file["model"]["head.weight"], file["model"]["body.0.weight"]
    assert one.untyped_storage().data_ptr() == two.untyped_storage().data_ptr(), "tied weights stand once"
    assert [path.name for path in target.parent.iterdir()] == ["step.pt"], "something was left behind"


@pytest.mark.parametrize("named", [False, True])
def test_a_torch_file_is_imported_and_goes_on(tmp_path: Path, named: bool) -> None:
    state = trained(named=named)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        file = {key: value.state_dict() if hasattr(value, "state_dict") else value
                for key, value in state.items()}  # fmt: skip
    torch.save(file, tmp_path / "old.pt")
    root = tmp_path / "ckpt"
    assert main(["import", str(tmp_path / "old.pt"), str(root), "--step", "3"]) == 0
    assert main(["verify", str(root)]) == 0
    fresh = trained(0, named=named)
    with easyckpt.Checkpointer(str(root)) as checkpointer:
        assert checkpointer.load(fresh) == 3
    assert fresh["losses"] == [0.5]
    assert_same(fresh, state)


def test_there_and_back_is_bit_equal(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_step(folder, str(tmp_path / "step.pt"), to="torch")
    import_state(str(tmp_path / "step.pt"), str(tmp_path / "back"), step=3)
    capsys.readouterr()
    assert main(["diff", folder, str(tmp_path / "back"), "--json"]) in (0, 1)
    report = json.loads(capsys.readouterr().out)
    assert [item for item in report["differences"] if item["kind"] != "state"] == [], report
    assert report["tensors_equal"] > 20


def test_hugging_face_loads_an_export(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(config).eval()
    folder = saved(tmp_path / "ckpt", {"net": model, "ema": {"decay": 0.9}})
    target = tmp_path / "hf"
    export_step(folder, str(target), to="huggingface")
    config.save_pretrained(target)
    again, info = transformers.BertForMaskedLM.from_pretrained(target, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(12).view(2, 6)
    assert torch.equal(model(tokens).logits, again.eval()(tokens).logits)
    root = tmp_path / "imported"
    import_state(str(target), str(root), step=0, options=ImportOptions(key="net"))
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    with easyckpt.Checkpointer(str(root)) as checkpointer:
        checkpointer.load({"net": again}, strict=False)
    assert torch.equal(model(tokens).logits, again(tokens).logits)


def test_shards_have_an_index(folder: str, tmp_path: Path) -> None:
    from easyckpt.interop.huggingface import export_huggingface, read_huggingface
    from easyckpt.interop.stored import open_step

    export_huggingface(open_step(open_storage(folder)), str(tmp_path / "hf"), shard_bytes=700)
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    part = read_huggingface(str(tmp_path / "hf"))
    live = trained()["model"].state_dict()
    assert set(part.tensors) == set(live) - {"head.weight"}
    assert all(torch.equal(tensor, live[name]) for name, tensor in part.tensors.items())
    (victim,) = (tmp_path / "hf").glob("model-00002*")
    victim.unlink()
    with pytest.raises(CorruptCheckpoint):
        read_huggingface(str(tmp_path / "hf"))


@pytest.mark.parametrize("to", ["torch", "huggingface"])
def test_a_damaged_step_is_not_exported(folder: str, tmp_path: Path, to: str) -> None:
    (body,) = Path(folder).glob("data/**/*.safetensors")
    raw = bytearray(body.read_bytes())
    raw[5000] ^= 1
    body.write_bytes(raw)
    with pytest.raises(CorruptCheckpoint, match="differ from their hash"):
        export_step(folder, str(tmp_path / "out" / "x"), to=to)
    assert [*(tmp_path / "out").glob("*"), *(tmp_path / "out").glob(".*")] == [], "half an export is there"
    assert main(["export", folder, str(tmp_path / "out" / "x"), "--to", to]) == 4


def test_nothing_is_replaced(folder: str, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    for to in ("torch", "huggingface"):
        assert main(["export", folder, str(tmp_path / "there"), "--to", to]) == 2
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(Misuse, match="not newer"):
        import_state(_small_file(tmp_path), folder, step=3)


def _small_file(tmp_path: Path) -> str:
    torch.save({"weight": torch.ones(3)}, tmp_path / "small.pt")
    return str(tmp_path / "small.pt")


def test_an_import_continues_a_folder(folder: str, tmp_path: Path) -> None:
    name = import_state(_small_file(tmp_path), folder, step=4)
    assert (name.step, name.generation) == (4, 2)
    assert main(["why", folder, "3"]) == 0, "older steps stay"


class Evil:
    """What a pickle could do."""

    def __reduce__(self) -> Any:
        return (print, ("ran",))


def test_code_in_a_torch_file_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(Misuse, match="only unpickling"):
        import_state(str(tmp_path / "evil.pt"), str(tmp_path / "ckpt"), step=1)
    assert "ran" not in capsys.readouterr().out
    assert not (tmp_path / "ckpt").exists()


def test_parameters_are_never_guessed_wrong() -> None:
    net = Net()
    groups = [{"params": [net.head.bias]}, {"params": [net.body[3].weight, net.body[3].bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    net(torch.ones(4, 8)).backward()
    optimizer.step()
    file = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(Misuse, match="2 groups"):
        from_state_dict(file)
    with pytest.raises(Misuse, match="3 parameters"):
        from_state_dict(file, parameters=["head.bias"])
    with pytest.raises(Misuse, match="has the shape"):
        from_state_dict(file, parameters=["body.3.weight", "body.3.bias", "head.bias"])
    tree = from_state_dict(file, parameters=["head.bias", "body.3.weight", "body.3.bias"])
    assert "state.model.head.bias.momentum_buffer" in tree["optimizer"].tensors


def test_a_value_without_a_form_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedValue, match="extra"):
        commit_state(open_storage(str(tmp_path / "ckpt")), {"extra": object()}, step=1)
