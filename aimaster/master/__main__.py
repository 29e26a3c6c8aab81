"""``python -m aimaster.master``: the master as a child of the agent that hosts it.

The agent reads one line of JSON from the descriptor ``--ready-fd``: ``{"endpoint", "pid", "epoch"}`` once
the master answers, or ``{"error", "message", "where", "next_step"}`` when it cannot start. Everything else
goes to stderr, which the agent has made a file. For a master on its own there is ``aimaster master``.

The address of a webhook comes from ``AIMASTER_NOTIFY_WEBHOOK``, the job's secret from ``--secret-file``,
``--secret-fd`` or ``AIMASTER_JOB_SECRET``; with none of them, connections are plain: whether that may be is
decided by the agent.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import resource
import sys
from dataclasses import replace
from pathlib import Path

from aimaster.config import WatchConfig
from aimaster.core.detector import DetectorConfig
from aimaster.core.hang import HangConfig
from aimaster.core.policy import Policy, Timeouts
from aimaster.errors import AimasterError, OwnBug, UsageError
from aimaster.ids import JobId
from aimaster.journal.codec import decode_policy
from aimaster.master.lifeline import end_with_parent
from aimaster.master.options import MasterOptions, watch_from
from aimaster.master.process import Begun, lead
from aimaster.rpc.security import Credentials, Secret, load_secret, read_secret_fd
from aimaster.rpc.transport import Endpoint

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def main(argv: list[str] | None = None) -> int:
    """Run a master until its job is over.

    Returns:
        0 when the job is over or the process was told to end, else the error's exit code.
    """
    parent = os.getppid()
    arguments = _parser().parse_args(argv)
    if not end_with_parent(parent):
        return int(OwnBug.exit_code)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    # Every agent holds a connection; the usual soft limit is 1024, the hard one far above.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

    def ready(begun: Begun) -> None:
        _tell(
            arguments.ready_fd,
            {"endpoint": str(begun.endpoint), "pid": os.getpid(), "epoch": begun.epoch},
        )

    try:
        asyncio.run(lead(_options(arguments), ready=ready, revived=arguments.revive))
    except AimasterError as error:
        logging.getLogger(__name__).error("%s", error)
        _tell(arguments.ready_fd, error_line(error))
        return int(error.exit_code)
    return 0


def error_line(error: AimasterError) -> dict[str, object]:
    """An error as the agent reads it; its kind is the class's name in snake case."""
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    return {"error": kind, "message": error.what, "where": error.where, "next_step": error.next_step}


def _tell(fd: int | None, line: dict[str, object]) -> None:
    """Say it once and close the pipe; nobody may be there to hear it."""
    if fd is None:
        return
    try:
        with os.fdopen(fd, "w") as pipe:
            pipe.write(json.dumps(line) + "\n")
    except OSError as error:
        # Said already, or the agent is gone; then the kernel ends this process as well.
        logging.getLogger(__name__).info("the ready pipe is closed (%s)", error.strerror)


def _options(arguments: argparse.Namespace) -> MasterOptions:
    job = JobId(arguments.job_id)
    secret: Secret | None = None
    if arguments.secret_fd is not None:
        secret = read_secret_fd(arguments.secret_fd)
    elif not arguments.insecure:
        secret = load_secret(secret_file=arguments.secret_file, environ=os.environ)
    credentials = Credentials.insecure() if secret is None else Credentials.from_secret(secret, job=job)
    endpoint = Endpoint.parse(arguments.listen)
    words = WatchConfig(
        metrics=arguments.metrics,
        webhook=os.environ.get("AIMASTER_NOTIFY_WEBHOOK") or None,
        command=arguments.notify_command,
        tensorboard=arguments.tensorboard,
    )
    try:
        policy = Policy() if arguments.policy is None else decode_policy(arguments.policy)
        timeouts = replace(
            policy.timeouts,
            last_call_s=arguments.last_call,
            join_s=arguments.join_timeout,
            replacement_s=arguments.replacement_timeout,
        )
        return MasterOptions(
            job=job,
            listen=endpoint,
            state_dir=arguments.state_dir,
            credentials=credentials,
            node=arguments.node_id,
            detector=DetectorConfig(
                heartbeat_interval_s=arguments.heartbeat_interval,
                suspect_s=arguments.suspect_after,
                dead_s=arguments.dead_after,
            ),
            orphan_timeout_s=arguments.orphan_timeout,
            policy=replace(policy, timeouts=timeouts),
            watch=watch_from(words, os.environ),
            hang=HangConfig(
                enabled=not arguments.no_hang_detection,
                floor_s=arguments.hang_timeout,
                busy_s=arguments.hang_busy_timeout,
                start_s=arguments.hang_start_timeout,
                exit_s=arguments.hang_exit_timeout,
            ),
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _parser() -> argparse.ArgumentParser:
    times, limits = DetectorConfig(), Timeouts()
    parser = argparse.ArgumentParser(prog="python -m aimaster.master", description=__doc__)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--node-id", default="", help="node whose agent owns this master")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT")
    parser.add_argument("--state-dir", required=True, type=Path)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--secret-file", type=Path)
    parser.add_argument("--secret-fd", type=int)
    parser.add_argument("--insecure", action="store_true", help="plain connections, whatever else is set")
    parser.add_argument("--revive", action="store_true", help="go on with a job that is over, to its end")
    parser.add_argument("--heartbeat-interval", type=float, default=times.heartbeat_interval_s)
    parser.add_argument("--suspect-after", type=float, default=times.suspect_s)
    parser.add_argument("--dead-after", type=float, default=times.dead_s)
    parser.add_argument("--orphan-timeout", type=float, default=300.0)
    parser.add_argument("--last-call", type=float, default=limits.last_call_s)
    parser.add_argument("--join-timeout", type=float, default=limits.join_s)
    parser.add_argument("--replacement-timeout", type=float, default=limits.replacement_s)
    parser.add_argument("--metrics", metavar="HOST:PORT", help="serve /metrics there")
    parser.add_argument("--notify-command", metavar="CMD", help="see `aimaster run`; a webhook is a variable")
    parser.add_argument("--tensorboard", metavar="DIR", help="write event files there")
    parser.add_argument("--policy", help="as a journal has it; the words above go first")
    hang = HangConfig()
    parser.add_argument("--no-hang-detection", action="store_true")
    parser.add_argument("--hang-timeout", type=float, default=hang.floor_s)
    parser.add_argument("--hang-busy-timeout", type=float, default=hang.busy_s)
    parser.add_argument("--hang-start-timeout", type=float, default=hang.start_s)
    parser.add_argument("--hang-exit-timeout", type=float, default=hang.exit_s)
    return parser


if __name__ == "__main__":
    sys.exit(main())
