"""What `aimaster run` was asked to do, resolved: one frozen object of small groups.

Nothing here reads the environment, the command line, a clock or a file. `aimaster.cli.resolve` turns
argument, environment and default (in this order) into a `RunConfig`; everything behind it takes the group
that it needs. Values are checked when a group is made, and time-outs that depend on each other are checked
together, so that no later code meets a contradiction. A `ValueError` from here is a sentence that the command
line shows.

Units stand last in a name. `None` means that nobody said anything, and that the user of the value decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntFlag
from pathlib import Path

from aimaster.ids import JobId, NodeId, is_valid_id

NODES_MAX = 100_000
"""Largest number of nodes that may be asked for."""
WORKERS_PER_NODE_MAX = 1024
"""Largest `--nproc-per-node`."""
PORT_MAX = 65_535


class ProgramKind(Enum):
    """How the words behind the flags are started."""

    SCRIPT = "script"  # python -u FILE ARGS, one process per local rank
    MODULE = "module"  # python -u -m MODULE ARGS
    RUN_PATH = "run_path"  # runpy.run_path(FILE, run_name="__main__")
    NO_PYTHON = "no_python"  # the target itself, one process per local rank
    COMMAND = "command"  # another launcher, started once per node and watched as one unit


class CommandOn(Enum):
    """Which nodes start a command."""

    ALL = "all"
    FIRST = "first"  # node rank 0 alone; the launcher reaches the other nodes itself


class JobIdSource(Enum):
    """Where the job id comes from; the first agent's word counts on several nodes."""

    FLAG = "flag"  # --rdzv-id
    SCHEDULER = "scheduler"  # SLURM_JOB_ID and the like
    ENDPOINT = "endpoint"  # several nodes that were given none: made of the rendezvous endpoint
    NEW = "new"  # one node that was given none


