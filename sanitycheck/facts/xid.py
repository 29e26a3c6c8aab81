"""GPU and switch messages of the kernel log: ``gpu.xid_recent``.

Only records of the kernel itself count: programs may write to the log too, and text of theirs can look like a
message of the driver (NVSentinel#1426).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sanitycheck.errors import NotApplicableError
from sanitycheck.facts.kernel import kernel_records, parse_kmsg
from sanitycheck.facts.nvml import pci_gpus
from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request
from sanitycheck.facts.software import NVIDIA_DRIVER
from sanitycheck.knowledge.xids import parse_line
from sanitycheck.thresholds import KERNEL_WINDOW_S

__all__ = ["XidEvent", "XidFacts", "collect", "find_xids"]

EVENTS_MAX = 256
TEXT_CHARS_MAX = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEvent:
    """All messages of one code about one device within the window.

    Attributes:
        pci: PCI address as the driver writes it; empty where it does not say.
        payload: ``fatal`` or ``nonfatal`` as the newest message says; empty where it does not.
        wanted: What the newest message of code 154 asks for.
        newest_age_s: Seconds since the newest of them.
    """

    code: int
    pci: str = ""
    switch: bool = False
    payload: str = ""
    wanted: str = ""
    count: int = 1
    newest_age_s: float = 60.0
    newest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class XidFacts:
    """What the kernel log says of GPUs and switches."""

    events: tuple[XidEvent, ...] = ()
    records: int = 0
    window_s: float = KERNEL_WINDOW_S


def _from_kernel(record: str) -> bool:
    """Whether a ``/dev/kmsg`` record has the kernel's own facility (0)."""
    head = record.partition(",")[0]
    return head.isdigit() and int(head) >> 3 == 0


def find_xids(records: Iterable[str], *, uptime_s: float, window_s: float = KERNEL_WINDOW_S) -> XidFacts:
    """Count messages by device and code over the records younger than the window."""
    found: dict[tuple[str, int, bool], XidEvent] = {}
    total = 0
    for record in records:
        total += 1
        parsed = parse_kmsg(record)
        if parsed is None or not _from_kernel(record) or uptime_s - parsed[0] > window_s:
            continue
        at_s, text = parsed
        line = parse_line(text)
        if line is None:
            continue
        key = (line.pci, line.code, line.switch)
        if key not in found and len(found) >= EVENTS_MAX:
            continue
        fatal = "fatal" if key in found and found[key].payload == "fatal" else line.payload
        event = XidEvent(
            code=line.code,
            pci=line.pci,
            switch=line.switch,
            payload=fatal,
            wanted=line.wanted,
            newest_age_s=max(0.0, uptime_s - at_s),
            newest=text[:TEXT_CHARS_MAX],
        )
        found[key] = replace(event, count=found[key].count + 1) if key in found else event
    return XidFacts(events=tuple(found.values()), records=total, window_s=window_s)


def collect(request: Request) -> XidFacts:
    """Read the kernel log where there is an NVIDIA driver, since the last good run or for a day."""
    if read_text(NVIDIA_DRIVER) is None and not pci_gpus():
        raise NotApplicableError("no NVIDIA driver is loaded here")
    window_s = KERNEL_WINDOW_S
    if request.options.known.good_until_unix_s is not None:
        window_s = max(0.0, min(window_s, time.time() - request.options.known.good_until_unix_s))
    return find_xids(kernel_records(), uptime_s=time.clock_gettime(time.CLOCK_MONOTONIC), window_s=window_s)
