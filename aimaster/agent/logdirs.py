"""Where the files of workers lie: torchrun's folders under ``--log-dir``, else the run directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from aimaster.agent.rundir import folder_error
from aimaster.config import Std, StdioConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """Files of one worker in one attempt."""

    error: Path
    stdout: Path | None
    """None: not written to a file."""
    stderr: Path | None


class LogDirs:
    """Makes ``<log dir>/<run id>_<random>/attempt_<n>/<local rank>/`` as torchrun does."""

    def __init__(self, config: StdioConfig, *, run_id: str, run_dir: Path) -> None:
        self._config = config
        self._run_id = run_id
        self._run_dir = run_dir
        self._root: Path | None = None

    @property
    def none(self) -> bool:
        """``--log-dir /dev/null``: no files but ours in the run directory; redirects have no effect."""
        return str(self._config.log_dir) == os.devnull

    @property
    def ours(self) -> bool:
        """Whether the files lie in the run directory, where nobody looks for them once they were read."""
        return self._root == self._run_dir / "logs"

    @property
    def root(self) -> Path | None:
        """The folder of this run, once there is one."""
        return self._root

    def attempt(self, number: int) -> Path:
        """A fresh folder for an attempt.

        Raises:
            FolderUnusable: The folder cannot be made there.
        """
        try:
            if self._root is None:
                self._root = self._make_root()
            folder = self._root / f"attempt_{number}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        except OSError as error:
            raise folder_error(error, self._config.log_dir or self._run_dir) from error
        return folder

    def rank(self, attempt: Path, local_rank: int) -> RankFiles:
        """The files of one worker; its folder is made."""
        folder = attempt / str(local_rank)
        folder.mkdir(exist_ok=True)
        chosen = Std.NONE
        if not self.none:
            chosen = self._config.redirects.of(local_rank) | self._config.tee.of(local_rank)
        return RankFiles(
            error=folder / "error.json",
            stdout=folder / "stdout.log" if chosen & Std.OUT else None,
            stderr=folder / "stderr.log" if chosen & Std.ERR else None,
        )

    def forget(self, files: RankFiles) -> None:
        """Remove what one worker of an attempt left in the run directory, which must not grow by restarts."""
        folder = files.error.parent
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other workers of the attempt are still there
            folder.parent.rmdir()

    def _make_root(self) -> Path:
        wanted = self._config.redirects.any or self._config.tee.any
        if self.none or (self._config.log_dir is None and not wanted):
            return self._run_dir / "logs"
        if self._config.log_dir is None:
            base = Path(tempfile.mkdtemp(prefix="aimaster_"))
        else:
            base = self._config.log_dir
            base.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f"{self._run_id}_", dir=base))