class Std(IntFlag):
    """Standard streams of a worker, with torchrun's numbers."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class CheckMode(Enum):
    """What the node check before the first generation may do."""

    OFF = "off"
    WARN = "warn"  # says what it finds, never refuses
    ENFORCE = "enforce"  # refuses a node on which training would fail or be wrong


class CheckLevel(Enum):
    """How much the node check looks at; the longer ones include the shorter ones."""

    INSTANT = "instant"
    QUICK = "quick"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramConfig:
    """What a worker runs."""

    kind: ProgramKind
    target: str
    """Script path, module name, or first word of the command, as given."""
    args: tuple[str, ...] = ()
    command_on: CommandOn = CommandOn.ALL
    """Only for `ProgramKind.COMMAND`."""
    python: str | None = None
    """Interpreter that torchrun's `PYTHON_EXEC` asks for; None is the one that runs the agent."""

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("the program to run has an empty name")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesConfig:
    """How many nodes and workers, and who this node is."""

    min: int
    max: int
    nproc: int
    """Training processes on this node; 1 for a command."""
    node_rank: int | None = None
    """Wanted by a static rendezvous; None lets the core choose."""
    node_id: NodeId | None = None
    """None lets the agent take the first free name made of the host's name."""
    local_addr: str | None = None
    """Address at which the other nodes reach this one; None lets the agent find it."""
    role: str = "default"
    """`ROLE_NAME` of the workers."""
    virtual_local_rank: bool = False
    """`LOCAL_RANK` is 0 everywhere and each worker sees its own GPU only."""

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.max <= NODES_MAX:
            raise ValueError(f"--nnodes needs 1 <= MIN <= MAX <= {NODES_MAX}, got {self.min}:{self.max}")
        if not 1 <= self.nproc <= WORKERS_PER_NODE_MAX:
            raise ValueError(
                f"--nproc-per-node needs a number from 1 to {WORKERS_PER_NODE_MAX}, got {self.nproc}"
            )
        if self.node_rank is not None and not 0 <= self.node_rank < NODES_MAX:
            raise ValueError(f"--node-rank must be 0 or more, got {self.node_rank}")
        if self.node_id is not None and not is_valid_id(self.node_id):
            raise ValueError(f"--node-id must be letters, digits, '.', '_' and '-', got {self.node_id!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RendezvousConfig:
    """Where the master is or will be, and for which job."""

    job_id: JobId
    job_id_source: JobIdSource
    run_id: str
    """`TORCHELASTIC_RUN_ID` of the workers: the id exactly as the user gave it, else the job id."""
    host: str | None = None
    """None: the master runs on this node, on loopback, at a port that is free."""
    port: int | None = None
    """None (only with `host` None) or 0: any free port."""
    is_host: bool | None = None
    """`is_host` of `--rdzv-conf`: whether this node hosts the master; None decides by address."""
    join_timeout_s: float = 600.0
    """How long to wait for the master and for the minimum of nodes."""
    last_call_s: float = 30.0
    """With MIN < MAX: how long to wait for more nodes once the minimum is there."""
    conf: tuple[tuple[str, str], ...] = ()
    """`--rdzv-conf` as given."""

    def __post_init__(self) -> None:
        if not is_valid_id(self.job_id):
            raise ValueError(f"a job id must be letters, digits, '.', '_' and '-', got {self.job_id!r}")
        if self.host is not None and (self.port is None or not 0 <= self.port <= PORT_MAX):
            raise ValueError(f"the rendezvous port must be a number from 0 to {PORT_MAX}, got {self.port}")
        if self.join_timeout_s <= 0 or self.last_call_s < 0:
            raise ValueError("join_timeout must be more than 0 s and last_call_timeout 0 s or more")

    @property
    def standalone(self) -> bool:
        """Whether the master belongs to this node alone."""
        return self.host is None

    @property
    def loopback(self) -> bool:
        """Whether nothing of the job leaves this machine."""
        return self.host is None or is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Whether `host` names this machine to itself, judged by the text alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartConfig:
    """When and how workers are stopped and started again."""

    max_restarts: int | None = None
    """Cap on restarts of the whole job; None leaves it to the budgets."""
    by_node: bool = False
    """Whether no process group crosses nodes, so that one node's workers may be started again alone."""
    policy: str | None = None
    """Budgets and time-outs in place of the defaults, as a journal has them."""
    monitor_interval_s: float = 0.1
    """Accepted; exits are noticed at once whatever it says."""
    shutdown_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL when workers are stopped."""
    preemption_grace_s: float = 30.0
    """From the notice of a preemption until the machine may be gone."""
    signals_to_handle: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    """Signals that end the job. SIGUSR1 and SIGUSR2 always do, as schedulers send them as a notice."""

    def __post_init__(self) -> None:
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ValueError(f"--max-restarts must be 0 or more, got {self.max_restarts}")
        if self.monitor_interval_s <= 0:
            raise ValueError(f"--monitor-interval must be more than 0, got {self.monitor_interval_s}")
        if self.shutdown_timeout_s < 0:
            raise ValueError(f"--shutdown-timeout must be 0 or more, got {self.shutdown_timeout_s}")
        if self.preemption_grace_s <= 0:
            raise ValueError(f"--preemption-grace must be more than 0, got {self.preemption_grace_s}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StdMap:
    """A choice of streams per local rank: one for all, or a list in which absent ranks have none."""

    all: Std = Std.NONE
    per_rank: tuple[tuple[int, Std], ...] | None = None

    def of(self, local_rank: int) -> Std:
        """Streams chosen for one local rank."""
        if self.per_rank is None:
            return self.all
        return dict(self.per_rank).get(local_rank, Std.NONE)

    @property
    def any(self) -> bool:
        """Whether any stream of any rank is chosen."""
        return bool(self.all) if self.per_rank is None else any(std for _, std in self.per_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class StdioConfig:
    """Where the output of the workers goes."""

    log_dir: Path | None = None
    redirects: StdMap = field(default_factory=StdMap)
    """Streams that go to a file instead of the console."""
    tee: StdMap = field(default_factory=StdMap)
    """Streams that go to a file and to the console."""
    local_ranks_filter: frozenset[int] | None = None
    """Local ranks whose output the console shows; None shows all."""
    prefix: bool = False
    """Whether each console line starts with `[rank3]:`."""
    stdout_filters: tuple[str, ...] = ()
    """`--duplicate-stdout-filters`: lines with one of these texts are copied to a filtered file."""
    stderr_filters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """How the node's saver is started."""

    ckpt_dir: str | None = None
    """Path or URL that becomes `EASYCKPT_DIR`; None leaves it to the script."""
    saver_linger_s: float = 60.0
    """How long the saver outlives its last client."""
    memory_limit_bytes: int | None = None
    """Most memory that the saver may hold; None leaves it to the saver."""

    def __post_init__(self) -> None:
        if self.saver_linger_s < 0:
            raise ValueError(f"--saver-linger must be 0 or more, got {self.saver_linger_s}")
        if self.memory_limit_bytes is not None and self.memory_limit_bytes <= 0:
            raise ValueError(f"--saver-memory must be more than 0, got {self.memory_limit_bytes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """To whom the master of this node shows the job, beside `aimaster status`; all off by default."""

    metrics: str | None = None
    """``host:port`` at which it serves ``/metrics``."""
    webhook: str | None = field(default=None, repr=False)
    """Address that is sent notices; often a secret itself."""
    command: str | None = None
    """Command line that is run with each notice on its standard input."""
    tensorboard: str | None = None
    """Folder of event files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PathsConfig:
    """Folders of this node, who may watch the job, and what proves that it belongs to the job."""

    run_dir: Path | None = None
    """Base of the run folders; None is the default place, see `aimaster.agent.rundir.default_base`."""
    state_dir: Path | None = None
    """Folder of what outlives the job (journal, logs); None is the default place."""
    rules: Path | None = None
    """Diagnosis rules of the user's own; kept with the job's journal."""
    watch: WatchConfig = field(default_factory=WatchConfig)
    secret_file: Path | None = None
    secret_in_env: bool = False
    """Whether `AIMASTER_JOB_SECRET` is set; its value stays in the environment."""
    insecure: bool = False
    """Whether the user agreed to plain, unproved connections between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """The node check before the first generation."""

    mode: CheckMode = CheckMode.ENFORCE
    level: CheckLevel | None = None
    """None: instant on one node without GPUs, quick otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig:
    """When a silent node is suspected and given up, and when an agent without a master gives up."""

    heartbeat_interval_s: float = 1.0
    suspect_after_s: float = 3.0
    dead_after_s: float = 6.0
    orphan_timeout_s: float = 300.0
    """How long an agent keeps its workers after it has lost its master."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_interval_s < self.suspect_after_s < self.dead_after_s:
            raise ValueError(
                "need 0 < --heartbeat-interval < --suspect-after < --dead-after, got "
                f"{self.heartbeat_interval_s:g}, {self.suspect_after_s:g}, {self.dead_after_s:g} s"
            )
        if self.orphan_timeout_s <= self.dead_after_s:
            raise ValueError(
                f"need --dead-after < --orphan-timeout, got {self.dead_after_s:g}, "
                f"{self.orphan_timeout_s:g} s: else an agent gives up before its master could notice"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """When workers that make no step are said to hang; see `aimaster.core.hang`."""

    enabled: bool = True
    floor_s: float = 3.0
    """For what cannot end by itself, at least."""
    busy_s: float = 60.0
    """For a rank that looks at work while the others wait, at least."""
    start_s: float = 1800.0
    """For the same before the first step, and while saving or loading."""
    exit_s: float = 600.0
    """For ranks that do nothing after others have finished."""

    def __post_init__(self) -> None:
        if not 0 < self.floor_s <= self.busy_s <= self.start_s:
            raise ValueError(
                "need 0 < --hang-timeout <= --hang-busy-timeout <= --hang-start-timeout, got "
                f"{self.floor_s:g}, {self.busy_s:g}, {self.start_s:g} s"
            )
        if self.exit_s <= 0:
            raise ValueError(f"--hang-exit-timeout must be above 0, got {self.exit_s:g}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Everything `aimaster run` was asked to do."""

    program: ProgramConfig
    nodes: NodesConfig
    rendezvous: RendezvousConfig
    restart: RestartConfig = field(default_factory=RestartConfig)
    stdio: StdioConfig = field(default_factory=StdioConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    paths: PathsConfig = field(default_factory=PathsConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    hangs: HangLimits = field(default_factory=HangLimits)
    warm: bool = True
    """Whether workers are forked from a process that has torch imported already."""
    notices: tuple[str, ...] = ()
    """Sentences to say once on stderr: flags that are accepted and have no meaning here."""
