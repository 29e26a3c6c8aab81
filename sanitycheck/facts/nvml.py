"""NVML as the probes use it: through nvidia-ml-py only, every error kept by its name.

Errors are facts here: the judgement tells a broken device from a missing driver, from a missing permission,
and from the "unknown error" that a container gets after its device permissions were taken away by a reload
of systemd (which is no hardware fault: nvidia-container-toolkit#48). A call that hangs, hangs this child
alone; before each device the probe says which one it asks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sanitycheck.errors import ToolMissingError
from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request

__all__ = [
    "NO_DEVICE",
    "Device",
    "Session",
    "error_name",
    "may_have_devices",
    "open_session",
    "pci_gpus",
    "start_nvml",
    "text_of",
]

T = TypeVar("T")
NO_DEVICE = "NOT_FOUND"
DEVICE_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Of the driver, and of the one that Windows lends to its Linux guests, where the bus shows nothing."""
PCI_DEVICES = "/sys/bus/pci/devices"
_NVIDIA = "0x10de"
_DISPLAY_CLASSES = ("0x0300", "0x0302")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Who a device is; ``error`` is the name of NVML's error where it could not be asked at all.

    A check's own question may fail where the device as such answers: that error stands in ``refused``.
    """

    index: int = 0
    uuid: str = "GPU-0"
    name: str = "NVIDIA H100 80GB HBM3"
    error: str = ""
    refused: str = ""


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


def may_have_devices() -> bool:
    """Whether NVIDIA devices can be here at all; far cheaper than importing what could use them."""
    return pci_gpus() > 0 or any(os.path.exists(path) for path in DEVICE_FILES)


def error_name(nvml: Any, error: Exception) -> str:
    """``GPU_IS_LOST`` for the error of that name."""
    value = getattr(error, "value", None)
    for name in dir(nvml):
        if name.startswith("NVML_ERROR_") and getattr(nvml, name) == value:
            return name.removeprefix("NVML_ERROR_")
    return f"CODE_{value}"


def text_of(value: str | bytes) -> str:
    """NVML's strings are bytes in older bindings."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


class Session(Generic[T]):
    """NVML, started; :meth:`devices` asks every device one question."""

    def __init__(self, nvml: Any, request: Request) -> None:
        self.nvml = nvml
        self._request = request
        # No error of NVML's own, and not in every binding.
        self._mismatch: type[Exception] = getattr(nvml, "NVMLLibraryMismatchError", AttributeError)

    def ask(self, function: str, *args: Any) -> tuple[Any, str]:
        """(answer, "") or (None, name of the error).

        What the library or the binding lacks, or the two know in different versions, is NOT_SUPPORTED.
        """
        try:
            return getattr(self.nvml, function)(*args), ""
        except (AttributeError, self._mismatch):
            return None, "NOT_SUPPORTED"
        except self.nvml.NVMLError as error:
            name = error_name(self.nvml, error)
            return None, "NOT_SUPPORTED" if name == "FUNCTION_NOT_FOUND" else name

    def field(self, handle: Any, number: int) -> tuple[int | None, str]:
        """One field value as an integer."""
        values, error = self.ask("nvmlDeviceGetFieldValues", handle, [number])
        if error:
            return None, error
        if values[0].nvmlReturn != 0:
            return None, error_name(self.nvml, self.nvml.NVMLError(values[0].nvmlReturn))
        kinds = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal"}
        return int(getattr(values[0].value, kinds.get(values[0].valueType, "uiVal"))), ""

    def devices(self, look: Callable[[Any, Mapping[str, Any]], T], lost: Callable[..., T]) -> tuple[T, ...]:
        """``look(handle, identity)`` for every device that answers, ``lost(**identity)`` for the others."""
        count, error = self.ask("nvmlDeviceGetCount")
        if error:
            return ()
        found = []
        for index in range(count):
            self._request.tell(f"asking device {index}")
            handle, error = self.ask("nvmlDeviceGetHandleByIndex", index)
            uuid, problem = self.ask("nvmlDeviceGetUUID", handle) if not error else ("", error)
            name, trouble = self.ask("nvmlDeviceGetName", handle) if not problem else ("", problem)
            identity = {"index": index, "uuid": text_of(uuid or ""), "name": text_of(name or "")}
            first = error or problem or trouble
            found.append(lost(**identity, error=first) if first else look(handle, identity))
        return tuple(found)


def open_session(request: Request) -> tuple[Session[Any] | None, str]:
    """(session, "") or (None, name of the error that NVML starts with).

    Raises:
        ToolMissingError: nvidia-ml-py is not installed.
    """
    try:
        import pynvml as nvml
    except ImportError as error:
        raise ToolMissingError("the Python package nvidia-ml-py is not installed") from error
    request.tell("starting NVML")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return None, error_name(nvml, error)
    return Session(nvml, request), ""


def start_nvml(request: Request) -> tuple[Session[Any] | None, str]:
    """Like :func:`open_session`, but without a device on the bus every error is ``NOT_FOUND``: images built
    for both kinds of node hold the driver's library on nodes without devices."""
    session, error = open_session(request)
    if session is None and not may_have_devices():
        return None, NO_DEVICE
    return session, error
