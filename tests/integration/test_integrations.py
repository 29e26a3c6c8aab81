"""Real trainings by other people's loops: cut off, resumed, equal to an undisturbed one bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import easyckpt
from easyckpt.errors import Misuse

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:accelerate.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:transformers.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*"),
    pytest.mark.filterwarnings("ignore:.*litlogger.*"),
]

SAMPLES = 24


class Cut(Exception):
    """The training ends here."""


class Numbers(Dataset[dict[str, torch.Tensor]]):
    """Samples that are told apart."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((6,), index / SAMPLES), "labels": torch.tensor([index % 3.0])}


class Net(nn.Module):
    """Dropout, so that random numbers matter; BatchNorm, so that buffers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        out = self.layers(x)
        loss = (out - labels).square().mean() if labels is not None else out.mean()
        return {"loss": loss, "logits": out}


def seed() -> None:
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)


def same(one: nn.Module, two: nn.Module) -> None:
    for (name, a), b in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


# ----- Hugging Face Trainer -----


def hugging_face(
    folder: Path, *, cut: int | None = None, every: int = 1, **arguments: Any
) -> tuple[nn.Module, Any]:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # its Trainer needs it
    from easyckpt.integrations.huggingface import EasyckptCallback

    class CutOff(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if cut is not None and state.global_step >= cut:
                raise Cut

    seed()
    callback = EasyckptCallback(str(folder / "ckpt"), every=every)
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "out"), num_train_epochs=2, per_device_train_batch_size=4,
        learning_rate=0.01, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        logging_steps=1, seed=3, **arguments,
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=Net(),
        args=settings,
        train_dataset=Numbers(),
        eval_dataset=Numbers(),
        callbacks=[callback, CutOff()],
    )
    try:
        callback.train(trainer)
    except Cut:
        callback.checkpointer.close()
    return trainer.model, trainer.state


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        (4, {}),  # in the first epoch
        (6, {"every": 6}),  # between two epochs
        (4, {"gradient_accumulation_steps": 2, "dataloader_num_workers": 1}),
        (6, {"eval_strategy": "steps", "eval_steps": 2}),
        (6, {"eval_strategy": "epoch", "every": 6}),
    ],
)
def test_a_hugging_face_trainer_goes_on(tmp_path: Path, cut: int, arguments: dict[str, Any]) -> None:
    undisturbed, whole = hugging_face(tmp_path / "a", **arguments)
    hugging_face(tmp_path / "b", cut=cut, **arguments)
    resumed, state = hugging_face(tmp_path / "b", **arguments)
    same(undisturbed, resumed)
    assert state.global_step == whole.global_step
    assert len(state.log_history) > 0


@pytest.mark.slow
def test_a_trainer_that_is_done_does_nothing_more(tmp_path: Path) -> None:
    first, _ = hugging_face(tmp_path)
    again, state = hugging_face(tmp_path)
    same(first, again)
    assert state.global_step == 12


def test_a_trainer_without_the_callback_is_named(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # its Trainer needs it
    from easyckpt.integrations.huggingface import EasyckptCallback

    callback = EasyckptCallback(str(tmp_path / "ckpt"))
    settings = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    trainer = transformers.Trainer(model=Net(), args=settings, train_dataset=Numbers())
    with pytest.raises(Misuse, match="does not have this callback"):
        callback.train(trainer)
    trainer.add_callback(callback)
    with pytest.raises(Misuse, match="started around"):
        trainer.train()
    with pytest.raises(Misuse, match="found by itself"):
        callback.train(trainer, resume_from_checkpoint=True)
    with pytest.raises(Misuse, match="every=0"):
        EasyckptCallback(str(tmp_path / "ckpt"), every=0)


# ----- Accelerate -----


def accelerated(folder: Path, *, cut: int | None = None) -> nn.Module:
    accelerate = pytest.importorskip("accelerate")
    from easyckpt.integrations.accelerate import state_of

    seed()
    accelerator = accelerate.Accelerator(cpu=True)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
    sampler = easyckpt.ResumableSampler(Numbers(), batch_size=4)
    net, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    state = {**state_of(accelerator), "sampler": sampler}
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    with easyckpt.Checkpointer(str(folder)) as checkpointer:
        step = checkpointer.load(state) or 0
        while sampler.epoch < 2:
            for batch in sampler.watch(loader):
                if step == cut:
                    return net
                accelerator.backward(net(**batch)["loss"])
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                step += 1
                checkpointer.save(state, step=step, block=True)
    return net


def test_accelerate_goes_on(tmp_path: Path) -> None:
    undisturbed = accelerated(tmp_path / "a")
    accelerated(tmp_path / "b", cut=7)
    same(undisturbed, accelerated(tmp_path / "b"))


# ----- Lightning -----


def lightning_fit(
    folder: Path, *, cut: int | None = None, every: int = 1, stateful: bool = True, **arguments: Any
) -> tuple[Any, ...]:
    lightning = pytest.importorskip("lightning")
    loaders = pytest.importorskip("torchdata.stateful_dataloader")
    from easyckpt.integrations.lightning import EasyckptCallback

    seen: list[int] = []

    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if self.global_step == cut:
                raise Cut
            seen.extend((batch["x"][:, 0] * SAMPLES).round().int().tolist())
            return self.net(**batch)["loss"]

        def validation_step(self, batch: Any, index: int) -> None:
            torch.rand(1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    seed()
    module = Module()
    callback = EasyckptCallback(str(folder / "ckpt"), every=every)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, callbacks=[callback], enable_checkpointing=False,
        logger=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        **{"max_epochs": 2, "limit_val_batches": 0, **arguments},
    )  # fmt: skip
    kind = loaders.StatefulDataLoader if stateful else DataLoader
    try:
        trainer.fit(module, kind(Numbers(), batch_size=4, shuffle=True), DataLoader(Numbers(), batch_size=4))
    except Cut:
        callback.checkpointer.close()
    return module, trainer, callback.resumed_step, seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        (4, {}),
        (8, {}),
        (2, {"accumulate_grad_batches": 2}),
        (6, {"every": 6}),  # between two epochs
        (6, {"every": 6, "stateful": False, "limit_val_batches": 2}),
        (7, {"every": 6, "max_steps": 12, "max_epochs": -1}),  # due between two epochs, and saved after
        (4, {"every": 4, "limit_train_batches": 4}),
    ],
)
def test_lightning_goes_on(tmp_path: Path, cut: int, arguments: dict[str, Any]) -> None:
    undisturbed, whole, _, all_seen = lightning_fit(tmp_path / "a", **arguments)
    *_, before = lightning_fit(tmp_path / "b", cut=cut, **arguments)
    resumed, trainer, step, after = lightning_fit(tmp_path / "b", **arguments)
    taken = step * arguments.get("accumulate_grad_batches", 1) * 4
    assert 0 < taken <= len(before), "a step that was skipped is trained again"
    assert step == cut or "every" not in arguments
    assert before[:taken] + after == all_seen
    assert trainer.global_step == whole.global_step
    same(undisturbed, resumed)


# ----- torchdata -----


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        generator = torch.Generator().manual_seed(5)
        return stateful.StatefulDataLoader(
            range(30), batch_size=3, shuffle=True, num_workers=workers, generator=generator
        )

    whole = [batch.tolist() for batch in loader()]
    first = loader()
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(4)]
    with easyckpt.Checkpointer(str(tmp_path)) as checkpointer:
        checkpointer.save({"loader": first}, step=4, block=True)
    del batches
    second = loader()
    with easyckpt.Checkpointer(str(tmp_path)) as checkpointer:
        assert checkpointer.load({"loader": second}) == 4
    seen += [batch.tolist() for batch in second]
    assert seen == whole


# ----- a plain loop, as torchtitan's trainer is built -----


class TrainState:
    """Counters of the loop, with a state of their own."""

    def __init__(self) -> None:
        self.step = 0
        self.losses: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.losses = state["step"], state["losses"]


def titan(folder: Path, *, steps: int, build: Callable[[], Any] = Net) -> tuple[nn.Module, TrainState]:
    seed()
    net, counters = build(), TrainState()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    sampler = easyckpt.ResumableSampler(Numbers(), batch_size=5, seed=2)
    loader = DataLoader(Numbers(), batch_sampler=sampler)
    states = {"model": net, "optimizer": optimizer, "lr_scheduler": scheduler, "dataloader": sampler,
              "train_state": counters, "rng": easyckpt.RNG()}  # fmt: skip
    with easyckpt.Checkpointer(str(folder)) as checkpointer:
        checkpointer.load(states)
        while counters.step < steps:
            for batch in sampler.watch(loader):
                loss = net(**batch)["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
                counters.step += 1
                counters.losses.append(loss.item())
                checkpointer.save(states, step=counters.step, block=True)
                if counters.step == steps:
                    break
    return net, counters


@pytest.mark.slow
def test_a_plain_loop_goes_on(tmp_path: Path) -> None:
    undisturbed, whole = titan(tmp_path / "a", steps=13)
    for steps in (3, 5, 11):
        titan(tmp_path / "b", steps=steps)
    resumed, counters = titan(tmp_path / "b", steps=13)
    assert counters.losses == whole.losses
    same(undisturbed, resumed)
