"""What the workers of one node are told in one generation: ranks, addresses, variables, arguments.

The environment is torchrun's contract (torch.distributed.run, section "Environment Variables") and ours
beside it. It is split in two: what all workers of the node have in common, which a template is started with,
and what differs between workers or generations (`PER_WORKER`), which a forked worker is given.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from aimaster.agent.reaper import OWNER_VARIABLE
from aimaster.config import ProgramConfig, ProgramKind
from aimaster.ids import Generation, JobId, NodeId

RANK_VARIABLES = frozenset(
    (
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"),
    )
)
"""Torchrun's contract. A command's own launcher hands these out, and may look at what it inherits."""
OWN_VARIABLES = frozenset(
    (
        *("AIMASTER_AGENT", "AIMASTER_JOB_ID", "AIMASTER_NODE_ID", "AIMASTER_GENERATION"),
        *("AIMASTER_PROGRESS_PAGE", "AIMASTER_LOCAL_RANK", "AIMASTER_NNODES", "AIMASTER_NODE_RANK"),
        *("AIMASTER_MASTER_ADDR", "AIMASTER_MASTER_PORT"),
        "AIMASTER_LOOP",
        *("EASYCKPT_SAVER", "EASYCKPT_GENERATION", "EASYCKPT_PROGRESS_EXPECTED"),
    )
)
PER_WORKER = RANK_VARIABLES | OWN_VARIABLES
"""What differs between workers or generations. An agent's own values of these reach no worker."""
SECRETS = frozenset({"AIMASTER_JOB_SECRET", "AIMASTER_METRICS_TOKEN", "AIMASTER_NOTIFY_WEBHOOK"})
"""Variables of the agent that no worker sees."""
MAX_RESTARTS_UNLIMITED = 1000
"""What ``TORCHELASTIC_MAX_RESTARTS`` says where a budget decides and not a number."""
FLIGHT_RECORDER_ENTRIES = "2000"
"""Collectives that torch's flight recorder keeps; torch has it off. It costs some 100 bytes each."""
FLIGHT_RECORDER_NAMES = {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"}
COMMAND_FIELDS = ("nnodes", "node_rank", "master_addr", "master_port")
"""Fields in the arguments of a command that are filled anew in every generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity:
    """What stays the same for the life of an agent."""

    job: JobId
    node: NodeId
    run_id: str
    """``TORCHELASTIC_RUN_ID``: the id as the user gave it."""
    run_dir: Path
    role: str = "default"
    max_restarts: int | None = None
    own_world: bool = False
    """Whether the workers of this node are a world of their own (`RestartScope.NODE`)."""
    virtual_local_rank: bool = False
    ckpt_dir: str | None = None
    saver_socket: Path | None = None
    loop_socket: Path | None = None
    """Where workers that can outlive a generation reach the agent; None: none can."""
    imports_dir: Path | None = None
    """Where lists of modules to import ahead outlive the job; None keeps none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What changes with the generation."""

    generation: Generation
    attempt: int
    node_rank: int
    nodes: int
    first_rank: int
    world_size: int
    master_addr: str
    master_port: int
    progress_expected: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    """Further variables for every worker of this generation."""


def common_env(
    base: Mapping[str, str], identity: NodeIdentity, *, nproc: int, command: bool = False
) -> dict[str, str]:
    """Variables that every worker of this node has, before what differs between them.

    Args:
        base: The agent's own environment.
        identity: Names and places that do not change while the agent lives.
        nproc: Workers on this node: more than one get one OpenMP thread each where nobody said otherwise.
        command: Whether it is for a command, which keeps what it inherits of torchrun's variables.
    """
    ours = SECRETS | OWN_VARIABLES | {OWNER_VARIABLE}
    if not command:
        ours |= RANK_VARIABLES
    env = {name: value for name, value in base.items() if name not in ours}
    if nproc > 1 and not command:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    if identity.ckpt_dir is not None:
        env["EASYCKPT_DIR"] = identity.ckpt_dir
    if not FLIGHT_RECORDER_NAMES & env.keys():
        env[flight_recorder_name()] = FLIGHT_RECORDER_ENTRIES
    return env


def flight_recorder_name() -> str:
    """The variable that sets the flight recorder's size: torch 2.9 renamed it and warns of the old name."""
    try:
        major, minor = importlib.metadata.version("torch").split(".")[:2]
        old = (int(major), int(minor)) < (2, 9)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        old = False
    return "TORCH_NCCL_TRACE_BUFFER_SIZE" if old else "TORCH_FR_BUFFER_SIZE"


def worker_env(
    common: Mapping[str, str],
    identity: NodeIdentity,
    *,
    assignment: Assignment,
    local_rank: int,
    nproc: int,
) -> dict[str, str]:
    """The whole environment of one worker, but for its error file, progress page and owner."""
    rank = str(assignment.first_rank + local_rank)
    env = dict(common)
    env.update(
        RANK=str(local_rank) if identity.own_world else rank,
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(nproc if identity.own_world else assignment.world_size),
        LOCAL_WORLD_SIZE=str(nproc),
        GROUP_RANK=str(assignment.node_rank),
        GROUP_WORLD_SIZE=str(assignment.nodes),
        ROLE_RANK=rank,
        ROLE_WORLD_SIZE=str(assignment.world_size),
        ROLE_NAME=identity.role,
        MASTER_ADDR=assignment.master_addr,
        MASTER_PORT=str(assignment.master_port),
        TORCHELASTIC_RESTART_COUNT=str(assignment.attempt),
        TORCHELASTIC_MAX_RESTARTS=str(
            MAX_RESTARTS_UNLIMITED if identity.max_restarts is None else identity.max_restarts
        ),
        TORCHELASTIC_RUN_ID=identity.run_id,
        TORCHELASTIC_USE_AGENT_STORE="False",
        AIMASTER_LOCAL_RANK=str(local_rank),
    )
    if identity.virtual_local_rank:
        env["LOCAL_RANK"] = "0"
        visible = common.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible is not None else []
        if visible is not None and local_rank >= len(devices):
            raise ValueError(f"local rank {local_rank} has no device in CUDA_VISIBLE_DEVICES={visible}")
        env["CUDA_VISIBLE_DEVICES"] = devices[local_rank].strip() if devices else str(local_rank)
    env.update(_own_env(identity, assignment))
    env.update(assignment.env)
    return env


def command_env(
    common: Mapping[str, str], identity: NodeIdentity, *, assignment: Assignment
) -> dict[str, str]:
    """The environment of a command: no ranks, which its own launcher hands out."""
    env = dict(common)
    env.update(_own_env(identity, assignment))
    env.update(assignment.env)
    return env


def _own_env(identity: NodeIdentity, assignment: Assignment) -> dict[str, str]:
    env = {
        "AIMASTER_AGENT": str(identity.run_dir),
        "AIMASTER_JOB_ID": identity.job,
        "AIMASTER_NODE_ID": identity.node,
        "AIMASTER_GENERATION": str(assignment.generation),
        "AIMASTER_NNODES": str(assignment.nodes),
        "AIMASTER_NODE_RANK": str(assignment.node_rank),
        "AIMASTER_MASTER_ADDR": assignment.master_addr,
        "AIMASTER_MASTER_PORT": str(assignment.master_port),
        "EASYCKPT_GENERATION": str(assignment.generation),
        "EASYCKPT_PROGRESS_EXPECTED": "1" if assignment.progress_expected else "0",
    }
    if identity.own_world and identity.ckpt_dir is not None:
        # Trainings that are not one another's must not write into one folder.
        env["EASYCKPT_DIR"] = f"{identity.ckpt_dir.rstrip('/')}/node{assignment.node_rank}"
    if identity.saver_socket is not None:
        env["EASYCKPT_SAVER"] = str(identity.saver_socket)
    return env


def interpreter(program: ProgramConfig, default: str) -> str:
    """The Python that runs the workers."""
    return program.python or default


def argv(program: ProgramConfig, python: str, *, local_rank: int, assignment: Assignment) -> list[str]:
    """The words that one worker (or the command) is executed with."""
    if program.kind is ProgramKind.COMMAND:
        return [_fill(word, assignment) for word in (program.target, *program.args)]
    # torchrun substitutes its one macro in this way, `$$` included.
    args = [Template(arg).safe_substitute(local_rank=str(local_rank)) for arg in program.args]
    lead = {
        ProgramKind.SCRIPT: [python, "-u", program.target],
        ProgramKind.MODULE: [python, "-u", "-m", program.target],
        ProgramKind.RUN_PATH: [python, "-u", "-m", "aimaster.worker.entry", program.target],
        ProgramKind.NO_PYTHON: [program.target],
    }[program.kind]
    return lead + args


def words_before_argv(program: ProgramConfig) -> int:
    """How many words of `argv` come before ``sys.argv[1]`` of a program that our Python runs."""
    return 3 if program.kind is ProgramKind.SCRIPT else 4


def script_dir(program: ProgramConfig) -> str | None:
    """What Python will put first into ``sys.path``; None where it puts nothing there."""
    if os.environ.get("PYTHONSAFEPATH"):
        return None
    if program.kind is ProgramKind.SCRIPT:
        return os.path.dirname(os.path.realpath(program.target))
    return os.getcwd()


def _fill(word: str, assignment: Assignment) -> str:
    values = {
        "nnodes": assignment.nodes,
        "node_rank": assignment.node_rank,
        "master_addr": assignment.master_addr,
        "master_port": assignment.master_port,
    }
    # Not str.format: a command may hold any other braces, JSON for instance.
    for name in COMMAND_FIELDS:
        word = word.replace("{" + name + "}", str(values[name]))
    return word
