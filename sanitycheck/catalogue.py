"""All checks, in the order of the report. Adding one means one entry here, a ``collect`` and a ``judge``."""

from __future__ import annotations

from sanitycheck.check import Check, Lane
from sanitycheck.checks import compute, gpu, host, net, software, store
from sanitycheck.errors import UnknownCheckError, UsageError
from sanitycheck.facts import bitwise, capabilities, clock, collective, disk, gemm, kernel, limits, mounts
from sanitycheck.facts import gpu as gpu_facts
from sanitycheck.facts import host as host_facts
from sanitycheck.facts import software as software_facts
from sanitycheck.facts import store as store_facts
from sanitycheck.reasons import Reason
from sanitycheck.result import Level, Verdict

__all__ = ["CHECKS", "by_id", "choose"]

CHECKS: tuple[Check, ...] = (
    Check(
        id="env.capabilities",
        level=Level.QUICK,
        scope="node",
        title="what can be seen from here",
        about="Which tools, devices and kernel interfaces this process can see, and in what container "
        "it runs. It judges nothing; it tells how much the other verdicts are worth.",
        collect=capabilities.collect,
        facts=capabilities.CapabilitiesFacts,
        judge=host.judge_capabilities,
        reasons=(Reason.CAPABILITIES,),
    ),
    Check(
        id="gpu.inventory",
        level=Level.INSTANT,
        scope="node",
        title="NVIDIA devices are there and answer",
        about="Asks NVML for every device. Without --expect-gpus a machine that has none skips this; "
        "with it, fewer devices than expected fail and block. A driver that names a hardware "
        "error fails; a missing permission or an unknown error in a container does not say "
        "anything about the hardware and is unknown.",
        collect=gpu_facts.collect,
        facts=gpu_facts.GpuFacts,
        judge=gpu.judge_inventory,
        reasons=(
            Reason.GPU_INVENTORY,
            Reason.GPU_NOT_EXPECTED,
            Reason.GPU_NONE,
            Reason.GPU_MISSING,
            Reason.GPU_EXTRA,
            Reason.GPU_HIDDEN,
            Reason.GPU_MIXED,
            Reason.GPU_HARDWARE,
            Reason.GPU_NOT_PERMITTED,
            Reason.DRIVER_MISMATCH,
            Reason.NVML_UNKNOWN_ERROR,
            Reason.NVML_ERROR,
        ),
        # Without persistence mode the driver loads first, seconds per device.
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="host.cpu_mem",
        level=Level.QUICK,
        scope="node",
        title="processors, memory, memory errors, load",
        about="Processors and memory as kernel and control group grant them, load by others, and the "
        "kernel's count of memory errors (EDAC). An uncorrected error fails; the rest warns.",
        collect=host_facts.collect_cpu_mem,
        facts=host_facts.CpuMemFacts,
        judge=host.judge_cpu_mem,
        reasons=(
            Reason.CPU_MEM,
            Reason.CPUS_FEW,
            Reason.MEMORY_SMALL,
            Reason.LOAD_HIGH,
            Reason.MEMORY_ERRORS,
            Reason.MEMORY_ERRORS_CORRECTED,
        ),
    ),
    Check(
        id="host.limits",
        level=Level.INSTANT,
        scope="node",
        title="limits on files, locked and shared memory, tasks",
        about="The limits whose breach shows up hours later as a strange error: open files, locked "
        "memory (only with RDMA devices), the size of and the room in /dev/shm, processes and "
        "threads. A low one warns: a training that does not need it runs.",
        collect=limits.collect,
        facts=limits.LimitsFacts,
        judge=host.judge_limits,
        reasons=(
            Reason.LIMITS,
            Reason.NOFILE_LOW,
            Reason.MEMLOCK_LOW,
            Reason.SHM_MISSING,
            Reason.SHM_SMALL,
            Reason.SHM_FULL,
            Reason.TASKS_FEW,
        ),
    ),
    Check(
        id="host.disk",
        level=Level.INSTANT,
        scope="node",
        title="space, inodes, read-only state",
        about="The file systems under /, the temporary folder, the working folder and a local "
        "checkpoint folder. A full one, and one that the kernel turned read-only after an error, "
        "fails; no folder for temporary files blocks, since no launcher starts without. A file "
        "system that does not answer fails too.",
        collect=disk.collect,
        facts=disk.DiskFacts,
        judge=host.judge_disk,
        reasons=(
            Reason.DISK,
            Reason.DISK_LOW,
            Reason.DISK_FULL,
            Reason.INODES_LOW,
            Reason.READ_ONLY,
            Reason.TURNED_READ_ONLY,
            Reason.FS_ERRORS,
            Reason.NO_TEMP_FOLDER,
        ),
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="host.boot",
        level=Level.QUICK,
        scope="node",
        title="which boot this is",
        about="Records the boot id and the time since boot. Warns when the caller knows an earlier "
        "boot: somebody or something restarted the node.",
        collect=host_facts.collect_boot,
        facts=host_facts.BootFacts,
        judge=host.judge_boot,
        reasons=(Reason.BOOT, Reason.REBOOTED),
    ),
    Check(
        id="host.kernel",
        level=Level.QUICK,
        scope="node",
        title="what the kernel log tells of the last day",
        about="Reads the kernel log for hardware errors, processes ended for lack of memory, I/O and "
        "file system errors and hanging tasks of the last 24 hours. Unknown where it may not be "
        "read (most containers). It never blocks: the log may be about others on the same "
        "machine.",
        collect=kernel.collect,
        facts=kernel.KernelFacts,
        judge=host.judge_kernel,
        reasons=(
            Reason.KERNEL,
            Reason.KERNEL_OOM_KILL,
            Reason.KERNEL_MACHINE_CHECK,
            Reason.KERNEL_MACHINE_CHECK_CORRECTED,
            Reason.KERNEL_IO_ERROR,
            Reason.KERNEL_FILE_SYSTEM,
            Reason.KERNEL_NETWORK_FILE_SYSTEM,
            Reason.KERNEL_HUNG_TASK,
        ),
    ),
    Check(
        id="net.clock",
        level=Level.INSTANT,
        scope="node",
        title="the clock is right",
        about="What the kernel knows of its clock's synchronisation and, when a peer is named, the "
        "offset to it. 0.1 s warn, 1 s fails, less half of the round trip. It never blocks.",
        collect=clock.collect,
        facts=clock.ClockFacts,
        judge=net.judge_clock,
        reasons=(
            Reason.CLOCK_SYNCHRONISED,
            Reason.CLOCK_UNSYNCHRONISED,
            Reason.CLOCK_AGREES,
            Reason.CLOCK_OFF,
            Reason.CLOCK_WRONG,
            Reason.CLOCK_PEER_SILENT,
            Reason.CLOCK_NOT_ASKED,
        ),
    ),
    Check(
        id="sw.versions",
        level=Level.INSTANT,
        scope="node",
        title="torch, CUDA, NCCL and driver fit together",
        about="Versions from metadata, nothing is imported. A mixed installation, a driver too old for "
        "torch's CUDA and a version other than the job's warn or fail; an NCCL other than the "
        "job's on a node with a driver blocks, since NCCL does not talk to another version of "
        "itself.",
        collect=software_facts.collect,
        facts=software_facts.SoftwareFacts,
        judge=software.judge_versions,
        reasons=(
            Reason.VERSIONS,
            Reason.TORCH_NOT_HERE,
            Reason.TORCH_MIXED,
            Reason.TORCH_OLD,
            Reason.NCCL_MIXED,
            Reason.DRIVER_OLD,
            Reason.VERSION_DIFFERS,
        ),
    ),
    Check(
        id="sw.fingerprint",
        level=Level.QUICK,
        scope="node",
        title="the software is the job's",
        about="All versions that change results, as one digest, and every difference to the expected "
        "set by name.",
        collect=software_facts.collect,
        facts=software_facts.SoftwareFacts,
        judge=software.judge_fingerprint,
        reasons=(Reason.FINGERPRINT, Reason.FINGERPRINT_EQUAL, Reason.VERSION_DIFFERS),
    ),
    Check(
        id="store.mounts",
        level=Level.QUICK,
        scope="node",
        title="network mounts answer",
        about="Asks every mount that another machine or process must answer for, each in a child of its "
        "own. One that does not answer fails when checkpoints or the working folder lie on it, "
        "else it warns.",
        collect=mounts.collect,
        facts=mounts.MountsFacts,
        judge=store.judge_mounts,
        reasons=(
            Reason.NO_NETWORK_MOUNTS,
            Reason.MOUNTS_ALIVE,
            Reason.MOUNT_HUNG,
            Reason.MOUNT_ERROR,
            Reason.MOUNT_NOT_ASKED,
        ),
        deadline_s=12.0,
    ),
    Check(
        id="store.ckpt_path",
        level=Level.INSTANT,
        scope="node",
        title="checkpoints can be written and read back",
        about="Writes a file where checkpoints go, syncs, renames, lists and reads it back past the "
        "page cache, and removes it; through fsspec, so that any URL works. At instant 256 KiB, "
        "from quick on 64 MiB with rates. What would fail the first save blocks.",
        collect=store_facts.collect,
        facts=store_facts.StoreFacts,
        judge=store.judge_ckpt_path,
        reasons=(
            Reason.STORE,
            Reason.STORE_MEASURED,
            Reason.STORE_SLOW,
            Reason.STORE_TIGHT,
            Reason.STORE_READ_ONLY,
            Reason.STORE_FULL,
            Reason.STORE_NOT_PERMITTED,
            Reason.STORE_NOT_A_FOLDER,
            Reason.STORE_BACKEND_MISSING,
            Reason.STORE_UNREACHABLE,
            Reason.STORE_DIFFERS,
            Reason.STORE_NOT_LISTED,
            Reason.STORE_LEFT_BEHIND,
        ),
        lane=Lane.STORAGE,
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="cpu.gemm",
        level=Level.QUICK,
        scope="node",
        title="matrix product: right, and how fast",
        about="Best of three passes of a float32 product on all processors, and its error against "
        "double precision. The rate is compared with this node's own record only; without a "
        "record that part is skipped. A wrong product blocks, a slow one does not.",
        collect=gemm.collect,
        facts=gemm.GemmFacts,
        judge=compute.judge_gemm,
        reasons=(Reason.GEMM, Reason.GEMM_SLOW, Reason.GEMM_WRONG, Reason.NO_BASELINE),
        lane=Lane.CPU,
        threads=0,
        deadline_s=30.0,
        if_crashed=Verdict.FAIL,
    ),
    Check(
        id="num.bitwise",
        level=Level.QUICK,
        scope="node",
        title="the same work gives the same bits",
        about="Two children on two processors do the same seeded forward and backward passes, twice. "
        "Any difference is a processor that computes wrongly without saying so, and blocks.",
        collect=bitwise.collect,
        facts=bitwise.BitwiseFacts,
        judge=compute.judge_bitwise,
        reasons=(Reason.BITS_EQUAL, Reason.BITS_DIFFER),
        lane=Lane.CPU,
        deadline_s=40.0,
        if_crashed=Verdict.FAIL,
    ),
    Check(
        id="coll.intra",
        level=Level.QUICK,
        scope="node",
        title="collectives inside the node give the right values",
        about="Two processes do all_reduce and all_gather over gloo in sizes from 64 B to 16 MiB; every "
        "value is compared with what must come out. Wrong values block.",
        collect=collective.collect,
        facts=collective.CollectiveFacts,
        judge=compute.judge_collective,
        reasons=(Reason.COLLECTIVE, Reason.COLLECTIVE_WRONG, Reason.COLLECTIVE_BROKEN),
        lane=Lane.CPU,
        deadline_s=40.0,
        if_crashed=Verdict.FAIL,
    ),
)

_BY_ID = {check.id: check for check in CHECKS}


def by_id(check: str) -> Check:
    """The check of this id.

    Raises:
        UnknownCheckError: There is none.
    """
    if check not in _BY_ID:
        raise UnknownCheckError(check, known=tuple(_BY_ID))
    return _BY_ID[check]


def choose(level: Level, *, only: tuple[str, ...] = (), skip: tuple[str, ...] = ()) -> tuple[Check, ...]:
    """The checks of a run, in the order of the catalogue.

    Args:
        level: All of it and of the levels before it, unless ``only`` says which.
        only: Ids, whatever their level.
        skip: Ids to leave out.

    Raises:
        UnknownCheckError: An id that does not exist.
        UsageError: Nothing is left to run.
    """
    wanted = {by_id(check).id for check in only}
    unwanted = {by_id(check).id for check in skip}
    chosen = tuple(
        check
        for check in CHECKS
        if (check.id in wanted if wanted else level.includes(check.level)) and check.id not in unwanted
    )
    if not chosen:
        raise UsageError("no check is left to run; see --only and --skip")
    return chosen
