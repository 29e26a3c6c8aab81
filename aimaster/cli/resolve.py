"""Turns the words behind `aimaster run` and the environment into a `RunConfig`.

Precedence is said here once: argument, then variable, then default. Only the number of workers asks the
machine (`--nproc-per-node auto|cpu|gpu`); everything else is a function of the words and the variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from aimaster.cli.devices import workers_for
from aimaster.cli.meeting import resolve_rendezvous
from aimaster.cli.values import FLAGS, Values
from aimaster.cli.words import Parsed
from aimaster.config import (
    CheckConfig,
    CheckLevel,
    CheckMode,
    CheckpointConfig,
    CommandOn,
    DetectorConfig,
    HangLimits,
    NodesConfig,
    PathsConfig,
    ProgramConfig,
    ProgramKind,
    RestartConfig,
    RunConfig,
    Std,
    StdioConfig,
    StdMap,
    WatchConfig,
)
from aimaster.core.events import RestartScope
from aimaster.errors import CredentialsMissing, UsageError
from aimaster.ids import NodeId

__all__ = ["resolve"]

_SIZE = re.compile(r"(\d+)\s*([KMGT]?)i?B?\Z", re.IGNORECASE)


def resolve(parsed: Parsed, env: Mapping[str, str]) -> RunConfig:
    """Resolve a parsed command line.

    Raises:
        UsageError: Values that contradict each other or are out of range.
        CredentialsMissing: Several nodes and nothing that proves who belongs to the job.
    """
    values = Values(given=parsed.given, env=env)
    try:
        program = _program(parsed, values)
        nodes = _nodes(values, program.kind)
        config = RunConfig(
            program=program,
            nodes=nodes,
            rendezvous=resolve_rendezvous(values, nodes),
            restart=_restart(values),
            stdio=_stdio(values),
            checkpoint=_checkpoint(values),
            paths=_paths(values),
            check=_check(values),
            detector=_detector(values),
            hangs=_hangs(values),
            warm=not values.switch("no_warm") and program.kind not in _NEVER_WARM and not program.python,
            notices=(*values.notices, *_notes(values)),
        )
    except ValueError as error:
        raise UsageError(str(error), next_step="see all flags with: aimaster run --help") from error
    if config.restart.by_node and program.command_on is CommandOn.FIRST:
        raise UsageError(
            "--restart-scope node and --command-on first exclude each other",
            where="the launcher on the first node reaches the workers of all nodes",
            next_step="leave one of them away",
        )
    _need_secret(config)
    return config


_NEVER_WARM = (ProgramKind.COMMAND, ProgramKind.NO_PYTHON)


def _program(parsed: Parsed, values: Values) -> ProgramConfig:
    module, no_python, run_path = (values.switch(dest) for dest in ("module", "no_python", "run_path"))
    if not parsed.rest:
        raise UsageError(
            "no script is given", next_step="aimaster run [FLAGS] train.py [ARGS]\nsee: aimaster run --help"
        )
    target, args = parsed.rest[0], parsed.rest[1:]
    if module and no_python and not run_path:
        raise UsageError("--module and --no-python exclude each other", next_step="leave one of them away")
    if run_path:
        kind = ProgramKind.RUN_PATH
    elif module:
        kind = ProgramKind.MODULE
    elif no_python:
        kind = ProgramKind.NO_PYTHON
    elif parsed.separator and not target.endswith(".py"):
        kind = ProgramKind.COMMAND
    else:
        kind = ProgramKind.SCRIPT
    if kind is ProgramKind.COMMAND:
        _refuse_worker_flags(parsed, target)
    elif "command_on" in parsed.given:
        raise UsageError(
            "--command-on is for commands",
            next_step="put -- in front of the command: aimaster run -- COMMAND",
        )
    return ProgramConfig(
        kind=kind,
        target=target,
        args=args,
        command_on=CommandOn(values.text("command_on")),
        python=(values.env.get("PYTHON_EXEC") or None) if kind in _BY_PYTHON else None,
    )


_BY_PYTHON = (ProgramKind.SCRIPT, ProgramKind.MODULE)


def _refuse_worker_flags(parsed: Parsed, target: str) -> None:
    worker_flags = [FLAGS[dest].long for dest in parsed.given if FLAGS[dest].per_worker]
    if worker_flags:
        raise UsageError(
            f"{', '.join(worker_flags)} speaks of single workers, but {target} is a command, "
            "started once per node",
            next_step=f"give {target} its own flag for that, or leave -- away to run a Python script",
        )


def _nodes(values: Values, kind: ProgramKind) -> NodesConfig:
    low, _, high = values.text("nnodes").partition(":")
    try:
        least, most = int(low), int(high or low)
    except ValueError:
        raise UsageError(
            "--nnodes needs N or MIN:MAX", where=f"{values.text('nnodes')!r} was given"
        ) from None
    command = kind is ProgramKind.COMMAND
    node_id = values.text("node_id")
    static = values.text("rdzv_backend") == "static"
    if values.is_set("node_rank") and not static and "node_rank" in values.given:
        values.notices.append("--node-rank: used by a static rendezvous only, ignored here as in torchrun")
    return NodesConfig(
        min=least,
        max=most,
        nproc=1 if command else workers_for(values.text("nproc_per_node"), env=values.env),
        node_rank=values.whole("node_rank") if static and values.is_set("node_rank") else None,
        node_id=NodeId(node_id) if node_id else None,
        local_addr=values.text("local_addr") or None,
        role=values.text("role"),
        virtual_local_rank=values.switch("virtual_local_rank"),
    )


def _restart(values: Values) -> RestartConfig:
    timeout = values.whole("shutdown_timeout")
    return RestartConfig(
        max_restarts=values.whole("max_restarts"),
        by_node=values.text("restart_scope") == RestartScope.NODE.value,
        policy=_policy(values),
        monitor_interval_s=values.number("monitor_interval"),
        shutdown_timeout_s=30.0 if timeout is None else float(timeout),
        preemption_grace_s=values.number("preemption_grace"),
        signals_to_handle=tuple(
            filter(None, (s.strip() for s in values.text("signals_to_handle").split(",")))
        ),
    )


def _stdio(values: Values) -> StdioConfig:
    ranks = values.text("local_ranks_filter")
    try:
        shown = frozenset(int(rank) for rank in ranks.split(",")) if ranks else None
    except ValueError:
        raise UsageError("--local-ranks-filter needs numbers: 0,1", where=f"{ranks!r} was given") from None
    return StdioConfig(
        log_dir=values.path("log_dir"),
        redirects=_std_map(values, "redirects"),
        tee=_std_map(values, "tee"),
        local_ranks_filter=shown,
        prefix=values.switch("prefix"),
        stdout_filters=values.words("duplicate_stdout_filters"),
        stderr_filters=values.words("duplicate_stderr_filters"),
    )


def _std_map(values: Values, dest: str) -> StdMap:
    text = values.text(dest)
    if re.match(r"[0-3]\Z", text):
        return StdMap(all=Std(int(text)))
    if re.match(r"\d+:[0-3](,\d+:[0-3])*\Z", text):
        pairs = (pair.split(":") for pair in text.split(","))
        return StdMap(per_rank=tuple((int(rank), Std(int(std))) for rank, std in pairs))
    raise UsageError(f"{FLAGS[dest].long} needs 0, 1, 2 or 3, or RANK:STD,…", where=f"{text!r} was given")


def _checkpoint(values: Values) -> CheckpointConfig:
    size = values.text("saver_memory")
    match = _SIZE.match(size)
    if size and not match:
        raise UsageError("--saver-memory needs a size such as 8G", where=f"{size!r} was given")
    power = "KMGT".index(match[2].upper()) + 1 if match and match[2] else 0
    return CheckpointConfig(
        ckpt_dir=values.text("ckpt_dir") or None,
        saver_linger_s=values.number("saver_linger"),
        memory_limit_bytes=int(match[1]) * 1024**power if match else None,
    )


def _paths(values: Values) -> PathsConfig:
    return PathsConfig(
        run_dir=values.path("run_dir"),
        state_dir=values.path("state_dir"),
        rules=values.path("rules"),
        watch=_watch(values),
        secret_file=values.path("secret_file"),
        secret_in_env=bool(values.env.get("AIMASTER_JOB_SECRET")),
        insecure=values.switch("insecure"),
    )


def _watch(values: Values) -> WatchConfig:
    """What is wrong is said here, and not by a master that does not start."""
    config = WatchConfig(
        metrics=values.text("metrics") or None,
        webhook=values.text("notify_webhook") or None,
        command=values.text("notify_command") or None,
        tensorboard=values.text("tensorboard") or None,
    )
    if config != WatchConfig():
        from aimaster.master.options import watch_from

        watch_from(config, values.env)
    return config


def _policy(values: Values) -> str | None:
    """The policy file as a journal has it. What there are flags for comes from them alone: two sources would
    hide each other."""
    path = values.path("policy")
    if path is None:
        return None
    from aimaster.core.policy import Timeouts
    from aimaster.journal.codec import encode
    from aimaster.rules.policies import PolicyFile, read_policy  # YAML is for those who bring a policy

    told = read_policy(path)
    if told.detector != PolicyFile().detector:
        flags = "--heartbeat-interval, --suspect-after, --dead-after"
        raise UsageError("the policy of a run has no detector", where=str(path), next_step=f"use {flags}")
    default = Timeouts()
    for name in ("join_s", "last_call_s", "replacement_s"):
        if getattr(told.policy.timeouts, name) != getattr(default, name):
            flags = "--rdzv-conf join_timeout=…,last_call_timeout=…"
            raise UsageError(f"the policy of a run has no {name}", where=str(path), next_step=f"use {flags}")
    return encode(told.policy)


def _check(values: Values) -> CheckConfig:
    text = values.text("sanity_check")
    if text in [mode.value for mode in CheckMode]:
        return CheckConfig(mode=CheckMode(text))
    return CheckConfig(level=CheckLevel(text))


def _detector(values: Values) -> DetectorConfig:
    return DetectorConfig(
        heartbeat_interval_s=values.number("heartbeat_interval"),
        suspect_after_s=values.number("suspect_after"),
        dead_after_s=values.number("dead_after"),
        orphan_timeout_s=values.number("orphan_timeout"),
    )


def _hangs(values: Values) -> HangLimits:
    return HangLimits(
        enabled=not values.switch("no_hang_detection"),
        floor_s=values.number("hang_timeout"),
        busy_s=values.number("hang_busy_timeout"),
        start_s=values.number("hang_start_timeout"),
        exit_s=values.number("hang_exit_timeout"),
    )


def _notes(values: Values) -> list[str]:
    return [f"{FLAGS[dest].long}: {FLAGS[dest].note}" for dest in values.given if FLAGS[dest].note]


def _need_secret(config: RunConfig) -> None:
    paths, rendezvous = config.paths, config.rendezvous
    if config.nodes.max == 1 or rendezvous.loopback or paths.insecure:
        return
    if paths.secret_file is None and not paths.secret_in_env:
        raise CredentialsMissing(
            "several nodes need a secret that proves who belongs to the job; do one of these on every node",
            next_step="aimaster run --secret-file FILE …    (once: head -c 32 /dev/urandom | base64 > FILE; "
            "chmod 600 FILE)\n"
            "export AIMASTER_JOB_SECRET=…          (the same text on every node)\n"
            "aimaster run --insecure …            (anyone on the network can speak to the master)",
        )
