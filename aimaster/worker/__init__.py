"""What runs in training processes. A script needs one name of it, if any: `loop`.

Loaded when asked for: every ``import torch`` under an agent loads this package for its hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aimaster.worker.again import loop

__all__ = ["loop"]


def __getattr__(name: str) -> Any:
    if name != "loop":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from aimaster.worker.again import loop

    return loop
