"""Lightning's `Trainer`: a callback that saves in memory every few steps and resumes by itself.

::

    trainer = Trainer(callbacks=[EasyckptCallback("ckpt", every=10)], enable_checkpointing=False, …)
    trainer.fit(module, loader)

Theory of operation. At the end of a batch the callback saves module, optimizers, schedulers, precision, the
other callbacks, random numbers, and the progress of the loops, as `fit_loop.state_dict` gives it. At
``on_fit_start``, when strategy and optimizers are there and no loop runs yet, it loads the newest step into
them. Random numbers are set when the first batch is there, since making the loader's iterator draws some.

After an epoch's last batch it waits for the end of the epoch, validation included: a loader that is asked for
its position before its iterator has ended gives no batch after the load, and Lightning's loop ends as if the
training were done. From such a step Lightning itself does not restore the loaders, whose shuffling goes
on from epoch to epoch; the callback does, in ``on_train_start``, and has the iterator made anew with the
random numbers that it was made with before. There is no public way to that; all else goes through public
hooks. With ``max_steps``, Lightning miscounts when it resumes between two epochs: the save then waits for the
next batch, and where an epoch has a single batch, for the end of the fit.

In the middle of an epoch, Lightning goes on with the right batch only with a loader that knows its position:
torchdata's ``StatefulDataLoader``. With another one it begins the epoch's data anew, and warns.
"""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from easyckpt.api import Checkpointer
from easyckpt.errors import Misuse
from easyckpt.rng import RNG

__all__ = ["TESTED", "EasyckptCallback"]

_FINISHED = "_iterator_finished"

TESTED = ("2.6.6",)
"""Versions of Lightning that the tests of this module passed with."""


class EasyckptCallback(Callback):  # type: ignore[misc]
    """Saves and resumes a ``fit``. Every rank has one.

    Args:
        root: the checkpoint folder, or a URL; None takes ``EASYCKPT_DIR``. Or a checkpointer of yours.
        every: save after so many optimizer steps.

    Raises:
        Misuse: an argument is not possible.
    """

    def __init__(self, root: str | os.PathLike[str] | Checkpointer | None = None, *, every: int = 1) -> None:
        if every < 1:
            raise Misuse(f"every={every} is not possible", hint="a number of steps from 1 on")
        self._every = every
        self._owned = not isinstance(root, Checkpointer)
        self.checkpointer = root if isinstance(root, Checkpointer) else Checkpointer(root)
        self.resumed_step: int | None = None
        """The step that this fit resumed from."""
        self._saved = 0
        self._rng: dict[str, Any] | None = None
        self._loaders: list[Any] | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the newest step, if there is one."""
        state = _state(trainer, pl_module, without=self)
        loops, held = _Loops(trainer), _Held()
        self.resumed_step = self.checkpointer.load({**state, "loops": loops, "rng": held})
        self._rng, self._loaders = held.state, loops.loaders
        self._saved = self.resumed_step or 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch's data where the last epoch left loaders and random numbers."""
        loaders, self._loaders = self._loaders, None
        if loaders is None or self._rng is None:
            return
        loop = trainer.fit_loop
        if loaders:
            loop._combined_loader._load_state_dicts(loaders)
            loop._combined_loader._state_dicts()  # a loader takes its state up when it is asked for it
        RNG().load_state_dict(self._rng)
        self._rng = None
        iter(loop._data_fetcher)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the random numbers, once, when the iterator of the loader was made."""
        rng, self._rng = self._rng, None
        if rng is not None:
            RNG().load_state_dict(rng)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after an optimizer step that is due."""
        if self._is_due(trainer) and not trainer.is_last_batch:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save what was due after the epoch's last batch."""
        if self._is_due(trainer) and trainer.max_steps == -1:
            self._save(trainer, pl_module, between_epochs=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step."""
        if trainer.global_step > self._saved:
            self._save(trainer, pl_module, block=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the last step durable."""
        if self._owned:
            self.checkpointer.close()

    def _is_due(self, trainer: Trainer) -> bool:
        return bool(trainer.global_step >= self._saved + self._every)

    def _save(
        self, trainer: Trainer, module: LightningModule, *, between_epochs: bool = False, block: bool = False
    ) -> None:
        loops = _Loops(trainer, between_epochs=between_epochs)
        state = {**_state(trainer, module, without=self), "loops": loops, "rng": RNG()}
        self.checkpointer.save(state, step=trainer.global_step, block=block)
        self._saved = trainer.global_step


def _state(trainer: Trainer, module: LightningModule, *, without: Callback) -> dict[str, Any]:
    """What has a state, apart from loops and random numbers."""
    callbacks = [item for item in trainer.callbacks if item is not without]
    return {
        "model": module,
        "optimizers": list(trainer.optimizers),
        "schedulers": [config.scheduler for config in trainer.lr_scheduler_configs],
        "precision": trainer.precision_plugin,
        "callbacks": {item.state_key: item for item in callbacks},
    }


class _Loops:
    """Progress of the fit loop; Lightning resumes it when it was loaded before the loop runs."""

    def __init__(self, trainer: Trainer, *, between_epochs: bool = False) -> None:
        self._loop = trainer.fit_loop
        self._between_epochs = between_epochs
        self.loaders: list[Any] | None = None
        """After a load: the loaders' states if the step was saved between epochs."""

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loop.state_dict()
        if not self._between_epochs:
            return {"loop": state, "loaders": None}
        own = dict(state["state_dict"])
        loaders = [_at_end(loader) for loader in own.pop("combined_loader", [])]
        return {"loop": {**state, "state_dict": own}, "loaders": loaders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaders = state["loaders"]
        self._loop.load_state_dict(state["loop"])


def _at_end(loader: dict[str, Any]) -> dict[str, Any]:
    """A loader's state at the end of an epoch. Lightning asks for no batch behind the last one, so that
    torchdata's loader cannot know that its iterator has ended."""
    return {**loader, _FINISHED: True} if _FINISHED in loader else loader


class _Held:
    """Takes a state and keeps it, in the place of an object that is to be set later."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
