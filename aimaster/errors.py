"""Every error that aimaster raises on purpose, and the exit code that each one ends a command with.

    AimasterError
    ├── UsageError                2  the command line or a variable is wrong
    │   └── ScriptMissing         2  the script, module or command to run is not there
    ├── SetupError                3  this machine, or what surrounds it, is not fit
    │   ├── PortInUse             3
    │   ├── FolderUnusable        3  missing, not ours, not writable
    │   ├── NoSpace               3
    │   ├── AlreadyRunning        3  this node's place in the job is taken by a live agent
    │   ├── MasterUnreachable     3  never reached; lost later is `MasterLost`
    │   ├── CredentialsMissing    3  several nodes without a secret
    │   ├── TorchMissing          3
    │   ├── NodeRefused           3  the node check found that training would fail or be wrong here
    │   ├── BadMessage            3  the other side sent what the contract between us does not allow
    │   └── PeerRefused           3  the other side answered, and said no
    │       ├── ProtocolMismatch  3
    │       ├── JobMismatch       3  another job, or the same one declared differently
    │       └── SecretDiffers     3
    ├── Stopped                      somebody asked for the end
    │   ├── Preempted            10  SIGTERM, SIGUSR1/2, a scheduler's notice
    │   └── Interrupted         130  Ctrl-C
    ├── JobFailed                    the training cannot go on
    │   ├── UserError            20  deterministic; starting again would not help
    │   ├── BudgetSpent          21
    │   ├── NoHealthyNodes       22
    │   └── MasterLost           23
    └── OwnBug                   70  a promise of ours that does not hold

An error says what happened, where, and what to do next; the numbers and names behind the sentence are in
`facts`. Faults of the caller, of the environment, of a peer and of our own are different branches, so that a
caller can decide by class. The table of exit codes is data (`EXIT_CODES`): help text and documentation are
rendered from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import ClassVar

Fact = str | int | float | bool | None
"""What may stand in the facts of an error: plain values that JSON knows."""


class ExitCode(IntEnum):
    """Exit codes of `aimaster run`. A scheduler may rely on them; a meaning never changes."""

    FINISHED = 0
    USAGE = 2
    SETUP = 3
    STOPPED = 10
    USER_ERROR = 20
    BUDGET_SPENT = 21
    NO_HEALTHY_NODES = 22
    MASTER_LOST = 23
    OWN_BUG = 70
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCodeRow:
    """One row of the exit-code table."""

    code: ExitCode
    meaning: str
    requeue: bool | None
    """Whether a scheduler should start the job again; None where there is nothing to start again."""


EXIT_CODES: tuple[ExitCodeRow, ...] = (
    ExitCodeRow(
        code=ExitCode.FINISHED,
        meaning="finished; also an unused spare and a node that was replaced",
        requeue=None,
    ),
    ExitCodeRow(
        code=ExitCode.USAGE,
        meaning="usage: unknown flag, value out of range, missing script",
        requeue=False,
    ),
    ExitCodeRow(
        code=ExitCode.SETUP,
        meaning="this machine or its set-up: port, folder, space, credentials, protocol version, "
        "master never reached, node refused by the check",
        requeue=False,
    ),
    ExitCodeRow(
        code=ExitCode.STOPPED,
        meaning="stopped by SIGTERM, SIGUSR1, SIGUSR2 or a scheduler's notice; the last line says which step "
        "is durable",
        requeue=True,
    ),
    ExitCodeRow(
        code=ExitCode.USER_ERROR,
        meaning="the training program's own error, the same one again; also the first failure under "
        "--max-restarts 0",
        requeue=False,
    ),
    ExitCodeRow(
        code=ExitCode.BUDGET_SPENT,
        meaning="restart budget spent, or three attempts in a row that got no further",
        requeue=False,
    ),
    ExitCodeRow(
        code=ExitCode.NO_HEALTHY_NODES, meaning="fewer healthy nodes left than the minimum", requeue=True
    ),
    ExitCodeRow(code=ExitCode.MASTER_LOST, meaning="master lost beyond recovery", requeue=True),
    ExitCodeRow(code=ExitCode.OWN_BUG, meaning="a bug of aimaster itself", requeue=False),
    ExitCodeRow(
        code=ExitCode.INTERRUPTED, meaning="Ctrl-C (a second one ends at once)", requeue=False
    ),
)  # fmt: skip


class AimasterError(Exception):
    """Base of the tree.

    Args:
        what: What happened, as one sentence without a full stop.
        where: The file, address, flag or node it is about; empty if `what` says it.
        next_step: What the reader should do now, best as something to type.
        facts: Numbers and names behind the sentence.
    """

    exit_code: ClassVar[ExitCode] = ExitCode.OWN_BUG

    def __init__(
        self,
        what: str,
        *,
        where: str = "",
        next_step: str = "",
        facts: Mapping[str, Fact] | None = None,
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.next_step = next_step
        self.facts: Mapping[str, Fact] = MappingProxyType(dict(facts or {}))

    def __str__(self) -> str:
        """One to three lines: what, where, what to do next."""
        lines = [f"{self.what}: {self.where}" if self.where else self.what]
        lines += [f"  {line}" for line in self.next_step.splitlines()]
        return "\n".join(lines)


class UsageError(AimasterError):
    """The command line or a variable is wrong."""

    exit_code = ExitCode.USAGE


class ScriptMissing(UsageError):
    """The script, module or command to run is not there."""


class SetupError(AimasterError):
    """This machine, or what surrounds it, is not fit for the job."""

    exit_code = ExitCode.SETUP


class PortInUse(SetupError):
    """Another process listens where we must listen."""


class FolderUnusable(SetupError):
    """A folder is missing, belongs to somebody else or cannot be written."""


class NoSpace(SetupError):
    """A file system or the memory is full."""


class AlreadyRunning(SetupError):
    """A live agent has this node's place in this job."""


