"""Words of the engine and of the checks of the node itself."""

from __future__ import annotations

from collections.abc import Mapping

from sanitycheck.reasons import Reason
from sanitycheck.render.texts.wording import Text

__all__ = ["NODE"]

NODE: Mapping[Reason, Text] = {
    Reason.NOT_APPLICABLE: Text("does not apply here: {message}", "nothing to do"),
    Reason.NOT_IN_DRILL: Text("not part of the drill", "nothing to do"),
    Reason.TOOL_MISSING: Text(
        "could not look: {message}",
        "install or provide what is missing, or --skip this check",
    ),
    Reason.NOT_PERMITTED: Text(
        "may not look: {message}",
        "run with the permission named, or --skip this check",
    ),
    Reason.CANNOT_LOOK: Text("could not look: {message}", "see the message; --skip leaves this check out"),
    Reason.PROBE_BROKEN: Text(
        "the probe stopped at an error that it does not know: {message}",
        "report it with the output of --json; --skip leaves this check out",
    ),
    Reason.TIMED_OUT: Text(
        "no answer after {after_s}, while {phase}",
        "run it again on a quieter node or with more --timeout",
    ),
    Reason.HUNG: Text(
        "hangs: no answer after {after_s}, while {phase}",
        "what it waits for does not answer; look there before training on this node",
    ),
    Reason.STUCK_IN_KERNEL: Text(
        "hangs in the kernel and cannot be ended (pid {pid}), while {phase}",
        "the device or mount it waits for is dead; repair that or restart the node",
    ),
    Reason.CRASHED: Text(
        "the probe died of {how}, while {phase}: {message}",
        "run it again; if it dies again, the library or the hardware it used is broken",
    ),
    Reason.NO_TIME_LEFT: Text("not run: the time for the whole run was over", "give more --timeout"),
    Reason.CANCELLED: Text("not run to its end: the run was cancelled", "run it again"),
    Reason.CAPABILITIES: Text(
        "{hostname}, container: {container}; not seen from here: {not_seen}",
        "nothing to do",
    ),
    Reason.BOOT: Text("up for {uptime_s}, boot {boot_id}", "nothing to do"),
    Reason.REBOOTED: Text(
        "the node was restarted: up for {uptime_s}, boot {boot_id}",
        "find out why, unless it was planned",
    ),
    Reason.CPU_MEM: Text(
        "{cpus} processors, {available_bytes} of {total_bytes} memory available",
        "nothing to do",
    ),
    Reason.CPUS_FEW: Text(
        "{cpus} processors for {workers} workers",
        "start fewer workers here or raise the CPU limit of the container",
    ),
    Reason.MEMORY_SMALL: Text(
        "{available_bytes} of memory available (node {total_bytes}, limit of the container {limit_bytes})",
        "free memory or raise the memory limit, else the kernel ends a worker",
    ),
    Reason.LOAD_HIGH: Text(
        "load {load} on {cpus} processors",
        "see what else runs here (top); it will slow the training",
    ),
    Reason.MEMORY_ERRORS: Text(
        "{count} memory errors could not be corrected (EDAC)",
        "drain the node and have the memory module replaced",
    ),
    Reason.MEMORY_ERRORS_CORRECTED: Text(
        "{count} memory errors were corrected (EDAC), more than {limit}",
        "plan to have the memory module replaced",
    ),
    Reason.LIMITS: Text("nofile {nofile}, /dev/shm {shm_bytes}", "nothing to do"),
    Reason.NOFILE_LOW: Text(
        "{soft} open files allowed (hard limit {hard}), {wanted} are usual: many ranks or data "
        'workers get "Too many open files"',
        "ulimit -n {wanted}",
    ),
    Reason.MEMLOCK_LOW: Text(
        "{soft_bytes} of memory may be locked and there are {rdma_devices} RDMA devices: NCCL "
        "over RDMA fails to register memory",
        "ulimit -l unlimited (container: --ulimit memlock=-1)",
    ),
    Reason.SHM_MISSING: Text(
        "no /dev/shm: data workers and NCCL inside the node cannot share memory",
        "mount a tmpfs there (container: --ipc=host)",
    ),
    Reason.SHM_SMALL: Text(
        "{size_bytes}, {wanted_bytes} are wanted: data workers that hand over large batches die "
        "of SIGBUS, NCCL inside the node may fail",
        "container: --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium Memory at /dev/shm",
    ),
    Reason.SHM_FULL: Text(
        "{free_bytes} of {size_bytes} left: the next shared batch or NCCL channel may die of SIGBUS",
        "remove what ended programs left in /dev/shm",
    ),
    Reason.TASKS_FEW: Text(
        "{left} more processes or threads may be made, {wanted} are wanted",
        "raise the pids limit of the container or ulimit -u",
    ),
    Reason.DISK: Text("{volumes} file systems, least room {free_bytes} at {path}", "nothing to do"),
    Reason.DISK_LOW: Text(
        "{free_bytes} of {total_bytes} left ({used_for})",
        "free some room before logs or checkpoints fill it",
    ),
    Reason.DISK_FULL: Text(
        "full: {free_bytes} of {total_bytes} left ({used_for})",
        "free some room; writing here fails now or soon",
    ),
    Reason.INODES_LOW: Text(
        "{free} of {total} inodes left ({used_for})",
        "remove files; new ones cannot be made soon, whatever the free bytes say",
    ),
    Reason.READ_ONLY: Text("read-only ({used_for})", "mount it writable or name another folder"),
    Reason.TURNED_READ_ONLY: Text(
        "the kernel turned it read-only after an error ({used_for})",
        "drain the node, check the device and its file system (fsck)",
    ),
    Reason.FS_ERRORS: Text(
        "its file system has recorded {count} errors ({used_for})",
        "check the file system (fsck) when the node is idle",
    ),
    Reason.NO_TEMP_FOLDER: Text(
        "no folder for temporary files can be written",
        "make /tmp writable or set TMPDIR",
    ),
    Reason.KERNEL: Text("no trouble in {records} messages", "nothing to do"),
    Reason.KERNEL_OOM_KILL: Text(
        "{count} processes were ended for lack of memory, the last {newest_age_s} ago: {newest}",
        "see whose; raise the limit or use less memory",
    ),
    Reason.KERNEL_MACHINE_CHECK: Text(
        "{count} hardware errors that could not be corrected, the last {newest_age_s} ago: {newest}",
        "drain the node and have the hardware checked",
    ),
    Reason.KERNEL_MACHINE_CHECK_CORRECTED: Text(
        "{count} corrected hardware errors, the last {newest_age_s} ago: {newest}",
        "watch it; many foretell an uncorrected one",
    ),
    Reason.KERNEL_IO_ERROR: Text(
        "{count} I/O errors, the last {newest_age_s} ago: {newest}",
        "check the device (smartctl -a)",
    ),
    Reason.KERNEL_FILE_SYSTEM: Text(
        "{count} file system errors, the last {newest_age_s} ago: {newest}",
        "check the file system (fsck)",
    ),
    Reason.KERNEL_NETWORK_FILE_SYSTEM: Text(
        "{count} times a network file system did not answer, the last {newest_age_s} ago: {newest}",
        "check the server and the way to it",
    ),
    Reason.KERNEL_HUNG_TASK: Text(
        "{count} reports of tasks that hang, the last {newest_age_s} ago: {newest}",
        "see what they wait for (a mount, a device)",
    ),
    Reason.GPU_INVENTORY: Text("{count} x {model}, driver {driver}", "nothing to do"),
    Reason.GPU_NOT_EXPECTED: Text(
        "no NVIDIA device, none expected ({error})",
        "say --expect-gpus N if there should be some",
    ),
    Reason.GPU_NONE: Text(
        "no device can be seen, {expected} expected ({error})",
        "check the driver (nvidia-smi); container: --gpus all",
    ),
    Reason.GPU_MISSING: Text(
        "{found} of {expected} devices answer ({not_asked} could not be asked)",
        "find the lost one (dmesg, nvidia-smi); a restart of the node often brings it back",
    ),
    Reason.GPU_EXTRA: Text("{found} devices, {expected} expected", "check that this is the right node"),
    Reason.GPU_HIDDEN: Text(
        "CUDA_VISIBLE_DEVICES leaves {visible} of {expected} expected devices",
        "unset it or name all devices",
    ),
    Reason.GPU_MIXED: Text(
        "different models: {models}",
        "the slowest sets the pace; leave out those that differ",
    ),
    Reason.GPU_HARDWARE: Text(
        "the driver reports a broken device: {error}",
        "drain the node; reset the device or restart the node",
    ),
    Reason.GPU_NOT_PERMITTED: Text(
        "may not be asked: {error}",
        "give this user or container access to the devices",
    ),
    Reason.DRIVER_MISMATCH: Text(
        "driver library and kernel module differ ({error}): no new CUDA program can start",
        "restart the node, or reload the module, after the driver update",
    ),
    Reason.NVML_UNKNOWN_ERROR: Text(
        'NVML says "unknown error": in a container this is usually lost device access after a '
        "reload of systemd, not hardware",
        "restart the container; if it stays, run nvidia-smi on the node itself",
    ),
    Reason.NVML_ERROR: Text("NVML says {error}", "run nvidia-smi and see what it says"),
    Reason.CLOCK_SYNCHRONISED: Text("the kernel says synchronised, within {max_error_s}", "nothing to do"),
    Reason.CLOCK_UNSYNCHRONISED: Text(
        "the kernel does not know of any synchronisation",
        "run chrony or systemd-timesyncd on the node; between nodes, compare with --clock-peer",
    ),
    Reason.CLOCK_AGREES: Text("{offset_s} off {peer}, uncertain by {uncertainty_s}", "nothing to do"),
    Reason.CLOCK_OFF: Text(
        "{offset_s} off {peer} (uncertain by {uncertainty_s}), at most {limit_s} is wanted",
        "synchronise the clock (chronyc makestep): logs of nodes cannot be compared, "
        "certificates may be refused",
    ),
    Reason.CLOCK_WRONG: Text(
        "the clock is years behind ({unix_s} since 1970)",
        "set it; TLS and signed storage requests fail",
    ),
    Reason.CLOCK_PEER_SILENT: Text(
        "{peer} gave no time: {problem}",
        "check the name and that UDP gets there",
    ),
    Reason.CLOCK_NOT_ASKED: Text(
        "the kernel may not be asked: {message}",
        "compare with --clock-peer instead",
    ),
    Reason.VERSIONS: Text("python {python}, torch {torch}, nccl {nccl}", "nothing to do"),
    Reason.TORCH_NOT_HERE: Text(
        "torch is not installed for this Python ({python})",
        "run it with the Python that trains, or install torch",
    ),
    Reason.TORCH_MIXED: Text(
        "torch says {file}, its installer recorded {metadata}: two installations lie over each other",
        "pip uninstall torch until none is left, then install it once",
    ),
    Reason.TORCH_OLD: Text("torch {torch} is older than {floor}", "use torch {floor} or later"),
    Reason.NCCL_MIXED: Text(
        "nccl {nccl} is installed, torch asks for {needed}",
        "pip install --force-reinstall torch, or set the version that torch asks for",
    ),
    Reason.DRIVER_OLD: Text(
        "driver {driver} is older than CUDA {cuda} needs ({floor})",
        "update the driver, or use a torch built for an older CUDA",
    ),
    Reason.VERSION_DIFFERS: Text(
        "{package} {here}, expected {expected}",
        "install the same version on all nodes",
    ),
    Reason.FINGERPRINT: Text("recorded {digest}", "nothing to do"),
    Reason.FINGERPRINT_EQUAL: Text("{digest}, as expected", "nothing to do"),
    Reason.GEMM: Text("{gflops} GFLOP/s on {threads} threads ({library})", "nothing to do"),
    Reason.GEMM_SLOW: Text(
        "{gflops} GFLOP/s, {share} of what this node once gave ({baseline})",
        "see what else runs here, clocks and temperature; then repeat",
    ),
    Reason.GEMM_WRONG: Text(
        "a product of matrices is wrong by {relative_error} (limit {limit}, {library})",
        "do not train here; drain the node and test its processor and memory",
    ),
    Reason.NO_BASELINE: Text("nothing to compare with yet ({name})", "nothing to do"),
    Reason.BITS_EQUAL: Text("equal on processors {processors} ({library})", "nothing to do"),
    Reason.BITS_DIFFER: Text(
        "the same work gave different bits on processors {processors}: {digests}",
        "do not train here; drain the node and test its processor and memory",
    ),
    Reason.COLLECTIVE: Text(
        "values correct up to {largest_bytes}; all_reduce {all_reduce_mb_s}, all_gather {all_gather_mb_s}, "
        "all_to_all {all_to_all_mb_s} ({backend})",
        "nothing to do",
    ),
    Reason.COLLECTIVE_WRONG: Text(
        "{count} results are wrong; {first}",
        "do not train here; what ranks exchange is corrupted on the way",
    ),
    Reason.COLLECTIVE_BROKEN: Text(
        "two processes of this node could not exchange values over {backend} on {interface}: {problem}",
        "unset GLOO_SOCKET_IFNAME if it is set; check that loopback works",
    ),
    Reason.NO_NETWORK_MOUNTS: Text("no mount here needs another machine", "nothing to do"),
    Reason.MOUNTS_ALIVE: Text("{count} mounts answer", "nothing to do"),
    Reason.MOUNT_HUNG: Text(
        "does not answer within {timeout_s} s ({fstype}, needed for {needed_for})",
        "check its server and network, or unmount it (umount -l)",
    ),
    Reason.MOUNT_ERROR: Text(
        "answers with an error: {error} ({fstype}, needed for {needed_for})",
        "mount it again",
    ),
    Reason.MOUNT_NOT_ASKED: Text(
        "not asked: too many mounts ({fstype}, needed for {needed_for})",
        "nothing to do",
    ),
    Reason.STORE: Text("written, read back and removed at {tried_at}", "nothing to do"),
    Reason.STORE_MEASURED: Text("write {write_mb_s}, read {read_mb_s} at {tried_at}", "nothing to do"),
    Reason.STORE_SLOW: Text(
        "write {write_mb_s} at {tried_at}, at least {limit_mb_s} is wanted",
        "name a faster place; until then checkpoints take long to become durable",
    ),
    Reason.STORE_TIGHT: Text(
        "room for {free_bytes}, one checkpoint has {checkpoint_bytes} and the new one is written "
        "before the old one goes",
        "free some room or keep fewer checkpoints",
    ),
    Reason.STORE_READ_ONLY: Text(
        "read-only at {tried_at}, found while {during}: {error}",
        "mount it writable or name another path",
    ),
    Reason.STORE_FULL: Text(
        "no space at {tried_at}, found while {during}: {error}",
        "free some room (also inodes and quota) or name another path",
    ),
    Reason.STORE_NOT_PERMITTED: Text(
        "may not be used by this user at {tried_at}, found while {during}: {error}",
        "change the owner or mode, or the credentials",
    ),
    Reason.STORE_NOT_A_FOLDER: Text("{tried_at} is not a folder", "name another path or move the file away"),
    Reason.STORE_BACKEND_MISSING: Text(
        "no fsspec backend for {url}: {error}",
        "install it (s3fs, gcsfs, adlfs, ...) or name another path",
    ),
    Reason.STORE_UNREACHABLE: Text(
        "could not be used while {during}: {error}",
        "check the path, the network and the credentials",
    ),
    Reason.STORE_DIFFERS: Text(
        "what was read back is not what was written, at {tried_at}",
        "do not store checkpoints there; have the device or mount checked",
    ),
    Reason.STORE_NOT_LISTED: Text(
        "a written file is not listed at {tried_at}: {error}",
        "checkpoints could not be found again; name a place that lists what it holds",
    ),
    Reason.STORE_LEFT_BEHIND: Text("the probe could not remove {path}", "remove it by hand"),
}
