"""How a master is started: one frozen object, from whichever command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from aimaster.core.detector import DetectorConfig
from aimaster.core.hang import HangConfig
from aimaster.core.policy import Policy
from aimaster.ids import JobId, is_valid_id
from aimaster.rpc.security import Credentials
from aimaster.rpc.transport import Endpoint

ORPHAN_TIMEOUT_S = 300.0


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

    def __post_init__(self) -> None:
        if not is_valid_id(self.job):
            raise ValueError(f"a job id must be letters, digits, '.', '_' and '-', got {self.job!r}")
        if self.orphan_timeout_s <= self.detector.dead_s:
            raise ValueError(
                f"agents must outlast the failure detector: need {self.detector.dead_s:g} s < orphan "
                f"time-out, got {self.orphan_timeout_s:g} s"
            )
