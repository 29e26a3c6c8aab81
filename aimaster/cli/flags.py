"""Our own flags of `aimaster run`, and the help text that shows them beside torchrun's.

Each long-lived choice can also be a variable `AIMASTER_…`; names that the agent sets for its workers
(`AIMASTER_NODE_ID`, `AIMASTER_JOB_ID`) are not read, or an `aimaster run` inside a worker would inherit them.
"""

from __future__ import annotations

import textwrap

from aimaster.config import CheckLevel, CheckMode
from aimaster.core.events import RestartScope
from aimaster.errors import EXIT_CODES
from aimaster.integrations.torchrun import TORCHRUN_FLAGS, Flag, Kind

__all__ = ["OWN_FLAGS", "render_help"]

_CKPT = "Checkpoints"
_PLACES = "Folders and trust"
_CHECK = "Checks and detection"
_PROGRAM = "What a worker runs"

OWN_FLAGS: tuple[Flag, ...] = (
    Flag(
        names=("--no-warm",), env=("AIMASTER_NO_WARM",), kind=Kind.SWITCH, default=False, group=_PROGRAM,
        per_worker=True, help="start each worker in a new interpreter instead of a fork of the template",
    ),
    Flag(
        names=("--command-on",), kind=Kind.TEXT, default="all", choices=("all", "first"),
        metavar="all|first", group=_PROGRAM,
        help="nodes that start a command; first: a launcher that reaches the other nodes itself",
    ),
    Flag(
        names=("--prefix",), env=("AIMASTER_PREFIX",), kind=Kind.SWITCH, default=False,
        group="Output of the workers", help="start each console line with the rank, as [rank3]:",
    ),
    Flag(
        names=("--ckpt-dir",), env=("AIMASTER_CKPT_DIR", "EASYCKPT_DIR"), kind=Kind.TEXT, metavar="DIR",
        group=_CKPT, help="folder of the checkpoints; sets EASYCKPT_DIR for the workers",
    ),
    Flag(
        names=("--saver-linger",), env=("AIMASTER_SAVER_LINGER",), kind=Kind.FLOAT, default=60.0, metavar="S",
        group=_CKPT, help="how long the saver outlives its last client, holding its memory",
    ),
    Flag(
        names=("--saver-memory",), env=("AIMASTER_SAVER_MEMORY",), kind=Kind.TEXT, metavar="BYTES",
        group=_CKPT, help="most memory for checkpoints on this node, such as 8G",
    ),
    Flag(
        names=("--node-id",), kind=Kind.TEXT, metavar="ID", group="Nodes and workers",
        help="name of this node that lasts over restarts; else made of the host's name",
    ),
    Flag(
        names=("--restart-scope",), env=("AIMASTER_RESTART_SCOPE",), kind=Kind.TEXT, default="job",
        choices=tuple(scope.value for scope in RestartScope), metavar="job|node", group="Nodes and workers",
        help="node: no process group crosses nodes; each is a world of its own and starts again alone",
    ),
    Flag(
        names=("--run-dir",), env=("AIMASTER_RUN_DIR",), kind=Kind.TEXT, metavar="DIR", group=_PLACES,
        help="base of the run folders (sockets, progress pages), removed at the end",
    ),
    Flag(
        names=("--state-dir",), env=("AIMASTER_STATE_DIR",), kind=Kind.TEXT, metavar="DIR", group=_PLACES,
        help="folder of what outlives the job: journal, logs",
    ),
    Flag(
        names=("--rules",), env=("AIMASTER_RULES",), kind=Kind.TEXT, metavar="FILE", group=_PLACES,
        help="causes of failures that `aimaster explain` looks for before its own",
    ),
    Flag(
        names=("--policy",), env=("AIMASTER_POLICY",), kind=Kind.TEXT, metavar="FILE", group=_PLACES,
        help="budgets and time-outs; try them first with `aimaster simulate --policy`",
    ),
    Flag(
        names=("--metrics",), env=("AIMASTER_METRICS",), kind=Kind.TEXT, metavar="HOST:PORT", group=_PLACES,
        help="serve /metrics for Prometheus there, on the node that leads the job",
    ),
    Flag(
        names=("--notify-webhook",), env=("AIMASTER_NOTIFY_WEBHOOK",), kind=Kind.TEXT, metavar="URL",
        group=_PLACES, help="POST a JSON object there when something happens, from the node that leads",
    ),
    Flag(
        names=("--notify-command",), env=("AIMASTER_NOTIFY_COMMAND",), kind=Kind.TEXT, metavar="CMD",
        group=_PLACES, help="run this with the same object on its standard input",
    ),
    Flag(
        names=("--tensorboard",), env=("AIMASTER_TENSORBOARD",), kind=Kind.TEXT, metavar="DIR",
        group=_PLACES, help="write step time, goodput, restarts and checkpoint age there for TensorBoard",
    ),
    Flag(
        names=("--secret-file",), env=("AIMASTER_SECRET_FILE",), kind=Kind.TEXT, metavar="FILE",
        group=_PLACES, help="secret shared by the nodes of the job; or AIMASTER_JOB_SECRET holds it",
    ),
    Flag(
        names=("--insecure",), env=("AIMASTER_INSECURE",), kind=Kind.SWITCH, default=False, group=_PLACES,
        help="several nodes without a secret: anyone on the network can speak to the master",
    ),
    Flag(
        names=("--sanity-check",), env=("AIMASTER_SANITY_CHECK",), kind=Kind.TEXT, default="enforce",
        choices=(*(m.value for m in CheckMode), *(level.value for level in CheckLevel)),
        metavar="MODE|LEVEL", group=_CHECK,
        help="node check before the first start: off, warn, enforce, or a level (instant, quick)",
    ),
    Flag(
        names=("--preemption-grace",), env=("AIMASTER_PREEMPTION_GRACE",), kind=Kind.FLOAT, default=30.0,
        metavar="S", group=_CHECK,
        help="from SIGTERM or SIGUSR1 until the machine may be gone; the newest step is durable before",
    ),
    Flag(
        names=("--heartbeat-interval",), env=("AIMASTER_HEARTBEAT_INTERVAL",), kind=Kind.FLOAT, default=1.0,
        metavar="S", group=_CHECK, help="between two signs of life of a node",
    ),
    Flag(
        names=("--suspect-after",), env=("AIMASTER_SUSPECT_AFTER",), kind=Kind.FLOAT, default=3.0,
        metavar="S", group=_CHECK, help="silence after which a node is suspected",
    ),
    Flag(
        names=("--dead-after",), env=("AIMASTER_DEAD_AFTER",), kind=Kind.FLOAT, default=6.0, metavar="S",
        group=_CHECK, help="silence after which a node is given up",
    ),
    Flag(
        names=("--orphan-timeout",), env=("AIMASTER_ORPHAN_TIMEOUT",), kind=Kind.FLOAT, default=300.0,
        metavar="S", group=_CHECK, help="how long workers are kept after the master was lost",
    ),
    Flag(
        names=("--no-hang-detection",), env=("AIMASTER_NO_HANG_DETECTION",), kind=Kind.SWITCH, default=False,
        group=_CHECK, help="leave workers alone that make no step any more",
    ),
    Flag(
        names=("--hang-timeout",), env=("AIMASTER_HANG_TIMEOUT",), kind=Kind.FLOAT, default=3.0, metavar="S",
        group=_CHECK,
        help="no step for so long, and for 10 of the job's usual steps, where waiting cannot end: "
        "a stopped rank, ranks that wait for each other",
    ),
    Flag(
        names=("--hang-busy-timeout",), env=("AIMASTER_HANG_BUSY_TIMEOUT",), kind=Kind.FLOAT, default=60.0,
        metavar="S", group=_CHECK,
        help="the same where one rank looks at work; at least 20 of the slowest steps lately and 3 of the "
        "longest such gap that the job came back from",
    ),
    Flag(
        names=("--hang-start-timeout",), env=("AIMASTER_HANG_START_TIMEOUT",), kind=Kind.FLOAT,
        default=1800.0, metavar="S", group=_CHECK,
        help="the same before the first step of an attempt, and while saving, loading or moving bytes",
    ),
    Flag(
        names=("--hang-exit-timeout",), env=("AIMASTER_HANG_EXIT_TIMEOUT",), kind=Kind.FLOAT, default=600.0,
        metavar="S", group=_CHECK, help="ranks that do nothing for so long after others have finished",
    ),
)  # fmt: skip

