"""The kernel's own log: ``host.kernel``. Reading it needs a privilege that containers often lack."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from sanitycheck.errors import NotPermittedError, ToolMissingError
from sanitycheck.facts.request import Request
from sanitycheck.thresholds import KERNEL_WINDOW_S

__all__ = ["KernelFacts", "KernelTrouble", "classify", "collect", "kernel_records", "parse_kmsg", "summarise"]

KMSG = "/dev/kmsg"
RECORD_BYTES_MAX = 8192
"""devkmsg_read gives one record per read and refuses a buffer that is too small
(Documentation/ABI/testing/dev-kmsg)."""
RECORDS_MAX = 200_000
NEWEST_CHARS_MAX = 200

_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("oom_kill", re.compile(r"[Oo]ut of memory: Kill(ed)? process|oom_reaper: reaped")),
    (
        "machine_check",
        re.compile(r"\[Hardware Error\].*(Uncorrected|UC|Fatal)|mce: .*(Fatal|Uncorrected)|EDAC .*\bUE\b"),
    ),
    ("machine_check_corrected", re.compile(r"\[Hardware Error\]: (Corrected|Machine check)|EDAC .*\bCE\b")),
    (
        "io_error",
        re.compile(r"\bI/O error\b|Buffer I/O error|critical (medium|target) error|nvme .* timeout"),
    ),
    (
        "file_system",
        re.compile(
            r"EXT4-fs error|XFS .*(Corruption|error)|BTRFS (error|critical)"
            r"|[Rr]emounting file ?system read-only"
        ),
    ),
    (
        "network_file_system",
        re.compile(r"nfs: server .* not responding|LustreError|ceph: .* (hung|timed out)"),
    ),
    (
        "hung_task",
        re.compile(r"blocked for more than \d+ seconds|soft lockup|hard LOCKUP|rcu.*detected stalls"),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTrouble:
    """One kind of trouble within the window: how often, how long ago the last, and that line."""

    kind: str
    count: int = 1
    newest_age_s: float = 0.0
    newest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """What the kernel log holds."""

    troubles: tuple[KernelTrouble, ...] = ()
    records: int = 0
    window_s: float = KERNEL_WINDOW_S


def parse_kmsg(record: str) -> tuple[float, str] | None:
    """One ``/dev/kmsg`` record as (seconds since boot, text); None for what has another form."""
    head, semicolon, text = record.partition(";")
    fields = head.split(",")
    if not semicolon or len(fields) < 3 or not fields[2].isdigit():
        return None
    return int(fields[2]) / 1e6, text.split("\n", 1)[0]


def classify(text: str) -> str | None:
    """The kind of trouble that a line tells of, if any."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(text)), None)


def summarise(records: Iterable[str], *, uptime_s: float, window_s: float = KERNEL_WINDOW_S) -> KernelFacts:
    """Count trouble by kind over the records younger than the window."""
    found: dict[str, KernelTrouble] = {}
    total = 0
    for record in records:
        total += 1
        parsed = parse_kmsg(record)
        if parsed is None or uptime_s - parsed[0] > window_s:
            continue
        at_s, text = parsed
        kind = classify(text)
        if kind is not None:
            found[kind] = KernelTrouble(
                kind=kind,
                count=found[kind].count + 1 if kind in found else 1,
                newest_age_s=max(0.0, uptime_s - at_s),
                newest=text[:NEWEST_CHARS_MAX],
            )
    return KernelFacts(troubles=tuple(found.values()), records=total, window_s=window_s)


def kernel_records() -> Iterable[str]:
    """The records of the kernel log as it stands, oldest first.

    Raises:
        NotPermittedError: This user may not read it.
        ToolMissingError: There is none.
    """
    try:
        fd = os.open(KMSG, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError as error:
        raise NotPermittedError(f"{KMSG}: {error.strerror}; CAP_SYSLOG is enough") from error
    except OSError as error:
        raise ToolMissingError(f"{KMSG}: {error.strerror}") from error
    try:
        for _ in range(RECORDS_MAX):
            try:
                yield os.read(fd, RECORD_BYTES_MAX).decode(errors="replace")
            except BlockingIOError:
                return
            except OSError as error:
                if (
                    error.errno == errno.EPIPE
                ):  # overwritten while we read; the next read goes on behind the gap
                    continue
                if error.errno in (errno.EPERM, errno.EACCES):
                    raise NotPermittedError(f"{KMSG}: {error.strerror}; CAP_SYSLOG is enough") from error
                raise ToolMissingError(f"{KMSG}: {error.strerror}") from error
    finally:
        os.close(fd)


def collect(request: Request) -> KernelFacts:
    """Read the kernel log as it stands."""
    # The log's stamps do not count time asleep, so neither may the clock they are compared with.
    return summarise(kernel_records(), uptime_s=time.clock_gettime(time.CLOCK_MONOTONIC))
