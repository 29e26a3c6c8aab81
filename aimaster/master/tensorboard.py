"""A job as TensorBoard scalars: a few figures every few seconds, in event files in one folder.

The axis is the job's age in seconds, which goes on over restarts; a training's own steps do not. Writing is
left to TensorBoard's own library, which is imported only where this is asked for, and may block as long as
the disk does: call `Board.write` on a thread.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from aimaster.errors import FolderUnusable, SetupError
from aimaster.rpc.status import JobStatus

__all__ = ["EVERY_S", "Board", "writable_board"]

EVERY_S = 5.0
"""Between two points of a curve."""


def writable_board(folder: Path) -> Path:
    """The folder, if event files can be written.

    Raises:
        SetupError: the library is not installed.
        FolderUnusable: the folder cannot be made.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise SetupError(
            "TensorBoard's library is not installed",
            where=f"--tensorboard {folder}",
            next_step="pip install tensorboard, on each node that may lead the job",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderUnusable(
            f"the folder for TensorBoard cannot be made ({error.strerror})",
            where=str(folder),
            next_step="choose another --tensorboard DIR",
        ) from error
    return folder


class Board:
    """Writes the curves of one life of a master. One thread at a time."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(folder))

    def write(self, status: JobStatus, *, wall_s: float) -> None:
        """One point of each curve.

        Args:
            status: the job as it is.
            wall_s: seconds since the epoch.
        """
        age_s = status.goodput.wall_s
        curves: dict[str, float | None] = {
            "aimaster/step_time_s_p99": status.hang.step_time_s or None,
            "aimaster/goodput": status.goodput.share,
            "aimaster/restarts": float(status.attempt),
            "aimaster/world_size": float(status.world_size),
            "aimaster/checkpoint_age_s/memory": status.memory_age_s,
            "aimaster/checkpoint_age_s/durable": status.durable_age_s,
        }
        for name, value in curves.items():
            if value is not None:
                self._writer.add_scalar(name, value, int(age_s), wall_time=wall_s)
        self._writer.flush()

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
