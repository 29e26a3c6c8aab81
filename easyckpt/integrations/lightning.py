"""Lightning's `Trainer`: a callback that saves in memory every few steps and resumes by itself.

::

    trainer = Trainer(callbacks=[EasyckptCallback("ckpt", every=10)], enable_checkpointing=False, …)
    trainer.fit(module, loader)

Theory of operation. Everything goes through public hooks. At the end of a batch the callback saves module,
optimizers, schedulers, precision, the other callbacks, random numbers, and the progress of the loops, as
`fit_loop.state_dict` gives it. At ``on_fit_start``, when strategy and optimizers are there and no loop runs
yet, it loads the newest step into them. Random numbers are set when the first batch is there, since making
the loader's iterator draws some.

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

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the newest step, if there is one."""
        state = _state(trainer, pl_module, without=self)
        loops = _Loops(trainer)
        held = _Held()
        self.resumed_step = self.checkpointer.load({**state, "loops": loops, "rng": held})
        self._rng = held.state
        self._saved = self.resumed_step or 0

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
        step = trainer.global_step
        if step >= self._saved + self._every:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step."""
        if trainer.global_step > self._saved:
            self._save(trainer, pl_module, block=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the last step durable."""
        if self._owned:
            self.checkpointer.close()

    def _save(self, trainer: Trainer, module: LightningModule, *, block: bool = False) -> None:
        state = {**_state(trainer, module, without=self), "loops": _Loops(trainer), "rng": RNG()}
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

    def __init__(self, trainer: Trainer) -> None:
        self._loop = trainer.fit_loop

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._loop.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loop.load_state_dict(state)


class _Held:
    """Takes a state and keeps it, in the place of an object that is to be set later."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state
