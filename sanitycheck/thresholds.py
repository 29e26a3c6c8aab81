"""Limits that judgements use, each with its source.

"field" = what several public node checkers use or their users asked for; see docs/explain/sanitycheck.md.
Nothing here is a limit of the engine itself: those stand beside the code they bound.
"""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30

# --- host.limits ------------------------------------------------------------------------------------------
SHM_SMALL_BYTES = 1 * GIB
"""Docker's default is 64 MiB: DataLoader workers then die of SIGBUS and NCCL's shared-memory transport
fails."""
SHM_FREE_SMALL_BYTES = 64 * MIB
"""Leaked segments fill /dev/shm; below this one batch or one NCCL channel may not fit."""
NOFILE_SMALL = 1024
"""The usual default, which trains; less is a deliberate cut."""
TASKS_LEFT_PER_WORKER = 64
"""Threads one worker may want: BLAS, autograd, data loading, communication."""

# --- host.cpu_mem -----------------------------------------------------------------------------------------
MEMORY_AVAILABLE_SMALL_BYTES = 1 * GIB
LOAD_PER_CPU_HIGH = 2.0
EDAC_CORRECTED_MANY = 100
"""Corrected errors since the driver loaded. One is normal in a large fleet; many foretell an uncorrected
one."""

# --- host.disk --------------------------------------------------------------------------------------------
DISK_FREE_SHARE_SMALL = 0.10
DISK_FREE_SMALL_BYTES = 20 * GIB
"""Both must hold for a warning: a tenth of a large disk is plenty (field: 80-90 % used, or 500 MB left)."""
DISK_FREE_NONE_BYTES = 100 * MIB
INODES_FREE_SHARE_SMALL = 0.01

# --- host.kernel ------------------------------------------------------------------------------------------
KERNEL_WINDOW_S = 24 * 3600.0
"""Only younger messages count: an old boot message is not about today's health."""

# --- net.clock --------------------------------------------------------------------------------------------
CLOCK_OFFSET_WARN_S = 0.1
"""Field: logs of two nodes can no longer be put in order."""
CLOCK_OFFSET_FAIL_S = 1.0
CLOCK_SANE_UNIX_S = 1_704_067_200.0
"""2024-01-01: earlier than this code. A clock before it breaks TLS and signed storage requests."""

# --- cpu.gemm ---------------------------------------------------------------------------------------------
GEMM_WARN_SHARE = 0.93
GEMM_FAIL_SHARE = 0.80
"""Against the node's own record (field: -3.5 % warn, -7 % fail on GPUs; processors vary more)."""
NOISE_MADS = 3.5
"""A figure within this many times 1.4826 MAD of its record is its usual noise (Iglewicz and Hoaglin 1993)."""
GEMM_ERROR_MAX = 1e-3
"""Relative error of a float32 product of this size against float64 stays below 1e-5; a broken unit is far
off."""

# --- train.mini_gpt ---------------------------------------------------------------------------------------
LOSS_SHARE_MAX = 0.95
"""Of the first loss: a dozen steps on counted sequences bring it far lower."""

# --- store.ckpt_path --------------------------------------------------------------------------------------
STORE_WRITE_SLOW_MB_S = 30.0
"""Below this a 1 GB checkpoint takes over half a minute; a laptop's disk does ten times more."""
STORE_CHECKPOINTS_ROOM = 2
"""A new checkpoint is written before the old one goes, so that two must fit."""

# --- gpu.* ------------------------------------------------------------------------------------------------
ECC_SRAM_MAX = 4
"""Uncorrected errors of on-chip memory over the life of the board; above it the vendor takes boards back."""
XID_REPEATS = 2
"""A program's own error this often on one device within a day points at the device."""
GPU_WARN_SHARE = 0.93
GPU_FAIL_SHARE = 0.80
"""Of what the model reaches in practice (field: -3.5 % warn, -7 % fail against one's own fleet)."""
GPU_SPREAD_MAX = 0.05
"""Between the devices of one node; clocks of equal boards differ by 2-3 %."""
GPU_MEMORY_WARN_SHARE = 0.80
GPU_MEMORY_FAIL_SHARE = 0.65
"""Of the memory's peak; a plain large copy reaches 85-92 %, and a table may be wrong by a tenth."""
GPU_COPY_FAIL_SHARE = 0.70
"""Of a usual pinned copy, and of the peak of NVLink between two devices."""
PATTERN_SHARE_MIN = 0.90
"""Of the free memory that a pattern test has to cover."""
SUSTAIN_DROP_MAX = 0.05

# --- link.* -----------------------------------------------------------------------------------------------
AER_CORRECTED_FACTOR = 10.0
"""Times the rate that DCGM expects of a healthy link; below it a report would be noise."""
AER_WINDOW_MIN_S = 3600.0
"""Counted as at least this long, so that a burst at boot is no rate."""

# --- net.rdma -----------------------------------------------------------------------------------------------
RDMA_FLAPS_MAX = 3
"""Times a link may go down between two looks, or in half a day (field: 3 in 12 h, 5 in 24 h)."""
RDMA_FLAPS_WINDOW_S = 12 * 3600.0
RDMA_ERRORS_PER_H_MAX = 120.0
"""Field, for links before PAM4; newer ones correct errors all the time, so that it only warns."""
