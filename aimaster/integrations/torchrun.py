"""torchrun's flags as data, so that the agent takes them all without importing torch.

A test compares this table with `torch.distributed.run.get_args_parser()` of the installed torch: names,
aliases, defaults, choices and variables. The one deliberate difference is `--max-restarts`: here restarting
is on, and the flag caps it. A flag whose meaning does not exist here carries a `note`, which is said once.

Tried with torch 2.13; the flags of older versions are a subset.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["DIFFERS_FROM_TORCHRUN", "TORCHRUN_FLAGS", "Flag", "Kind", "split_list"]


class Kind(Enum):
    """What stands behind a flag."""

    SWITCH = "switch"  # nothing
    TEXT = "text"
    INT = "int"
    FLOAT = "float"
    LIST = "list"  # words parted by ',', with ',,' for a comma inside a word


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One flag of the command line."""

    names: tuple[str, ...]
    """All spellings, the one to show first among the long ones."""
    kind: Kind
    group: str
    """Heading under which the help shows it."""
    help: str
    default: str | int | float | bool | tuple[str, ...] | None = None
    env: tuple[str, ...] = ()
    """Variables that are asked where the argument is not given, first one first."""
    choices: tuple[str, ...] = ()
    """Values that an argument may have; as in argparse, a variable is not held to them."""
    metavar: str = ""
    per_worker: bool = False
    """Whether it speaks of single workers, and so means nothing beside a command."""
    note: str = ""
    """Said once where the flag is given as an argument: why it changes nothing here."""

    @property
    def long(self) -> str:
        """The spelling to show."""
        return next(name for name in self.names if name.startswith("--"))

    @property
    def dest(self) -> str:
        """Key of the value, as argparse would name it."""
        return self.long.removeprefix("--").replace("-", "_")


def split_list(text: str) -> tuple[str, ...]:
    """Words parted by single commas; two commas stand for one inside a word. Empty text is one empty word."""
    words: list[str] = []
    current, index = "", 0
    while index < len(text):
        if text.startswith(",,", index):
            current, index = current + ",", index + 2
        elif text[index] == ",":
            words, current, index = [*words, current], "", index + 1
        else:
            current, index = current + text[index], index + 1
    return (*words, current)


_NODES = "Nodes and workers"
_WHERE = "Where the nodes meet"
_PROGRAM = "What a worker runs"
_RESTART = "Restarts and signals"
_OUTPUT = "Output of the workers"

DIFFERS_FROM_TORCHRUN: dict[str, str] = {
    "max_restarts": "restarting is on by default and the budgets decide; torchrun's default is none",
}
"""Flags whose default differs from torchrun's, and why."""


def _two(name: str) -> tuple[str, ...]:
    """Both spellings of a long flag."""
    return (f"--{name}", f"--{name.replace('-', '_')}") if "-" in name else (f"--{name}",)


def _pet(name: str) -> tuple[str, ...]:
    """torchrun's variable for a flag."""
    return (f"PET_{name.replace('-', '_').upper()}",)


_JOURNAL_NOTE = "events are in the job's journal; see `aimaster status`"

