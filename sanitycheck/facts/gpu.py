"""NVIDIA devices through NVML: ``gpu.inventory``.

NVML's errors are kept by name, so that the judgement can tell a broken device from a missing driver, from a
missing permission, and from the "unknown error" that a container gets after its device permissions were
taken away by a reload of systemd (which is no hardware fault: nvidia-container-toolkit#48).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sanitycheck.errors import ToolMissingError
from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request

__all__ = ["DeviceFacts", "GpuFacts", "collect", "parse_visible", "pci_gpus"]

PCI_DEVICES = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")


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


def pci_gpus(root: str = PCI_DEVICES) -> int:
    """NVIDIA display devices that are bound to the NVIDIA driver (one given to a virtual machine is not)."""
    count = 0
    for entry in os.listdir(root) if os.path.isdir(root) else ():
        place = os.path.join(root, entry)
        vendor = (read_text(os.path.join(place, "vendor")) or "").strip()
        kind = (read_text(os.path.join(place, "class")) or "")[:6]
        driver = os.path.basename(os.path.realpath(os.path.join(place, "driver")))
        count += vendor == _NVIDIA and kind in _DISPLAY_CLASSES and driver == "nvidia"
    return count


def _name_of(nvml: Any, error: Exception) -> str:
    """``GPU_IS_LOST`` for the error of that name."""
    value = getattr(error, "value", None)
    for name in dir(nvml):
        if name.startswith("NVML_ERROR_") and getattr(nvml, name) == value:
            return name.removeprefix("NVML_ERROR_")
    return f"CODE_{value}"


def _text(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _device(nvml: Any, index: int) -> DeviceFacts:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        name = _text(nvml.nvmlDeviceGetName(handle))
    except nvml.NVMLError as error:
        return DeviceFacts(index=index, error=_name_of(nvml, error))
    try:
        memory = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError as error:
        name_of = _name_of(nvml, error)
        # Devices that share the host's memory do not support the question.
        return DeviceFacts(
            index=index, uuid=uuid, name=name, error="" if name_of == "NOT_SUPPORTED" else name_of
        )
    return DeviceFacts(index=index, uuid=uuid, name=name, memory_bytes=memory)


def collect(request: Request) -> GpuFacts:
    """Start NVML and ask every device who it is."""
    visible = parse_visible(os.environ.get("CUDA_VISIBLE_DEVICES"))
    try:
        import pynvml as nvml
    except ImportError as error:
        raise ToolMissingError("the Python package nvidia-ml-py is not installed") from error
    request.tell("starting NVML")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return GpuFacts(init_error=_name_of(nvml, error), visible=visible, pci_devices=pci_gpus())
    try:
        request.tell("counting devices")
        driver = _text(nvml.nvmlSystemGetDriverVersion())
        devices = []
        for index in range(nvml.nvmlDeviceGetCount()):
            request.tell(f"asking device {index}")
            devices.append(_device(nvml, index))
    except nvml.NVMLError as error:
        return GpuFacts(init_error=_name_of(nvml, error), visible=visible, pci_devices=pci_gpus())
    return GpuFacts(driver=driver, devices=tuple(devices), visible=visible, pci_devices=pci_gpus())
