"""Links of NVIDIA devices: ``link.nvlink``, ``link.fabric``, ``link.pcie``, ``link.pcie_aer``.

A PCIe link falls back to generation 1 when idle, so its generation means something only under load: the probe
of ``link.pcie`` copies to each device while it looks, where torch is there. What a slot can do is the minimum
over all bridges on the way (``max_link_speed`` and ``max_link_width`` in sysfs), not the card's own maximum.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref
from dataclasses import dataclass
from typing import Any

from sanitycheck.facts.nvml import Device, Session, start_nvml, text_of
from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request

__all__ = [
    "AerDevice",
    "AerFacts",
    "FabricDevice",
    "FabricFacts",
    "NvlinkDevice",
    "NvlinkFacts",
    "PcieDevice",
    "PcieFacts",
    "collect_aer",
    "collect_fabric",
    "collect_nvlink",
    "collect_pcie",
    "generation_of",
    "parse_aer",
    "path_limits",
    "sysfs_address",
]

PCI_DEVICES = "/sys/bus/pci/devices"
LINKS_MAX = 18
LOAD_BYTES = 64 << 20
LOAD_S_MAX = 4.0
SAMPLES = 5
SAMPLE_GAP_S = 0.2
GT_S_OF_GENERATION = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0, 6: 64.0}
_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkDevice(Device):
    """NVLinks of one device; counters since the driver was loaded.

    Attributes:
        active: Links that are up.
        inactive: Links that the device has and that are down.
        version: Generation of the links as NVML numbers it; 0: not told.
        crc_errors: Corrected by sending again; a few are normal.
        recoveries: The link was trained anew.
        symbol_errors: NVLink 5 and later only; not zero on healthy links.
    """

    active: int = 18
    inactive: int = 0
    version: int = 0
    crc_errors: int = 0
    replays: int = 0
    recoveries: int = 0
    symbol_errors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NvlinkFacts:
    """NVLinks of each device."""

    init_error: str = ""
    devices: tuple[NvlinkDevice, ...] = (NvlinkDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricDevice(Device):
    """How far a device has joined the NVSwitch fabric.

    Attributes:
        state: ``not_supported``, ``not_started``, ``in_progress`` or ``completed``.
        status: Name of NVML's result of joining.
        clique: 0 outside a multi-node fabric.
        cluster: Whether the cluster's id is set.
    """

    state: str = "completed"
    status: str = "SUCCESS"
    clique: int = 0
    cluster: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FabricFacts:
    """Fabric state of each device."""

    init_error: str = ""
    devices: tuple[FabricDevice, ...] = (FabricDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieDevice(Device):
    """The PCIe link of one device; 0 where nobody tells.

    Attributes:
        generation: The best seen while looking.
        path_generation: What the slot and every bridge above it can do.
        loaded: Data went over the link while looking.
    """

    generation: int = 5
    width: int = 16
    card_generation: int = 5
    card_width: int = 16
    path_generation: int = 5
    path_width: int = 16
    loaded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PcieFacts:
    """PCIe link of each device."""

    init_error: str = ""
    devices: tuple[PcieDevice, ...] = (PcieDevice(),)


@dataclass(frozen=True, slots=True, kw_only=True)
class AerDevice(Device):
    """PCIe errors of one device since boot, as the kernel counts them; None where it does not."""

    corrected: int | None = 0
    nonfatal: int | None = 0
    fatal: int | None = 0
    generation: int = 5
    width: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AerFacts:
    """PCIe errors of each device."""

    init_error: str = ""
    uptime_s: float = 86_400.0
    devices: tuple[AerDevice, ...] = (AerDevice(),)


def generation_of(speed: str) -> int:
    """PCIe generation of sysfs's ``16.0 GT/s PCIe``; 0 if it says something else."""
    head = speed.split(" ", 1)[0]
    try:
        gt_s = float(head)
    except ValueError:
        return 0
    return max((gen for gen, rate in GT_S_OF_GENERATION.items() if rate <= gt_s), default=0)


