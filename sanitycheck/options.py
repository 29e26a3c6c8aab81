"""What a run is told about the node and about what to expect of it. Crosses to the probes as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sanitycheck.errors import UsageError

__all__ = ["Known", "Options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of this node from before, or demanded of it, beyond the everyday options.

    Attributes:
        last_boot_id: Boot id seen earlier, so that a reboot in between is noticed.
        noise: Spread (MAD) of each figure of the baseline; a figure inside it is not slow.
        digests: Digests recorded earlier by name (``train.mini_gpt``), for the same software and hardware.
        counters: Counters recorded earlier by name (``mlx5_0/1.link_downed``), valid for ``last_boot_id``.
        mig: Whether devices must be partitioned (MIG); None: nobody said.
        rdma_ports: How many RDMA ports must be up; None: nobody said.
        reach: ``host:port`` of machines that must be reachable.
        good_until_unix_s: Time of the last run in which nothing failed; older kernel messages do not count.
    """

    last_boot_id: str | None = None
    noise: Mapping[str, float] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    mig: bool | None = None
    rdma_ports: int | None = None
    reach: tuple[str, ...] = ()
    good_until_unix_s: float | None = None

    def __post_init__(self) -> None:
        if self.rdma_ports is not None and self.rdma_ports < 0:
            raise UsageError(f"the number of RDMA ports must not be negative, got {self.rdma_ports}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Expectations and choices of one run. Everything is optional; what is not said is not judged.

    Attributes:
        only: Ids of checks to run, whatever their level; empty means all of the level.
        skip: Ids of checks to leave out.
        expect_gpus: How many NVIDIA devices the node must show. None: devices are not expected.
        local_workers: How many training processes will share this node.
        nnodes: How many nodes the job will have.
        ckpt_path: Path or URL where checkpoints will be written.
        ckpt_bytes: Size of one checkpoint's part that lands there, when known.
        clock_peer: ``host[:port]`` of an SNTP server whose clock this node's is compared with.
        clock_offset_s: This node's clock minus a peer's, when the caller has measured it by itself.
        fingerprint: Software versions that this node must have, as ``sw.fingerprint`` names them.
        baseline: Figures recorded earlier on this node, by name (``cpu.gemm.gflops``).
        known: What is known or demanded beyond that.
    """

    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    expect_gpus: int | None = None
    local_workers: int = 1
    nnodes: int = 1
    ckpt_path: str | None = None
    ckpt_bytes: int | None = None
    clock_peer: str | None = None
    clock_offset_s: float | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    baseline: Mapping[str, float] = field(default_factory=dict)
    known: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        if self.expect_gpus is not None and self.expect_gpus < 0:
            raise UsageError(f"the number of expected GPUs must not be negative, got {self.expect_gpus}")
        if self.local_workers < 1 or self.nnodes < 1:
            raise UsageError("local_workers and nnodes must be at least 1")
        if self.ckpt_path is not None and not self.ckpt_path:
            raise UsageError("the checkpoint path is empty; leave the option out or name a path or URL")
        if self.ckpt_bytes is not None and self.ckpt_bytes < 0:
            raise UsageError(f"the checkpoint size must not be negative, got {self.ckpt_bytes}")