class MasterUnreachable(SetupError):
    """The master was never reached. Losing it later is `MasterLost`."""


class CredentialsMissing(SetupError):
    """Several nodes are asked for and nothing proves who belongs to the job."""


class TorchMissing(SetupError):
    """Workers need torch and it is not installed."""


class NodeRefused(SetupError):
    """The node check found that training would fail or be wrong here."""


class BadMessage(SetupError):
    """The other side sent what the contract between us does not allow: another program, or a bug in ours."""


class PeerRefused(SetupError):
    """The other side answered, and refused for good: trying again would not help."""


class ProtocolMismatch(PeerRefused):
    """Agent and master speak versions that have nothing in common."""


class JobMismatch(PeerRefused):
    """The master leads another job, or the same one was declared differently."""


class SecretDiffers(PeerRefused):
    """The two sides hold different secrets."""


class Stopped(AimasterError):
    """Somebody asked for the end. Not a failure."""

    exit_code = ExitCode.STOPPED


class Preempted(Stopped):
    """SIGTERM, SIGUSR1, SIGUSR2 or a scheduler's notice."""


class Interrupted(Stopped):
    """Ctrl-C."""

    exit_code = ExitCode.INTERRUPTED


class JobFailed(AimasterError):
    """The training cannot go on. Which of the branches it is decides whether to requeue."""

    exit_code = ExitCode.BUDGET_SPENT


class UserError(JobFailed):
    """The training program fails in the same way each time."""

    exit_code = ExitCode.USER_ERROR


class BudgetSpent(JobFailed):
    """Too many restarts, or too many without progress."""

    exit_code = ExitCode.BUDGET_SPENT


class NoHealthyNodes(JobFailed):
    """Fewer healthy nodes than the job's minimum, for longer than it waits."""

    exit_code = ExitCode.NO_HEALTHY_NODES


class MasterLost(JobFailed):
    """The master was there and is gone for good."""

    exit_code = ExitCode.MASTER_LOST


class OwnBug(AimasterError):
    """A promise of ours that does not hold. Please report it."""

    exit_code = ExitCode.OWN_BUG
