"""DeepSpeed: ``engine.save_checkpoint`` and ``engine.load_checkpoint`` through easyckpt, the calls unchanged.

::

    engine, *_ = deepspeed.initialize(…)
    attached = attach(engine)
    path, client_state = engine.load_checkpoint("ckpt")      # ours, else DeepSpeed's own files
    …
    engine.save_checkpoint("ckpt", client_state={"epoch": 3})  # returns when the state is in memory
    attached.close()

Theory of operation. `attach` puts its own two methods onto the engine object; nothing of DeepSpeed's is
called by them, so the collectives, barriers and pickles of its own checkpoints fall away. The state is
``{"engine": engine, "client_state": …, "rng": …}``, read by `easyckpt.adapters.deepspeed`; the step is
``engine.global_steps``. A folder without an easyckpt checkpoint, but with DeepSpeed's own, is loaded by
DeepSpeed: so a job migrates at its next start, and the first save is ours.

It is no ``CheckpointEngine``: that interface is handed finished dicts to pickle, after the stall.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from easyckpt.api import Checkpointer
from easyckpt.errors import Misuse
from easyckpt.handle import SaveHandle
from easyckpt.rng import RNG

__all__ = ["Attached", "attach"]

_TAG = re.compile(r"global_step(\d{1,15})\Z", re.ASCII)
_LOG = logging.getLogger("easyckpt")


class Attached:
    """What `attach` gives: the checkpointers behind the engine's calls, one per folder."""

    def __init__(self, engine: Any, *, keep: int) -> None:
        self._engine = engine
        self._keep = keep
        self._own_load = engine.load_checkpoint
        self._checkpointers: dict[str, Checkpointer] = {}
        self.last: SaveHandle | None = None
        """The save that was begun last."""

    def checkpointer(self, folder: str | os.PathLike[str]) -> Checkpointer:
        """The checkpointer of a folder."""
        name = os.fspath(folder)
        if name not in self._checkpointers:
            self._checkpointers[name] = Checkpointer(name, keep=self._keep)
        return self._checkpointers[name]

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """In the place of ``engine.save_checkpoint``. Every rank calls it.

        Returns:
            Whether the save was begun; False where both slots were busy, which harms nothing.

        Raises:
            Misuse: the tag is not the step's, or the state cannot be saved.
        """
        step = int(self._engine.global_steps)
        if exclude_frozen_parameters:
            raise Misuse("frozen parameters are always saved", hint="leave exclude_frozen_parameters out")
        if tag is not None and str(tag) != f"global_step{step}":
            _LOG.warning("the tag %r is not kept: checkpoints are known by their step, %d", tag, step)
        state = {"engine": self._engine, "client_state": client_state or {}, "rng": RNG()}
        self.last = self.checkpointer(save_dir).save(state, step=step)
        return not self.last.skipped

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, **options: Any
    ) -> tuple[str | None, dict[str, Any]]:
        """In the place of ``engine.load_checkpoint``. Every rank calls it.

        Args:
            load_dir: the folder.
            tag: ``global_step<number>``; None is the newest.
            options: DeepSpeed's own; given on where it loads its own files, else they have to be the default.

        Returns:
            Path and client state, or (None, {}) if there is nothing.
        """
        if _is_deepspeeds(load_dir):
            path, client_state = self._own_load(os.fspath(load_dir), tag=tag, **options)
            return path, client_state
        refused = [name for name, value in options.items() if value != _DEFAULTS.get(name)]
        if refused:
            raise Misuse(f"{', '.join(refused)} cannot be chosen here", hint="leave it out")
        step = None if tag is None else _step_of(tag)
        state: dict[str, Any] = {"engine": self._engine, "client_state": {}, "rng": RNG()}
        found = self.checkpointer(load_dir).load(state, step=step)
        if found is None:
            return None, {}
        return os.path.join(os.fspath(load_dir), f"global_step{found}"), state["client_state"]

    def close(self, *, timeout: float = 600.0) -> None:
        """Make the newest steps durable, and give the engine its own methods back.

        Raises:
            SaveNotDone: a step is in memory only.
        """
        for name in ("save_checkpoint", "load_checkpoint"):
            self._engine.__dict__.pop(name, None)
        checkpointers, self._checkpointers = self._checkpointers, {}
        for checkpointer in checkpointers.values():
            checkpointer.close(timeout=timeout)


_DEFAULTS = {
    "load_module_strict": True,
    "load_optimizer_states": True,
    "load_lr_scheduler_states": True,
    "load_module_only": False,
    "custom_load_fn": None,
}


def attach(engine: Any, *, keep: int = 2) -> Attached:
    """Have an engine's checkpoints made by easyckpt.

    Args:
        engine: what ``deepspeed.initialize`` gave.
        keep: how many durable steps stay.

    Returns:
        Close it at the end of the training.

    Raises:
        Misuse: this is no engine, or it is attached already.
    """
    if not callable(getattr(engine, "save_checkpoint", None)) or not hasattr(engine, "global_steps"):
        raise Misuse(f"{type(engine).__name__} is no DeepSpeed engine")
    if "save_checkpoint" in vars(engine):
        raise Misuse("this engine is attached already", hint="attach it once")
    attached = Attached(engine, keep=keep)
    engine.save_checkpoint = attached.save_checkpoint
    engine.load_checkpoint = attached.load_checkpoint
    return attached


def _is_deepspeeds(folder: str | os.PathLike[str]) -> bool:
    """Whether only DeepSpeed's own checkpoints are there."""
    path = Path(folder)
    return not (path / "easyckpt.json").exists() and (
        (path / "latest").is_file() or any(path.glob("global_step*/mp_rank_*"))
    )


def _step_of(tag: str) -> int:
    found = _TAG.match(str(tag))
    if found is None:
        raise Misuse(f"the tag {tag!r} names no step", hint="global_step<number>, or none for the newest")
    return int(found[1])
