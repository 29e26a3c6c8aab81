"""Random number generators of this process as one value of the state.

Python's ``random``, NumPy's global generator, torch's CPU generator and that of every visible CUDA device.
Each rank stores its own. `RNG` is stateless: it reads and sets the process's generators.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

__all__ = ["RNG"]


class RNG:
    """Put ``"rng": easyckpt.RNG()`` into the state, and a resumed run draws the numbers it would have
    drawn."""

    def state_dict(self) -> dict[str, Any]:
        """The state of every generator, by name."""
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = list(torch.cuda.get_rng_state_all())
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator that ``state`` names.

        CUDA generators are set only as far as devices are visible now.
        """
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        for index, value in enumerate(state.get("cuda", ())):
            if index < torch.cuda.device_count():
                torch.cuda.set_rng_state(value, index)

    def reseed(self, seed: int, rank: int) -> None:
        """Begin anew, differently on every rank: another number of ranks has saved the generators' states."""
        mixed = hashlib.sha256(f"{seed} {rank}".encode()).digest()
        number = int.from_bytes(mixed[:8], "little")
        random.seed(number)
        np.random.seed(number % (1 << 32))
        torch.manual_seed(number % (1 << 63))