def sysfs_address(bus_id: str) -> str:
    """NVML's ``00000000:3B:00.0`` as sysfs writes it."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def path_limits(address: str, *, root: str = PCI_DEVICES) -> tuple[int, int]:
    """(generation, width) that the whole way from the root port allows; 0 where nobody tells."""
    place = os.path.realpath(os.path.join(root, address))
    generations, widths = [], []
    while os.path.exists(os.path.join(place, "vendor")):
        generation = generation_of((read_text(os.path.join(place, "max_link_speed")) or "").strip())
        width = (read_text(os.path.join(place, "max_link_width")) or "").strip()
        if generation:
            generations.append(generation)
        if width.isdigit() and 0 < int(width) <= 32:  # some bridges inside a chip say 255 or 0
            widths.append(int(width))
        place = os.path.dirname(place)
    return min(generations, default=0), min(widths, default=0)


def parse_aer(text: str | None) -> int | None:
    """The total of ``aer_dev_correctable`` and the like (Documentation/ABI: sysfs-bus-pci-devices-aer)."""
    for line in (text or "").splitlines():
        name, _, value = line.strip().rpartition(" ")
        if name.startswith("TOTAL_ERR") and value.isdigit():
            return int(value)
    return None


def _address(session: Session[Any], handle: Any) -> str:
    info, error = session.ask("nvmlDeviceGetPciInfo", handle)
    return "" if error else sysfs_address(text_of(info.busId))


def collect_nvlink(request: Request) -> NvlinkFacts:
    """Ask every link of every device."""
    session, error = start_nvml(request)
    if session is None:
        return NvlinkFacts(init_error=error, devices=())

    def look(handle: Any, identity: Any) -> NvlinkDevice:
        nvml = session.nvml
        active = inactive = version = 0
        refused = ""
        for link in range(LINKS_MAX):
            state, problem = session.ask("nvmlDeviceGetNvLinkState", handle, link)
            if problem:
                if problem not in ("INVALID_ARGUMENT", "NOT_SUPPORTED"):
                    refused = problem
                continue
            active, inactive = active + bool(state), inactive + (not state)
            if state:
                version = max(version, session.ask("nvmlDeviceGetNvLinkVersion", handle, link)[0] or 0)

        def count(name: str) -> int:
            number = getattr(nvml, name, None)
            return 0 if number is None else session.field(handle, number)[0] or 0

        return NvlinkDevice(
            **identity,
            refused=refused,
            active=active,
            inactive=inactive,
            version=version,
            crc_errors=count("NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
            replays=count("NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
            recoveries=count("NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
            symbol_errors=count("NVML_FI_DEV_NVLINK_COUNT_SYMBOL_ERRORS"),
        )

    return NvlinkFacts(devices=session.devices(look, NvlinkDevice))


def collect_fabric(request: Request) -> FabricFacts:
    """Ask how far each device has joined the fabric."""
    session, error = start_nvml(request)
    if session is None:
        return FabricFacts(init_error=error, devices=())

    def look(handle: Any, identity: Any) -> FabricDevice:
        nvml = session.nvml
        kind = getattr(nvml, "c_nvmlGpuFabricInfoV_t", None) or getattr(nvml, "c_nvmlGpuFabricInfo_t", None)
        if kind is None:
            return FabricDevice(**identity, refused="NOT_SUPPORTED")
        info = kind()
        name = "nvmlDeviceGetGpuFabricInfoV" if hasattr(info, "version") else "nvmlDeviceGetGpuFabricInfo"
        _, problem = session.ask(name, handle, byref(info))
        if problem:
            return FabricDevice(**identity, refused=problem)
        status = "SUCCESS" if info.status == 0 else f"CODE_{info.status}"
        return FabricDevice(
            **identity,
            state=_FABRIC_STATES.get(int(info.state), f"state {info.state}"),
            status=status,
            clique=int(info.cliqueId),
            cluster=any(info.clusterUuid),
        )

    return FabricFacts(devices=session.devices(look, FabricDevice))


@contextmanager
def _load(index: int) -> Iterator[bool]:
    """Copies to the device in a thread for as long as the block runs; gives False where nothing can copy."""
    try:
        import torch
    except ImportError:
        yield False
        return
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        yield False
        return
    host = torch.empty(LOAD_BYTES, dtype=torch.uint8).pin_memory()
    there = torch.empty(LOAD_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
    stop, ends = threading.Event(), time.monotonic() + LOAD_S_MAX

    def copy() -> None:
        while not stop.is_set() and time.monotonic() < ends:
            there.copy_(host, non_blocking=True)
            torch.cuda.synchronize(index)

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    try:
        yield True
    finally:
        stop.set()
        copying.join(LOAD_S_MAX)


def collect_pcie(request: Request) -> PcieFacts:
    """Look at each link while data goes over it."""
    session, error = start_nvml(request)
    if session is None:
        return PcieFacts(init_error=error, devices=())

    def look(handle: Any, identity: Any) -> PcieDevice:
        generation = width = 0
        request.tell(f"copying to device {identity['index']}")
        with _load(identity["index"]) as loaded:
            for _ in range(SAMPLES if loaded else 1):
                now, problem = session.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle)
                if problem:
                    return PcieDevice(**identity, refused=problem)
                generation = max(generation, int(now))
                width = max(width, int(session.ask("nvmlDeviceGetCurrPcieLinkWidth", handle)[0] or 0))
                if loaded:
                    time.sleep(SAMPLE_GAP_S)
        path_generation, path_width = path_limits(_address(session, handle))
        return PcieDevice(
            **identity,
            generation=generation,
            width=width,
            card_generation=int(session.ask("nvmlDeviceGetGpuMaxPcieLinkGeneration", handle)[0] or 0),
            card_width=int(session.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)[0] or 0),
            path_generation=path_generation,
            path_width=path_width,
            loaded=loaded,
        )

    return PcieFacts(devices=session.devices(look, PcieDevice))


def collect_aer(request: Request) -> AerFacts:
    """Read the kernel's error counts of each device."""
    session, error = start_nvml(request)
    uptime_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    if session is None:
        return AerFacts(init_error=error, uptime_s=uptime_s, devices=())

    def look(handle: Any, identity: Any) -> AerDevice:
        place = os.path.join(PCI_DEVICES, _address(session, handle))

        def total(name: str) -> int | None:
            return parse_aer(read_text(os.path.join(place, name)))

        return AerDevice(
            **identity,
            corrected=total("aer_dev_correctable"),
            nonfatal=total("aer_dev_nonfatal"),
            fatal=total("aer_dev_fatal"),
            generation=int(session.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)[0] or 0),
            width=int(session.ask("nvmlDeviceGetMaxPcieLinkWidth", handle)[0] or 0),
        )

    return AerFacts(uptime_s=uptime_s, devices=session.devices(look, AerDevice))
