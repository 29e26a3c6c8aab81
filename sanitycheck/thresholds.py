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
GEMM_ERROR_MAX = 1e-3
"""Relative error of a float32 product of this size against float64 stays below 1e-5; a broken unit is far
off."""

# --- store.ckpt_path --------------------------------------------------------------------------------------
STORE_WRITE_SLOW_MB_S = 30.0
"""Below this a 1 GB checkpoint takes over half a minute; a laptop's disk does ten times more."""
STORE_CHECKPOINTS_ROOM = 2
"""A new checkpoint is written before the old one goes, so that two must fit."""
