"""Versions of what trains here: ``sw.versions`` and ``sw.fingerprint``.

Everything is read from metadata and files; nothing is imported, so that a broken torch cannot break the
probe and a whole one does not cost its import. The paths searched are the caller's.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request

__all__ = ["SoftwareFacts", "collect", "digest", "parse_driver", "parse_torch_version_file"]

NVIDIA_DRIVER = "/proc/driver/nvidia/version"
PACKAGES = (
    "numpy",
    "torch",
    "deepspeed",
    "transformers",
    "accelerate",
    "lightning",
    "triton",
    "flash-attn",
    "safetensors",
)
"""Whose version changes what is computed or how ranks talk."""
NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")

_ASSIGNED = re.compile(r"^(__version__|cuda|hip)\s*(?::[^=]*)?=\s*['\"]([^'\"]*)['\"]", re.MULTILINE)
_NEEDS_NCCL = re.compile(r"^(nvidia-nccl-cu\d+)\s*\(?==\s*([\w.]+)")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareFacts:
    """Versions by name, empty where there is none.

    Attributes:
        torch_version: What the torch on the path says of itself.
        torch_metadata: What the installer recorded; differs when two installations lie over each other.
        torch_cuda: The CUDA version that torch was built for.
        nccl: The NCCL package beside torch.
        nccl_needed: The NCCL version that torch's own metadata asks for.
        driver: NVIDIA kernel driver.
        versions: Everything that makes up the fingerprint.
    """

    python: str = "3.11.0"
    torch_version: str = "2.13.0"
    torch_metadata: str = "2.13.0"
    torch_cuda: str = ""
    nccl: str = ""
    nccl_needed: str = ""
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    digest: str = ""


def parse_torch_version_file(text: str) -> Mapping[str, str]:
    """``torch/version.py`` as names and values, without running it."""
    return {name.strip("_"): value for name, value in _ASSIGNED.findall(text)}


def parse_driver(text: str) -> str:
    """The driver's version from ``/proc/driver/nvidia/version``."""
    match = _DRIVER.search(text)
    return match.group(1) if match else ""


def digest(versions: Mapping[str, str]) -> str:
    """Short name of a set of versions, equal on equal nodes."""
    text = json.dumps(dict(versions), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package) or ""
    except metadata.PackageNotFoundError:
        return ""


def _torch_folder() -> Path | None:
    """Where ``import torch`` would find it, without importing; a folder without ``version.py`` is not
    torch."""
    for entry in sys.path:
        if (Path(entry) / "torch" / "version.py").is_file():
            return Path(entry) / "torch"
    return None


def _nccl_needed() -> tuple[str, str]:
    """(package, version) that torch's metadata asks for."""
    try:
        requires = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return "", ""
    matches = [match for match in map(_NEEDS_NCCL.match, requires) if match]
    return (matches[0].group(1), matches[0].group(2)) if matches else ("", "")


def collect(request: Request) -> SoftwareFacts:
    """Read versions from metadata, ``torch/version.py`` and ``/proc``."""
    folder = _torch_folder()
    torch = parse_torch_version_file(read_text(folder / "version.py") or "") if folder else {}
    needed_package, needed = _nccl_needed()
    nccl = next((v for v in map(_version, filter(None, (needed_package, *NCCL_PACKAGES))) if v), "")
    versions = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
    }
    versions["libc"] = "-".join(platform.libc_ver())
    versions |= {package: version for package in PACKAGES if (version := _version(package))}
    if torch:
        versions["torch"] = torch.get("version", versions.get("torch", ""))
    driver = parse_driver(read_text(NVIDIA_DRIVER) or "")
    versions |= {k: v for k, v in (("cuda", torch.get("cuda", "")), ("nccl", nccl), ("driver", driver)) if v}
    return SoftwareFacts(
        python=platform.python_version(),
        torch_version=torch.get("version", ""),
        torch_metadata=_version("torch"),
        torch_cuda=torch.get("cuda", ""),
        nccl=nccl,
        nccl_needed=needed,
        driver=driver,
        versions=versions,
        digest=digest(versions),
    )
