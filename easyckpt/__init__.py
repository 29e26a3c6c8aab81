"""easyckpt: checkpoints that survive the process, the node and the job, and that are never wrong.

::

    import easyckpt

    ck = easyckpt.Checkpointer("checkpoints/run1")
    state = {"model": model, "optimizer": optimizer, "rng": easyckpt.RNG()}
    start = ck.load(state) or 0
    for step in range(start, steps):
        ...
        ck.save(state, step=step + 1)
    ck.close()

Importing this package imports nothing heavy: torch comes with the first name that needs it, so that the saver
process and the command line start without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from easyckpt.errors import EasyckptError

if TYPE_CHECKING:
    from easyckpt.api import Checkpointer, close, fence, init, load, save
    from easyckpt.handle import SaveHandle
    from easyckpt.keep import KeepAll, KeepBest, KeepEvery, KeepLatest, KeepPinned
    from easyckpt.rng import RNG
    from easyckpt.sampler import ResumableSampler

__all__ = [
    "RNG",
    "Checkpointer",
    "EasyckptError",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLatest",
    "KeepPinned",
    "ResumableSampler",
    "SaveHandle",
    "close",
    "fence",
    "init",
    "load",
    "save",
]

_HOMES = {
    "RNG": "easyckpt.rng",
    "Checkpointer": "easyckpt.api",
    "KeepAll": "easyckpt.keep",
    "KeepBest": "easyckpt.keep",
    "KeepEvery": "easyckpt.keep",
    "KeepLatest": "easyckpt.keep",
    "KeepPinned": "easyckpt.keep",
    "ResumableSampler": "easyckpt.sampler",
    "SaveHandle": "easyckpt.handle",
    "close": "easyckpt.api",
    "fence": "easyckpt.api",
    "init": "easyckpt.api",
    "load": "easyckpt.api",
    "save": "easyckpt.api",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
