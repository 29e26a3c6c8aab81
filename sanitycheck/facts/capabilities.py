"""What can be looked at from here: ``env.capabilities``."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request

__all__ = ["CapabilitiesFacts", "collect", "container_of"]

_TOOLS = ("nvidia-smi", "dcgmi", "ibstat", "py-spy")
_MODULES = ("torch", "numpy", "pynvml", "fsspec", "psutil")
_CGROUP_MARKS = (("kubepods", "kubernetes"), ("docker", "docker"), ("libpod", "podman"), ("lxc", "lxc"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CapabilitiesFacts:
    """What this process may see and use; ``container`` is empty on a bare machine or in a virtual one."""

    hostname: str = ""
    user_id: int = 0
    container: str = ""
    sees: Mapping[str, bool] = field(default_factory=dict)


def container_of(*, environment: Mapping[str, str], cgroup: str, marker_files: tuple[str, ...]) -> str:
    """The kind of container, by the marks that run times leave."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "kubernetes"
    if environment.get("container"):
        return environment["container"]
    if "/run/.containerenv" in marker_files:
        return "podman"
    if "/.dockerenv" in marker_files:
        return "docker"
    return next((name for mark, name in _CGROUP_MARKS if mark in cgroup), "")


def collect(request: Request) -> CapabilitiesFacts:
    """Try what the other checks need, without using it."""
    marks = tuple(path for path in ("/run/.containerenv", "/.dockerenv") if os.path.exists(path))
    sees = {f"tool:{tool}": shutil.which(tool) is not None for tool in _TOOLS}
    sees |= {f"module:{module}": find_spec(module) is not None for module in _MODULES}
    sees["kernel log"] = os.access("/dev/kmsg", os.R_OK)
    sees["NVIDIA driver"] = os.path.exists("/proc/driver/nvidia/version")
    sees["RDMA"] = os.path.isdir("/sys/class/infiniband")
    sees["memory error counts"] = os.path.isdir("/sys/devices/system/edac/mc/mc0")
    return CapabilitiesFacts(
        hostname=socket.gethostname(),
        user_id=os.geteuid(),
        container=container_of(
            environment=os.environ, cgroup=read_text("/proc/1/cgroup") or "", marker_files=marks
        ),
        sees=sees,
    )