_USAGE = """\
Usage: aimaster run [FLAGS] SCRIPT [ARGS]        workers run a Python script, as under torchrun
       aimaster run [FLAGS] -m MODULE [ARGS]     … a module
       aimaster run [FLAGS] -- COMMAND [ARGS]    another launcher, once per node (deepspeed, torchrun, mpirun)

Every flag and PET_ variable of torchrun is taken. An argument goes before a variable, a variable before the
default. A command's {nnodes}, {node_rank}, {master_addr} and {master_port} are filled in for each start.
"""

_NAME_COLUMNS = 38
_LINE_COLUMNS = 110


def render_help() -> str:
    """The text of `aimaster run --help`."""
    groups: dict[str, list[Flag]] = {}
    for flag in (*TORCHRUN_FLAGS, *OWN_FLAGS):
        groups.setdefault(flag.group, []).append(flag)
    parts = [_USAGE]
    for group, flags in groups.items():
        parts.append(f"{group}:\n" + "".join(_flag_lines(flag) for flag in flags))
    parts.append("Exit codes:\n" + "".join(_exit_lines()))
    return "\n".join(parts)


def _flag_lines(flag: Flag) -> str:
    short = next((name for name in flag.names if not name.startswith("--")), None)
    names = f"{short}, {flag.long}" if short else flag.long
    text = flag.help
    shown = flag.default if flag.kind is not Kind.SWITCH and flag.default not in (None, "", ()) else None
    if shown is not None:
        text += f" [{shown:g}]" if isinstance(shown, float) else f" [{shown}]"
    return _entry(f"{names} {flag.metavar}".rstrip(), text)


def _exit_lines() -> list[str]:
    again = {True: "; requeue", False: "", None: ""}
    return [_entry(str(int(row.code)), row.meaning + again[row.requeue], columns=8) for row in EXIT_CODES]


def _entry(name: str, text: str, *, columns: int = _NAME_COLUMNS) -> str:
    lines = textwrap.wrap(text, _LINE_COLUMNS - columns - 2)
    head = f"  {name:<{columns - 2}}" if len(name) <= columns - 4 else f"  {name}\n{'':{columns}}"
    return head + f"\n{'':{columns}}".join(lines) + "\n"
