"""What `aimaster.agent.workers` tells the agent's service: frozen values, no behaviour."""

from __future__ import annotations

from dataclasses import dataclass

from aimaster.ids import Generation

LAST_LINES_CHARS_MAX = 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """One worker ended, or was ended."""

    generation: Generation
    attempt: int
    local_rank: int
    rank: int
    pid: int
    exit_code: int | None
    """None if a signal ended it."""
    signal: int | None
    steps: int | None
    """Steps that it was seen to finish in this attempt; None without a step hook."""
    saved_step: int | None
    """The training's own step, if easyckpt named one."""
    error: str
    """Exception and frames, else the last output; empty after a good end."""
    error_digest: str
    """Equal for two failures with the same traceback; empty where there was none."""
    last_lines: str
    """Last lines of its error output, else of its output."""
    held_s: float = 0.0
    """For how long saving has held its training."""

    @property
    def ok(self) -> bool:
        """Whether the script finished."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOutcome:
    """How the workers of a node were ended, and whether nothing of them is left."""

    exits: tuple[WorkerExit, ...]
    """Workers that ran when the stop began."""
    killed: int
    """Processes that had to be killed: workers after the grace time, and what workers had left behind."""
    unkillable: tuple[str, ...]
    """Processes that are still there, described; the node cannot be used."""
    stayed: int = 0
    """Workers that have outlived their generation and wait for the next one."""

    @property
    def gone(self) -> bool:
        """Whether every worker and all that came from them are proved gone."""
        return not self.unkillable
