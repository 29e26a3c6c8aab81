"""Checks of the machine itself, its software, its clock and its storage."""

from __future__ import annotations

from sanitycheck.check import Check, Lane
from sanitycheck.checks import host, net, software, store
from sanitycheck.facts import capabilities, clock, disk, kernel, limits, mounts
from sanitycheck.facts import host as host_facts
from sanitycheck.facts import software as software_facts
from sanitycheck.facts import store as store_facts
from sanitycheck.reasons import Reason
from sanitycheck.result import Level, Verdict

__all__ = ["NODE_CHECKS"]

NODE_CHECKS: tuple[Check, ...] = (
    Check(
        id="env.capabilities",
        level=Level.QUICK,
        scope="node",
        title="what can be seen from here",
        about="Which tools, devices and kernel interfaces this process can see, and in what container "
        "it runs. It judges nothing; it tells how much the other verdicts are worth.",
        rule="Always passes.",
        source="sanitycheck's own",
        collect=capabilities.collect,
        facts=capabilities.CapabilitiesFacts,
        judge=host.judge_capabilities,
        reasons=(Reason.CAPABILITIES,),
    ),
    Check(
        id="host.cpu_mem",
        level=Level.QUICK,
        scope="node",
        title="processors, memory, memory errors, load",
        about="Processors and memory as kernel and control group grant them, load by others, and the "
        "kernel's count of memory errors (EDAC). An uncorrected error fails; the rest warns.",
        rule="Fewer processors than workers, less than 1 GiB available, a load above 2 per "
        "processor, more than 100 corrected memory errors warn; an uncorrected one fails.",
        source="EDAC (kernel documentation, RAS); limits are the field's (NHC, gpud)",
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
        rule="nofile below 1024, limited memlock with RDMA devices, /dev/shm missing, below 1 GiB "
        "or with less than 64 MiB left, fewer than 64 tasks left per worker: each warns.",
        source="NCCL and PyTorch documentation on shared memory; Docker's default of 64 MiB",
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
        rule="Below 10 % and 20 GiB free warns, below 100 MiB fails; below 1 % of the inodes "
        "warns; turned read-only by the kernel fails; no folder for temporary files fails and"
        " blocks.",
        source="Field: 80-90 % used or 500 MB left (gcm, gpud); kernel documentation of ext4 for "
        "emergency read-only",
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
        rule="Another boot than the recorded one warns.",
        source="random(4), boot_id",
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
        rule="Hardware errors that were not corrected fail; the rest warns. Only messages of the "
        "last 24 hours count.",
        source="Kernel messages by our own patterns (mce, EDAC, ext4, XFS, NFS, hung task)",
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
        rule="An offset to the peer above 0.1 s warns, above 1 s fails, each less half the round "
        "trip; a clock before 2024 fails.",
        source="RFC 5905 (SNTP); adjtimex(2)",
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
        rule="A mixed installation, a driver older than torch's CUDA needs, torch older than 2.6 "
        "warn; another version than the job's fails; another NCCL than the job's blocks on a "
        "node with a driver.",
        source="CUDA release notes, table of minor version compatibility; PyTorch package metadata",
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
        rule="Every version that differs from the expected set fails, by name.",
        source="Field: mixed drivers in one fleet are a common cause of hangs",
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
        rule="No answer within 5 s fails where the run needs the mount, else warns.",
        source="Field: a dead mount hangs every program that touches it (NHC)",
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
        rule="Anything that would fail the first save blocks; below 30 MB/s warns; room for less "
        "than one checkpoint fails, for less than two warns.",
        source="sanitycheck's own; no other checker that we know of tries the checkpoint path",
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
)
