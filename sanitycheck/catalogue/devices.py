"""Checks of NVIDIA devices and their links that look rather than measure."""

from __future__ import annotations

from sanitycheck.check import Check, Lane
from sanitycheck.checks import devices as device_rules
from sanitycheck.checks import gpu, perf
from sanitycheck.checks import links as link_rules
from sanitycheck.checks import xid as xid_rules
from sanitycheck.checks.devices import DEVICE_REASONS
from sanitycheck.facts import cuda, devices, links, xid
from sanitycheck.facts import gpu as inventory
from sanitycheck.reasons import Reason
from sanitycheck.result import Level, Verdict

__all__ = ["DEVICE_CHECKS"]

DEVICE_CHECKS: tuple[Check, ...] = (
    Check(
        id="gpu.inventory",
        level=Level.INSTANT,
        scope="node",
        title="NVIDIA devices are there and answer",
        about="Asks NVML for every device. Without --expect-gpus a machine that has none skips this; "
        "with it, fewer devices than expected fail and block. A driver that names a hardware "
        "error fails; a missing permission or an unknown error in a container does not say "
        "anything about the hardware and is unknown.",
        rule="Fewer devices than --expect-gpus fail and block; a device that reports a hardware "
        "error fails; more, or different models, warn.",
        source="NVML error codes (NVML API reference); nvidia-container-toolkit#48 for the unknown "
        "error in containers",
        collect=inventory.collect,
        facts=inventory.GpuFacts,
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
        id="gpu.recovery_action",
        level=Level.QUICK,
        scope="gpu",
        title="no device waits for a recovery",
        about="The driver's own word on what each device needs: nothing, a reset, to be emptied, a "
        "restart of the node. Readable without the kernel log.",
        rule="A reset or restart that the driver asks for fails and blocks; to be emptied of peers "
        "fails; to be reset when idle warns; a value without a name here is unknown.",
        source="NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, drivers from 570 on; values are named by the "
        "binding, since the meaning of 5 changed between versions",
        collect=devices.collect_recovery,
        facts=devices.RecoveryFacts,
        judge=device_rules.judge_recovery,
        reasons=(
            Reason.RECOVERY_NONE,
            Reason.RECOVERY_RESET,
            Reason.RECOVERY_REBOOT,
            Reason.RECOVERY_DRAIN,
            Reason.RECOVERY_UNKNOWN,
            *DEVICE_REASONS,
        ),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="gpu.context",
        level=Level.QUICK,
        scope="gpu",
        title="a program can start on each device",
        about="Makes a context on every device, takes 256 MiB, writes and reads them, each device in a "
        "child of its own. What the driver's counters do not show, this does.",
        rule="An error of CUDA or a byte that comes back wrong fails and blocks.",
        source="Field: nearly every checker that runs before jobs does the same (DCGM, SuperBench, DLRover)",
        collect=cuda.collect_context,
        facts=cuda.ContextFacts,
        judge=perf.judge_context,
        reasons=(Reason.CONTEXT_MADE, Reason.CONTEXT_FAILED, Reason.CONTEXT_WRONG, *DEVICE_REASONS),
        lane=Lane.DEVICE,
        deadline_s=45.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="gpu.ecc",
        level=Level.QUICK,
        scope="gpu",
        title="no uncorrected memory errors",
        about="Counts of memory errors: since the driver was loaded, and over the life of the board for"
        " its on-chip memory.",
        rule="Any uncorrected error since the last load fails; more than 4 in on-chip memory over the "
        "life, or the driver's own threshold, fails. Without error correction it is skipped.",
        source="NVIDIA GPU memory error management; the vendor takes boards back above the threshold",
        collect=devices.collect_ecc,
        facts=devices.EccFacts,
        judge=device_rules.judge_ecc,
        reasons=(Reason.ECC_CLEAN, Reason.ECC_OFF, Reason.ECC_UNCORRECTED, Reason.ECC_SRAM, *DEVICE_REASONS),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="gpu.remap",
        level=Level.QUICK,
        scope="gpu",
        title="no row of memory waits for repair",
        about="Bad rows of device memory are replaced by spare ones at the next reset; the driver says "
        "whether one waits, and whether one could not be replaced.",
        rule="A pending and a failed remap fail.",
        source="NVIDIA GPU memory error management; NVML, nvmlDeviceGetRemappedRows",
        collect=devices.collect_remap,
        facts=devices.RemapFacts,
        judge=device_rules.judge_remap,
        reasons=(Reason.REMAP_CLEAN, Reason.REMAP_PENDING, Reason.REMAP_FAILED, *DEVICE_REASONS),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="gpu.throttle",
        level=Level.QUICK,
        scope="gpu",
        title="no device is slowed down",
        about="Why the clocks are lower than they could be, and the temperature against the point where"
        " the device slows itself down.",
        rule="Slow-down by hardware (heat, power brake) fails, by software for heat warns; a power cap"
        " under load is normal.",
        source="NVML API reference, clocks event reasons",
        collect=devices.collect_throttle,
        facts=devices.ThrottleFacts,
        judge=device_rules.judge_throttle,
        reasons=(
            Reason.THROTTLE_NONE,
            Reason.THROTTLE_HARDWARE,
            Reason.THROTTLE_THERMAL,
            Reason.TEMPERATURE_HIGH,
            *DEVICE_REASONS,
        ),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="gpu.processes",
        level=Level.QUICK,
        scope="gpu",
        title="nobody else computes on the devices",
        about="Lists the processes that compute on each device, other than those of whoever asked, and "
        "the compute mode. Nobody is ended.",
        rule="A foreign process fails, and blocks where the device takes one process only; exclusive "
        "mode alone warns; a device that takes nobody fails and blocks.",
        source="Field: left-over processes are the most frequent reason for running out of memory at the"
        " start",
        collect=devices.collect_processes,
        facts=devices.ProcessFacts,
        judge=device_rules.judge_processes,
        reasons=(
            Reason.GPU_FREE,
            Reason.GPU_BUSY,
            Reason.GPU_EXCLUSIVE,
            Reason.GPU_PROHIBITED,
            *DEVICE_REASONS,
        ),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="gpu.mig",
        level=Level.QUICK,
        scope="gpu",
        title="partitioning is as meant",
        about="Whether devices are partitioned (MIG), now and after the next reset. Collectives between"
        " parts of one device do not work.",
        rule="Another mode than the one given with --mig fails; partitioned without being asked for "
        "warns; a change that waits for a reset warns.",
        source="NVIDIA MIG user guide",
        collect=devices.collect_mig,
        facts=devices.MigFacts,
        judge=device_rules.judge_mig,
        reasons=(Reason.MIG_AS_EXPECTED, Reason.MIG_NOT_EXPECTED, Reason.MIG_PENDING, *DEVICE_REASONS),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="gpu.xid_recent",
        level=Level.QUICK,
        scope="gpu",
        title="what the driver wrote into the kernel log",
        about="Xid and SXid messages since the last good run, or of the last day, each judged by a "
        "catalogue of 122 codes: a program's own error, a device to watch, a node to leave.",
        rule="A code whose action takes the node out of service fails, unless the driver has said "
        "since that nothing is to be done; one to watch warns, and so does a program's error that"
        " comes again on one device; a code that is not in the catalogue is unknown.",
        source="NVIDIA Xid catalogue (public spreadsheet, October 2025); "
        "sanitycheck/data/xid_catalog.yaml names every source",
        collect=xid.collect,
        facts=xid.XidFacts,
        judge=xid_rules.judge_xid,
        reasons=(
            Reason.XID_NONE,
            Reason.XID_SEEN,
            Reason.XID_SUSPECT,
            Reason.XID_REPEATED,
            Reason.XID_ISOLATE,
            Reason.XID_RECOVERED,
            Reason.XID_UNKNOWN,
        ),
        deadline_s=10.0,
        if_hung=Verdict.UNKNOWN,
    ),
    Check(
        id="link.nvlink",
        level=Level.QUICK,
        scope="link",
        title="all NVLinks are up",
        about="Counts active links of every device, and how often they were trained anew.",
        rule="Fewer active links than the board has fail. A part that is linked by bridges may have "
        "none; a single device may have none; an unknown model is compared with its siblings. "
        "Links trained anew warn; symbol errors of NVLink 5 are normal.",
        source="gpu_specs.yaml; NVSentinel#1481 for parts without bridge",
        collect=links.collect_nvlink,
        facts=links.NvlinkFacts,
        judge=link_rules.judge_nvlink,
        reasons=(
            Reason.NVLINK_UP,
            Reason.NVLINK_NONE,
            Reason.NVLINK_DOWN,
            Reason.NVLINK_ERRORS,
            Reason.GPU_MODEL_UNKNOWN,
            *DEVICE_REASONS,
        ),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="link.fabric",
        level=Level.QUICK,
        scope="link",
        title="devices have joined the fabric",
        about="On boards with NVSwitches every device has to join the fabric before CUDA works, on "
        "racks also a clique and a cluster.",
        rule="Anything but completed with success fails; still joining is unknown; on a multi-node "
        "fabric a missing clique or cluster fails.",
        source="NVML, nvmlDeviceGetGpuFabricInfoV; azhpc-images PR 506",
        collect=links.collect_fabric,
        facts=links.FabricFacts,
        judge=link_rules.judge_fabric,
        reasons=(
            Reason.FABRIC_JOINED,
            Reason.FABRIC_JOINING,
            Reason.FABRIC_NOT_JOINED,
            Reason.FABRIC_NO_CLIQUE,
            *DEVICE_REASONS,
        ),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="link.pcie",
        level=Level.STANDARD,
        scope="link",
        title="PCIe links run at full speed and width",
        about="Generation and width of each link while data goes over it, against the least of what "
        "card, slot and every bridge on the way can do. An idle link falls back to generation 1.",
        rule="A narrower link fails always, a slower one only under load.",
        source="PCI Express base specification; sichek PR 49 and 122, rtx6kpro PR 88",
        collect=links.collect_pcie,
        facts=links.PcieFacts,
        judge=link_rules.judge_pcie,
        reasons=(Reason.PCIE_FULL, Reason.PCIE_IDLE, Reason.PCIE_SLOW, Reason.PCIE_NARROW, *DEVICE_REASONS),
        lane=Lane.DEVICE,
        deadline_s=90.0,
        if_hung=Verdict.FAIL,
    ),
    Check(
        id="link.pcie_aer",
        level=Level.QUICK,
        scope="link",
        title="few PCIe errors",
        about="PCIe errors that the kernel has counted since boot.",
        rule="A fatal one fails, one that lost data warns; corrected ones warn above ten times the "
        "rate that DCGM expects of a healthy link of this speed and width.",
        source="Kernel documentation of PCI AER; DCGM#184 for the rates",
        collect=links.collect_aer,
        facts=links.AerFacts,
        judge=link_rules.judge_aer,
        reasons=(
            Reason.AER_CLEAN,
            Reason.AER_NOT_COUNTED,
            Reason.AER_CORRECTED,
            Reason.AER_NONFATAL,
            Reason.AER_FATAL,
            *DEVICE_REASONS,
        ),
        deadline_s=30.0,
        if_hung=Verdict.FAIL,
    ),
)
