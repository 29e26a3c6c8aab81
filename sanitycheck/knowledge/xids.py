"""NVIDIA's XID messages: ``data/xid_catalog.yaml``, and reading them out of kernel messages.

The code is the number after the closing bracket, never the bus number inside it. The catalogue maps a code to
an action and an action to an effect on the node. A code that is not in it is *unknown*, not fatal.

Only a message that begins with the driver's own prefix is one: the kernel also writes lines that quote what a
user chose (names of processes, its command line), and these may look like anything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sanitycheck.errors import TableError
from sanitycheck.knowledge.table import DATA, load_table

__all__ = ["Catalogue", "XidEntry", "XidLine", "catalogue", "load_catalogue", "parse_line", "recovery_wanted"]

CATALOGUE = DATA / "xid_catalog.yaml"
FALLEN_OFF = 79
NVLINK5 = range(144, 151)
EFFECTS = ("none", "count_only", "from_text", "from_payload", "suspect", "isolate")
SEVERITIES = ("info", "warning", "error", "critical")
SCOPES = ("app", "gpu", "link", "node")
PATTERNS = (
    "xid",
    "sxid",
    "unreadable",
    "fallen_without_code",
    "reset_required",
    "nvlink5_payload",
    "recovery_154",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class XidEntry:
    """One code of the catalogue; ``effect`` is what it means for the node."""

    code: int
    name: str
    kind: str
    scope: str
    severity: str
    action: str
    effect: str
    meaning: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class XidLine:
    """One message.

    Attributes:
        code: 0 where the message has none that can be read.
        switch: It is about an NVSwitch (an SXid).
        payload: ``fatal`` or ``nonfatal`` where the message itself says so.
        wanted: The recovery that a code 154 names last.
    """

    code: int
    pci: str = ""
    switch: bool = False
    payload: str = ""
    wanted: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The table, ready for use."""

    entries: Mapping[int, XidEntry]
    patterns: Mapping[str, re.Pattern[str]]


def load_catalogue(path: Path = CATALOGUE) -> Catalogue:
    """The catalogue, checked.

    Raises:
        TableError: A code stands twice, or a field, an action, a scope or a pattern is not what it should be.
    """
    data = load_table(path, version=1)

    def fail(problem: str) -> TableError:
        return TableError(path.name, problem=problem)

    try:
        effects = {str(name): str(body["node_effect"]) for name, body in data["actions"].items()}
        patterns = {name: re.compile(str(data["log_patterns"][name])) for name in PATTERNS}
        items: list[Mapping[str, Any]] = list(data["entries"])
    except (KeyError, TypeError, re.error) as error:
        raise fail(f"incomplete: {error!r}") from error
    strange = sorted(set(effects.values()) - set(EFFECTS))
    if strange:
        raise fail(f"unknown effect {strange[0]!r}")
    entries: dict[int, XidEntry] = {}
    for item in items:
        code = item.get("code")
        if not isinstance(code, int) or not 0 < code < 1000:
            raise fail(f"{code!r} is no code")
        if code in entries:
            raise fail(f"code {code} stands twice")
        for key, allowed in (("action", effects), ("scope", SCOPES), ("severity", SEVERITIES)):
            if item.get(key) not in allowed:
                raise fail(f"code {code}: {key} {item.get(key)!r} is none of {', '.join(allowed)}")
        texts = {key: str(item.get(key) or "") for key in ("class", "meaning", "source")}
        if not all(texts.values()):
            raise fail(f"code {code}: class, meaning and source must be there")
        entries[code] = XidEntry(
            code=code,
            name=str(item.get("name") or f"XID_{code}"),
            kind=texts["class"],
            scope=str(item["scope"]),
            severity=str(item["severity"]),
            action=str(item["action"]),
            effect=effects[str(item["action"])],
            meaning=texts["meaning"],
            source=texts["source"],
        )
    return Catalogue(entries=entries, patterns=patterns)


@functools.cache
def catalogue() -> Catalogue:
    """The packaged catalogue."""
    return load_catalogue()


def parse_line(text: str, *, table: Catalogue | None = None) -> XidLine | None:
    """What a kernel message says of a GPU or a switch; None for any other message."""
    patterns = (table or catalogue()).patterns
    if match := patterns["xid"].search(text):
        code = int(match["code"])
        wanted = ""
        if code == 154 and (reco := patterns["recovery_154"].search(text)):
            wanted = reco["new_text"]
        payload = ""
        if code in NVLINK5 and (body := patterns["nvlink5_payload"].search(text)):
            payload = "nonfatal" if body["sev"].lower() == "nonfatal" else "fatal"
        return XidLine(code=code, pci=match["pci"], payload=payload, wanted=wanted, text=text)
    if match := patterns["sxid"].search(text):
        payload = "fatal" if match["sev"] == "Fatal" else "nonfatal"
        return XidLine(code=int(match["code"]), pci=match["pci"], switch=True, payload=payload, text=text)
    if patterns["fallen_without_code"].search(text):
        return XidLine(code=FALLEN_OFF, text=text)
    if patterns["reset_required"].search(text):
        return XidLine(code=154, wanted="GPU Reset Required", text=text)
    if patterns["unreadable"].search(text):
        return XidLine(code=0, switch="SXid" in text, text=text)
    return None


def recovery_wanted(text: str) -> str:
    """The recovery named by a code 154 as the name of NVML's value: ``NONE``, ``GPU_RESET``, …; "" if
    unclear."""
    plain = text.strip().lower()
    for word, name in (
        ("none", "NONE"),
        ("drain and reset", "DRAIN_AND_RESET"),
        ("drain p2p", "DRAIN_P2P"),
        ("node reboot", "NODE_REBOOT"),
        ("gpu reset", "GPU_RESET"),
    ):
        if plain.startswith(word):
            return name
    return ""