TORCHRUN_FLAGS: tuple[Flag, ...] = (
    Flag(
        names=_two("nnodes"), env=_pet("nnodes"), kind=Kind.TEXT, default="1:1", metavar="N|MIN:MAX",
        group=_NODES, help="number of nodes, or the range; more agents than MAX are spares",
    ),
    Flag(
        names=_two("nproc-per-node"), env=_pet("nproc-per-node"), kind=Kind.TEXT, default="1",
        metavar="N|auto|cpu|gpu", group=_NODES, per_worker=True, help="workers on this node",
    ),
    Flag(
        names=_two("node-rank"), env=_pet("node-rank"), kind=Kind.INT, default=0, metavar="N",
        group=_NODES, help="wanted index of this node (static rendezvous)",
    ),
    Flag(
        names=_two("local-addr"), env=_pet("local-addr"), kind=Kind.TEXT, metavar="HOST", group=_NODES,
        help="address at which the other nodes reach this one",
    ),
    Flag(
        names=_two("role"), env=_pet("role"), kind=Kind.TEXT, default="default", metavar="NAME",
        group=_NODES, per_worker=True, help="ROLE_NAME of the workers",
    ),
    Flag(
        names=_two("virtual-local-rank"), env=_pet("virtual-local-rank"), kind=Kind.SWITCH, default=False,
        group=_NODES, per_worker=True, help="LOCAL_RANK 0 everywhere, each worker sees its own GPU only",
    ),
    Flag(
        names=_two("numa-binding"), kind=Kind.TEXT, metavar="MODE", group=_NODES, per_worker=True,
        choices=("node", "socket", "exclusive", "core-complex"),
        help="accepted; workers are not bound to processors yet",
        note="workers are not bound to processors; use numactl in the script's place if it matters",
    ),
    Flag(
        names=_two("rdzv-endpoint"), env=_pet("rdzv-endpoint"), kind=Kind.TEXT, default="",
        metavar="HOST[:PORT]", group=_WHERE, help="where the master is or will be hosted (port 29400)",
    ),
    Flag(
        names=_two("rdzv-id"), env=_pet("rdzv-id"), kind=Kind.TEXT, default="none", metavar="ID",
        group=_WHERE, help="job id; else the scheduler's, else a new one",
    ),
    Flag(
        names=_two("rdzv-backend"), env=_pet("rdzv-backend"), kind=Kind.TEXT, default="static",
        metavar="static|c10d", group=_WHERE, help="both mean the master at the endpoint",
    ),
    Flag(
        names=_two("rdzv-conf"), env=_pet("rdzv-conf"), kind=Kind.TEXT, default="", metavar="K=V,…",
        group=_WHERE, help="join_timeout, last_call_timeout (seconds), is_host; other keys say so",
    ),
    Flag(
        names=_two("standalone"), env=_pet("standalone"), kind=Kind.SWITCH, default=False, group=_WHERE,
        help="one node, master on a free port; the default where --nnodes is 1",
    ),
    Flag(
        names=_two("master-addr"), env=_pet("master-addr"), kind=Kind.TEXT, default="127.0.0.1",
        metavar="HOST", group=_WHERE, help="endpoint of a static rendezvous: host",
    ),
    Flag(
        names=_two("master-port"), env=_pet("master-port"), kind=Kind.INT, metavar="PORT", group=_WHERE,
        help="endpoint of a static rendezvous: port (29500)",
    ),
    Flag(
        names=("-m", "--module"), env=_pet("module"), kind=Kind.SWITCH, default=False, group=_PROGRAM,
        per_worker=True, help="the script is a module, as for `python -m`",
    ),
    Flag(
        names=_two("no-python"), env=_pet("no-python"), kind=Kind.SWITCH, default=False, group=_PROGRAM,
        per_worker=True, help="each worker executes the script itself, without python",
    ),
    Flag(
        names=_two("run-path"), env=_pet("run-path"), kind=Kind.SWITCH, default=False, group=_PROGRAM,
        per_worker=True, help="each worker calls runpy.run_path on the script",
    ),
    Flag(
        names=_two("start-method"), env=_pet("start-method"), kind=Kind.TEXT, default="spawn",
        choices=("spawn", "fork", "forkserver"), group=_PROGRAM, per_worker=True,
        help="accepted; workers are forked from a warm template, see --no-warm",
        note="workers come from the worker template; --no-warm starts each in a new interpreter",
    ),
    Flag(
        names=_two("max-restarts"), env=_pet("max-restarts"), kind=Kind.INT, metavar="N", group=_RESTART,
        help="most restarts of the job; without it the budgets decide; 0 ends at the first failure",
    ),
    Flag(
        names=_two("monitor-interval"), env=_pet("monitor-interval"), kind=Kind.FLOAT, default=0.1,
        metavar="S", group=_RESTART, help="accepted; exits are noticed at once",
        note="exits of workers are noticed at once, without polling",
    ),
    Flag(
        names=_two("shutdown-timeout"), env=(*_pet("shutdown-timeout"), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"),
        kind=Kind.INT, metavar="S", group=_RESTART, help="from SIGTERM to SIGKILL when stopping (30)",
    ),
    Flag(
        names=_two("signals-to-handle"), env=_pet("signals-to-handle"), kind=Kind.TEXT,
        default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", metavar="SIG,…", group=_RESTART,
        help="signals that end the job; SIGUSR1 and SIGUSR2 always do",
    ),
    Flag(
        names=_two("log-dir"), env=_pet("log-dir"), kind=Kind.TEXT, metavar="DIR", group=_OUTPUT,
        help="folder for the files of --redirects and --tee",
    ),
    Flag(
        names=("-r", "--redirects"), env=_pet("redirects"), kind=Kind.TEXT, default="0",
        metavar="STD|RANK:STD,…", group=_OUTPUT, help="to files: 1 stdout, 2 stderr, 3 both",
    ),
    Flag(
        names=("-t", "--tee"), env=_pet("tee"), kind=Kind.TEXT, default="0", metavar="STD|RANK:STD,…",
        group=_OUTPUT, help="to files and to the console",
    ),
    Flag(
        names=_two("local-ranks-filter"), env=_pet("local-ranks-filter"), kind=Kind.TEXT, default="",
        metavar="N,…", group=_OUTPUT, per_worker=True, help="show these local ranks only",
    ),
    Flag(
        names=_two("duplicate-stdout-filters"), env=_pet("duplicate-stdout-filters"), kind=Kind.LIST,
        default=(), metavar="TEXT,…", group=_OUTPUT,
        help="copy stdout lines with one of these texts to a file",
    ),
    Flag(
        names=_two("duplicate-stderr-filters"), env=_pet("duplicate-stderr-filters"), kind=Kind.LIST,
        default=(), metavar="TEXT,…", group=_OUTPUT,
        help="copy stderr lines with one of these texts to a file",
    ),
    Flag(
        names=_two("event-log-handler"), env=_pet("event-log-handler"), kind=Kind.TEXT, default="null",
        metavar="NAME", group=_OUTPUT, help="accepted; events are in the journal", note=_JOURNAL_NOTE,
    ),
    Flag(
        names=_two("logs-specs"), kind=Kind.TEXT, metavar="NAME", group=_OUTPUT,
        help="accepted; plug-ins of torchrun's logging are not loaded",
        note="plug-ins of torchrun's logging are not loaded",
    ),
)  # fmt: skip
