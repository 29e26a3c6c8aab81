"""Words of the checks of devices, links and network ports."""

from __future__ import annotations

from collections.abc import Mapping

from sanitycheck.reasons import Reason
from sanitycheck.render.texts.wording import Text

__all__ = ["DEVICES"]

_DRAIN = "drain the node"

DEVICES: Mapping[Reason, Text] = {
    Reason.GPU_MODEL_UNKNOWN: Text(
        "the table of models does not know {model}, so that nothing absolute is judged",
        "compare with other nodes of the same kind, or record a baseline here",
    ),
    Reason.NOT_SUPPORTED: Text("this device does not support the question", "nothing to do"),
    Reason.RECOVERY_NONE: Text("no device asks for a recovery ({count} asked)", "nothing to do"),
    Reason.RECOVERY_RESET: Text(
        "the driver wants a reset ({action})",
        f"{_DRAIN}, end what uses the device and reset it (nvidia-smi -r; on a board with NVSwitches all of "
        "them together)",
    ),
    Reason.RECOVERY_REBOOT: Text("the driver wants a restart of the node ({action})", f"{_DRAIN} and reboot"),
    Reason.RECOVERY_DRAIN: Text(
        "the driver wants the device emptied first ({action})",
        "let the running work end, start nothing new there, then reset the device",
    ),
    Reason.RECOVERY_UNKNOWN: Text(
        "the driver asks for something that this version does not know ({action})",
        "update nvidia-ml-py, or read it with nvidia-smi -q",
    ),
    Reason.ECC_CLEAN: Text(
        "no uncorrected errors on {count} devices, {corrected} corrected", "nothing to do"
    ),
    Reason.ECC_OFF: Text("error correction is off", "nothing to do"),
    Reason.ECC_UNCORRECTED: Text(
        "{count} memory errors could not be corrected since the driver was loaded",
        f"{_DRAIN} and reset the device; if they come back, have it replaced",
    ),
    Reason.ECC_SRAM: Text(
        "{count} uncorrected errors of on-chip memory over its life, more than {limit}",
        f"{_DRAIN} and have the board replaced",
    ),
    Reason.REMAP_CLEAN: Text(
        "no remap pending or failed on {count} devices, {rows} rows remapped", "nothing to do"
    ),
    Reason.REMAP_PENDING: Text(
        "a bad memory row waits to be remapped ({rows} remapped so far)",
        "reset the device when it is idle; that does the remap",
    ),
    Reason.REMAP_FAILED: Text(
        "a bad memory row could not be remapped ({rows} remapped so far)",
        f"{_DRAIN} and have the board replaced",
    ),
    Reason.THROTTLE_NONE: Text("no slow-down on {count} devices, at most {temperature_c} C", "nothing to do"),
    Reason.THROTTLE_HARDWARE: Text(
        "slowed down by hardware ({why}) at {temperature_c} C",
        "check cooling and power supply of this node",
    ),
    Reason.THROTTLE_THERMAL: Text(
        "slowed down for heat ({why}) at {temperature_c} C", "check cooling: fans, dust, inlet temperature"
    ),
    Reason.TEMPERATURE_HIGH: Text(
        "{temperature_c} C, it slows down at {limit_c} C", "check cooling before training here"
    ),
    Reason.GPU_FREE: Text("nobody else computes on {count} devices", "nothing to do"),
    Reason.GPU_BUSY: Text(
        "{count} other processes compute here and hold {used_bytes}: {who}",
        "find out whose they are; they take memory and time from the training",
    ),
    Reason.GPU_EXCLUSIVE: Text(
        "takes one process at a time ({mode})",
        "nvidia-smi -c DEFAULT, unless it is meant; a second process on the device cannot start",
    ),
    Reason.GPU_PROHIBITED: Text("takes no process at all ({mode})", "nvidia-smi -c DEFAULT"),
    Reason.MIG_AS_EXPECTED: Text("partitioning (MIG) is {mode} on {count} devices", "nothing to do"),
    Reason.MIG_NOT_EXPECTED: Text(
        "partitioning (MIG) is {mode}",
        "nvidia-smi -mig 0 or 1, then reset the device; or say with --mig what is meant",
    ),
    Reason.MIG_PENDING: Text(
        "partitioning (MIG) is {mode} and becomes {pending} at the next reset", "reset the device when idle"
    ),
    Reason.XID_NONE: Text("no Xid in {records} messages", "nothing to do"),
    Reason.XID_SEEN: Text("only Xids that mean nothing for the node: {codes}", "nothing to do"),
    Reason.XID_SUSPECT: Text(
        "{kind} {code}, {count} times, the last {newest_age_s} ago: {meaning}",
        "by the catalogue: {action}",
    ),
    Reason.XID_REPEATED: Text(
        "{kind} {code} again, {count} times, the last {newest_age_s} ago: {meaning}",
        "if it comes with another program too, run the level deep on this device",
    ),
    Reason.XID_ISOLATE: Text(
        "{kind} {code}, {count} times, the last {newest_age_s} ago: {meaning}",
        f"{_DRAIN}; by the catalogue: {{action}}",
    ),
    Reason.XID_RECOVERED: Text(
        "{kind} {code}, the last {newest_age_s} ago; since then the driver has said that nothing is to be "
        "done: {meaning}",
        "watch it; a second time within days means more",
    ),
    Reason.XID_UNKNOWN: Text(
        "{kind} {code}, {count} times, which the catalogue cannot judge: {meaning}",
        "look it up with the vendor; it does not condemn the node by itself",
    ),
    Reason.NVLINK_UP: Text("{active} links up on each of {count} devices", "nothing to do"),
    Reason.NVLINK_NONE: Text("no NVLink in use on {count} devices", "nothing to do"),
    Reason.NVLINK_DOWN: Text(
        "{active} of {expected} NVLinks are up",
        f"{_DRAIN}; reset the devices of the board together and restart the fabric manager; a link that "
        "stays down means a new board",
    ),
    Reason.NVLINK_ERRORS: Text(
        "links were trained anew {recoveries} times, {replays} replays since the driver was loaded",
        "see whether it grows under load; if so, have the board looked at",
    ),
    Reason.FABRIC_JOINED: Text("{count} devices have joined the fabric", "nothing to do"),
    Reason.FABRIC_JOINING: Text("still joining the fabric ({state})", "wait a minute and run it again"),
    Reason.FABRIC_NOT_JOINED: Text(
        "has not joined the fabric ({state}, {status}): CUDA on such a board answers that the system is not "
        "initialised",
        "restart the fabric manager (systemctl restart nvidia-fabricmanager) and look at its log",
    ),
    Reason.FABRIC_NO_CLIQUE: Text(
        "joined, but without clique or cluster id (clique {clique}): jobs over several nodes find too few "
        "resources",
        "check the IMEX and fabric configuration of the rack",
    ),
    Reason.PCIE_FULL: Text("generation {generation} x{width} under load on {count} devices", "nothing to do"),
    Reason.PCIE_IDLE: Text(
        "x{width}; generation {generation} while idle, which says nothing: judged under load only",
        "nothing to do",
    ),
    Reason.PCIE_SLOW: Text(
        "generation {generation} under load, card and slot can do {expected}",
        "reseat card or riser, then look at the BIOS setting of the slot; copies take a multiple of the time",
    ),
    Reason.PCIE_NARROW: Text(
        "x{width}, card and slot can do x{expected}",
        "reseat card or riser; some lanes have no contact",
    ),
    Reason.AER_CLEAN: Text(
        "no PCIe errors beyond the usual on {count} devices ({corrected} corrected)", "nothing to do"
    ),
    Reason.AER_NOT_COUNTED: Text("the kernel does not count PCIe errors here", "nothing to do"),
    Reason.AER_CORRECTED: Text(
        "{count} corrected PCIe errors since boot, more than {limit} for this speed and width",
        "watch it; reseat card or riser when the node is free",
    ),
    Reason.AER_NONFATAL: Text(
        "{count} PCIe errors since boot that lost data once", "watch it; reseat card or riser"
    ),
    Reason.AER_FATAL: Text(
        "{count} fatal PCIe errors since boot", f"{_DRAIN}; reseat the card, then replace it or the riser"
    ),
    Reason.TCP_REACHED: Text("{count} machines reached, slowest in {connect_s}", "nothing to do"),
    Reason.TCP_NAME: Text(
        "the name stands for no address: {error}", "check the spelling, DNS and /etc/hosts on this node"
    ),
    Reason.TCP_REFUSED: Text(
        "reached ({address}), but nobody listens there: {error}",
        "nothing, if the service starts later; else start it or correct the port",
    ),
    Reason.TCP_UNREACHABLE: Text(
        "not reached ({address}): {error}", "check cable, routes and firewall between the two machines"
    ),
    Reason.TCP_MTU: Text(
        "ways with different packet sizes: {sizes}",
        "set one MTU on all nodes and switches; large messages hang where small ones pass",
    ),
    Reason.RDMA_PORTS: Text("{count} ports up, {rate_gbit} Gbit/s each at least", "nothing to do"),
    Reason.RDMA_DISABLED: Text("all {count} ports are switched off on purpose", "nothing to do"),
    Reason.RDMA_DOWN: Text(
        "down ({state}, {physical})",
        "check cable and switch port; if it is off on purpose, disable the port (ibportstate … disable)",
    ),
    Reason.RDMA_SLOW: Text(
        "{rate_gbit} Gbit/s, other ports have {expected_gbit}",
        "check cable, switch port and its speed setting",
    ),
    Reason.RDMA_FEW: Text("{found} of {expected} ports are up", "find the missing ones (ibstat)"),
    Reason.RDMA_COUNTERS: Text("{count} counters, none above its limit", "nothing to do"),
    Reason.RDMA_FLAPS: Text(
        "the link went down {count} times", "change the cable, then the transceiver, then the port"
    ),
    Reason.RDMA_ERRORS: Text(
        "{count} errors ({counter})", "clean or change the cable if it grows; newer links correct many"
    ),
}
