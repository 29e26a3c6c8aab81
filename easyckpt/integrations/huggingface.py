"""Hugging Face `transformers.Trainer`: saved in memory every few steps, resumed bit by bit.

::

    callback = EasyckptCallback("ckpt", every=10)
    trainer = Trainer(model=…, args=…, train_dataset=…, callbacks=[callback])
    callback.train(trainer)

Theory of operation. Saving: at the end of a step the callback saves model, optimizer, scheduler, scaler,
random numbers and the trainer's own state. Where the trainer is about to evaluate after that step, it waits
until that is over, since evaluation draws random numbers.

Resuming: the trainer takes its position only from a folder with ``trainer_state.json``, and random numbers
from ``rng_state.pth`` there, which it reads after it has skipped the batches that were seen. So
`EasyckptCallback.train` writes these two small files into a temporary folder, from the checkpoint; model,
optimizer and scheduler are loaded in place when training begins. The trainer's own reading of weights from
that folder is left out: that is the one private method that is touched, and its absence is an error at the
start.

A ``Trainer`` with DeepSpeed is refused: it loads by the engine (see `easyckpt.integrations.deepspeed`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from easyckpt.api import Checkpointer
from easyckpt.errors import Misuse, UnsupportedValue
from easyckpt.rng import RNG

__all__ = ["TESTED", "EasyckptCallback"]

TESTED = ("5.24.0",)
"""Versions of transformers that the tests of this module passed with."""

_PRIVATE = "_load_from_checkpoint"


class EasyckptCallback(TrainerCallback):  # type: ignore[misc]
    """Saves a trainer's state, and resumes from it. Every rank has one.

    Args:
        root: the checkpoint folder, or a URL; None takes ``EASYCKPT_DIR``. Or a checkpointer of yours.
        every: save after so many steps.

    Raises:
        Misuse: an argument is not possible.
    """

    def __init__(self, root: str | os.PathLike[str] | Checkpointer | None = None, *, every: int = 1) -> None:
        if every < 1:
            raise Misuse(f"every={every} is not possible", hint="a number of steps from 1 on")
        self._every = every
        self._owned = not isinstance(root, Checkpointer)
        self.checkpointer = root if isinstance(root, Checkpointer) else Checkpointer(root)
        self._trainer: Trainer | None = None
        self._resumed: int | None = None
        self._due = False

    def train(self, trainer: Trainer, **arguments: Any) -> Any:
        """`Trainer.train` from the newest checkpoint on, or from the beginning if there is none.

        Args:
            trainer: with this callback among its callbacks.
            arguments: given to `Trainer.train`.

        Returns:
            What `Trainer.train` returns.

        Raises:
            Misuse: the callback is not the trainer's, or ``resume_from_checkpoint`` is given.
            UnsupportedValue: the trainer uses DeepSpeed, or this transformers works in another way.
            SaveNotDone: the last step could not be made durable.
        """
        if self not in trainer.callback_handler.callbacks:
            raise Misuse("the trainer does not have this callback", hint="Trainer(…, callbacks=[callback])")
        if "resume_from_checkpoint" in arguments:
            raise Misuse("the checkpoint to resume from is found by itself", hint="leave the argument out")
        if trainer.is_deepspeed_enabled:
            raise UnsupportedValue(
                "a trainer with DeepSpeed loads by its engine", hint="easyckpt.integrations.deepspeed"
            )
        if not callable(getattr(trainer, _PRIVATE, None)):
            raise UnsupportedValue(
                f"this transformers has no Trainer.{_PRIVATE}", hint=f"use version {', '.join(TESTED)}"
            )
        self._trainer = trainer
        with self._folder() as folder:
            if folder is not None:
                trainer._load_from_checkpoint = lambda *args, **kwargs: None
            try:
                done = trainer.train(resume_from_checkpoint=folder, **arguments)
            finally:
                trainer.__dict__.pop(_PRIVATE, None)
        if self._owned:
            self.checkpointer.close()
        return done

    @contextmanager
    def _folder(self) -> Iterator[str | None]:
        """The two files that the trainer resumes by, as long as it needs them; None if there is nothing."""
        assert self._trainer is not None
        rng = _Held()
        found: dict[str, Any] = {"trainer": "", "rng": rng}
        self._resumed = self.checkpointer.load(found, strict=False)
        if self._resumed is None:
            yield None
            return
        arguments = self._trainer.args
        suffix = f"_{arguments.process_index}" if arguments.world_size > 1 else ""
        with tempfile.TemporaryDirectory(prefix="easyckpt-resume-") as folder:
            Path(folder, "trainer_state.json").write_text(found["trainer"])
            states = rng.state
            assert states is not None
            cuda = {"cuda": states["cuda"]} if "cuda" in states else {}
            torch.save(
                {"python": states["python"], "numpy": states["numpy"], "cpu": states["torch"], **cuda},
                Path(folder, f"rng_state{suffix}.pth"),
            )
            yield folder

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load model, optimizer and scheduler in place."""
        if self._trainer is None:
            raise Misuse("the trainer was started around the callback", hint="callback.train(trainer)")
        if self._resumed is not None:
            live = self._state(state, kwargs)
            del live["rng"]  # the trainer sets it itself, when the batches that were seen are skipped
            self.checkpointer.load({**live, "rng": _Held()}, step=self._resumed)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save, unless an evaluation is about to draw random numbers."""
        self._due = state.global_step % self._every == 0 or state.global_step >= state.max_steps
        ends_epoch = state.epoch is not None and float(state.epoch).is_integer()
        evaluates = control.should_evaluate or (ends_epoch and str(args.eval_strategy.value) == "epoch")
        if not evaluates:
            self._save(state, kwargs)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save the step whose evaluation is over."""
        self._save(state, kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save what is still due."""
        self._save(state, kwargs)

    def _save(self, state: TrainerState, kwargs: dict[str, Any]) -> None:
        if self._due:
            self._due = False
            last = state.global_step >= state.max_steps
            self.checkpointer.save(self._state(state, kwargs), step=state.global_step, block=last)

    def _state(self, state: TrainerState, kwargs: dict[str, Any]) -> dict[str, Any]:
        assert self._trainer is not None
        optimizer = kwargs["optimizer"]
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        return {
            "model": kwargs["model"],
            # accelerate wraps the optimizer; what it wraps has the state.
            "optimizer": getattr(optimizer, "optimizer", optimizer),
            "scheduler": kwargs["lr_scheduler"],
            "trainer": json.dumps(dataclasses.asdict(state)),
            "rng": RNG(),
            **({"scaler": scaler} if scaler is not None else {}),
        }


class _Held:
    """Takes a state and keeps it, in the place of an object that is to be set later."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
