"""How a master is started: one frozen object, from whichever command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from aimaster.config import WatchConfig, is_loopback
from aimaster.core.detector import DetectorConfig
from aimaster.core.hang import HangConfig
from aimaster.core.policy import Policy
from aimaster.errors import CredentialsMissing
from aimaster.ids import JobId, is_valid_id
from aimaster.master.notify import CommandTarget, Target, WebhookTarget
from aimaster.master.tensorboard import writable_board
from aimaster.rpc.security import Credentials
from aimaster.rpc.transport import Endpoint

ORPHAN_TIMEOUT_S = 300.0
METRICS_TOKEN = "AIMASTER_METRICS_TOKEN"
"""The variable that holds the token for readers of the metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions:
    """To whom the job is shown."""

    metrics: Endpoint | None = None
    """Where ``/metrics`` is served; None: nowhere."""
    metrics_token: str = field(default="", repr=False)
    targets: tuple[Target, ...] = ()
    """Who is sent notices."""
    tensorboard: Path | None = None
    """Folder of event files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterOptions:
    """What a master needs to know before it hears from anybody."""

    job: JobId
    listen: Endpoint
    """Port 0 takes a free one."""
    state_dir: Path
    credentials: Credentials
    node: str = ""
    """Node whose agent owns this master; empty for one on its own."""
    detector: DetectorConfig = field(default_factory=DetectorConfig)
    orphan_timeout_s: float = ORPHAN_TIMEOUT_S
    """How long agents keep their workers without a master."""
    policy: Policy = field(default_factory=Policy)
    hang: HangConfig = field(default_factory=HangConfig)
    watch: WatchOptions = field(default_factory=WatchOptions)

    def __post_init__(self) -> None:
        if not is_valid_id(self.job):
            raise ValueError(f"a job id must be letters, digits, '.', '_' and '-', got {self.job!r}")
        if self.orphan_timeout_s <= self.detector.dead_s:
            raise ValueError(
                f"agents must outlast the failure detector: need {self.detector.dead_s:g} s < orphan "
                f"time-out, got {self.orphan_timeout_s:g} s"
            )


def watch_from(config: WatchConfig, environ: Mapping[str, str]) -> WatchOptions:
    """What the words mean.

    Raises:
        UsageError: one of them is wrong.
        SetupError: what is needed for it is not installed.
        CredentialsMissing: a network would be listened to without a token.
    """
    metrics, token = _metrics_from(config.metrics, environ)
    targets: list[Target] = []
    if config.webhook is not None:
        targets.append(WebhookTarget(config.webhook))
    if config.command is not None:
        targets.append(CommandTarget(config.command))
    return WatchOptions(
        metrics=metrics,
        metrics_token=token,
        targets=tuple(targets),
        tensorboard=None if config.tensorboard is None else writable_board(Path(config.tensorboard)),
    )


def _metrics_from(text: str | None, environ: Mapping[str, str]) -> tuple[Endpoint | None, str]:
    if text is None:
        return None, ""
    endpoint = Endpoint.parse(text)
    token = environ.get(METRICS_TOKEN, "")
    if not token and not is_loopback(endpoint.host):
        raise CredentialsMissing(
            "the metrics would be read by anyone on the network",
            where=f"--metrics {text}",
            next_step=f"set {METRICS_TOKEN}, or listen on 127.0.0.1",
        )
    return endpoint, token
