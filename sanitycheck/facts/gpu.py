"""Which NVIDIA devices there are: ``gpu.inventory``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sanitycheck.facts.nvml import error_name, open_session, pci_gpus, text_of
from sanitycheck.facts.request import Request

__all__ = ["DeviceFacts", "GpuFacts", "collect", "parse_visible", "pci_gpus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """One device; ``error`` is the name of NVML's error where it could not be asked."""

    index: int = 0
    uuid: str = ""
    name: str = ""
    memory_bytes: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What NVML says.

    Attributes:
        init_error: Name of the error NVML starts with; empty when it started.
        visible: How many devices ``CUDA_VISIBLE_DEVICES`` leaves; None when it is not set.
        pci_devices: NVIDIA display devices on the bus that the NVIDIA driver has taken.
    """

    init_error: str = ""
    driver: str = ""
    devices: tuple[DeviceFacts, ...] = ()
    visible: int | None = None
    pci_devices: int = 0


def parse_visible(value: str | None) -> int | None:
    """How many devices ``CUDA_VISIBLE_DEVICES`` leaves; CUDA stops at the first entry that is none."""
    if value is None:
        return None
    count = 0
    for entry in (part.strip() for part in value.split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            break
        count += 1
    return count


def _device(nvml: Any, index: int) -> DeviceFacts:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = text_of(nvml.nvmlDeviceGetUUID(handle))
        name = text_of(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return DeviceFacts(index=index, error=error_name(nvml, error))
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        name_of = error_name(nvml, error)
        # Devices that share the host's memory do not support the question.
        return DeviceFacts(
            index=index, uuid=uuid, name=name, error="" if name_of == "NOT_SUPPORTED" else name_of
        )
    return DeviceFacts(index=index, uuid=uuid, name=name, memory_bytes=memory)


def collect(request: Request) -> GpuFacts:
    """Start NVML and ask every device who it is."""
    visible = parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    session, error = open_session(request)
    if session is None:
        return GpuFacts(init_error=error, visible=visible, pci_devices=pci_gpus())
    nvml = session.nvml
    try:
        request.tell("counting devices")
        driver = text_of(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            request.tell(f"asking device {index}")
            devices.append(_device(nvml, index))
    except nvml.NVMLError as problem:
        return GpuFacts(init_error=error_name(nvml, problem), visible=visible, pci_devices=pci_gpus())
    return GpuFacts(driver=driver, devices=tuple(devices), visible=visible, pci_devices=pci_gpus())
