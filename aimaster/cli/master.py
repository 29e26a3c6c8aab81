"""`aimaster master`: the master alone, for a chosen host or a scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aimaster.agent.rundir import default_state_dir
from aimaster.config import WatchConfig, is_loopback
from aimaster.core.detector import DetectorConfig
from aimaster.errors import CredentialsMissing, UsageError
from aimaster.ids import JobId, is_valid_id
from aimaster.master.options import MasterOptions, watch_from
from aimaster.master.process import Begun, lead
from aimaster.rpc.security import NEW_SECRET_HINT, Credentials, load_secret
from aimaster.rpc.transport import Endpoint

__all__ = ["Alone", "lead_alone", "watch_words"]

BEATS_TO_SUSPECT = 3
BEATS_TO_DEATH = 6
"""Time-outs as multiples of the heartbeat interval, where only that is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """The command's words."""

    job_id: str
    listen: str
    state_dir: Path | None
    secret_file: Path | None
    insecure: bool
    heartbeat_interval_s: float
    watch: WatchConfig = field(default_factory=WatchConfig)


def watch_words(metrics: str | None, environ: Mapping[str, str]) -> WatchConfig:
    """Who may watch: the metrics by a flag, the rest by the variables that `aimaster run` reads too."""
    return WatchConfig(
        metrics=metrics,
        webhook=environ.get("AIMASTER_NOTIFY_WEBHOOK") or None,
        command=environ.get("AIMASTER_NOTIFY_COMMAND") or None,
        tensorboard=environ.get("AIMASTER_TENSORBOARD") or None,
    )


def lead_alone(words: Alone) -> None:
    """Lead a job until it is over, or until a signal ends the master.

    Raises:
        AimasterError: what went wrong, with the exit code.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    asyncio.run(lead(options_from(words), ready=_say_ready))


def options_from(words: Alone) -> MasterOptions:
    """What the words mean.

    Raises:
        UsageError: a word is wrong.
        CredentialsMissing: a network would be listened to without a secret.
    """
    if not is_valid_id(words.job_id):
        raise UsageError(
            "a job id is made of letters, digits, '.', '_' and '-'", where=f"--job-id {words.job_id!r}"
        )
    job = JobId(words.job_id)
    endpoint = Endpoint.parse(words.listen)
    secret = None if words.insecure else load_secret(secret_file=words.secret_file, environ=os.environ)
    if secret is None and not words.insecure and not is_loopback(endpoint.host):
        raise CredentialsMissing(
            "nothing proves which agents belong to the job",
            where=str(endpoint),
            next_step=f"give --secret-file, or set AIMASTER_JOB_SECRET, or say --insecure\n{NEW_SECRET_HINT}",
        )
    interval_s = words.heartbeat_interval_s
    watch = watch_from(words.watch, os.environ)
    try:
        detector = DetectorConfig(
            heartbeat_interval_s=interval_s,
            suspect_s=BEATS_TO_SUSPECT * interval_s,
            dead_s=BEATS_TO_DEATH * interval_s,
        )
        return MasterOptions(
            job=job,
            listen=endpoint,
            state_dir=words.state_dir or default_state_dir(os.environ, job),
            credentials=Credentials.insecure()
            if secret is None
            else Credentials.from_secret(secret, job=job),
            detector=detector,
            watch=watch,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error


def _say_ready(begun: Begun) -> None:
    again = f", goes on from {begun.replayed} journal entries" if begun.replayed else ""
    sys.stdout.write(f"master ready at {begun.endpoint}{again}\n")
    sys.stdout.flush()
