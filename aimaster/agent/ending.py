"""How an agent's life ended, and the last line that people read.

The exit code is the master's word where there was one. The line says why, what to do, and after a preemption
which step is durable, since that is what a requeued job will continue from.
"""

from __future__ import annotations

from dataclasses import dataclass

from aimaster.core.commands import EndNode
from aimaster.errors import AimasterError, ExitCode, Interrupted, Preempted


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """Exit code, sentence, and what becomes of the saver."""

    exit_code: int
    sentence: str = ""

    @property
    def clean(self) -> bool:
        """Whether nothing will come back for what is in memory: finished, or stopped by a person."""
        return self.exit_code in (ExitCode.FINISHED, ExitCode.INTERRUPTED, ExitCode.USAGE, ExitCode.SETUP)

    @property
    def preempted(self) -> bool:
        """Whether the job is expected to be requeued."""
        return self.exit_code == ExitCode.STOPPED


def ending_of(what: EndNode | AimasterError) -> Ending:
    """The ending that an order or an error means."""
    if isinstance(what, EndNode):
        return Ending(exit_code=what.exit_code, sentence=what.sentence)
    if isinstance(what, Interrupted | Preempted):
        return Ending(exit_code=int(what.exit_code), sentence=str(what))
    raise what


def durable_line(step: int | None) -> str:
    """What a requeued job will continue from."""
    if step is None:
        return "no checkpoint step is durable; a requeued job starts from what the script itself has saved"
    return f"step {step} is durable; a requeued job continues from it"
