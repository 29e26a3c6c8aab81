"""This node's own record: what it reached when it was good, so that a later run can be compared with it.

A record belongs to an identity (processor, devices by UUID, software): another torch or another board starts
a new one. Each figure keeps its last values, and is summed up by median and MAD, never by a mean: one
disturbed run must not move it. Only runs in which nothing failed are recorded.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sanitycheck.durable import write_whole
from sanitycheck.errors import BadFileError, CodecError, UsageError
from sanitycheck.facts.codec import decode, encode
from sanitycheck.facts.proc import read_text
from sanitycheck.facts.request import Request
from sanitycheck.result import Report, Verdict

__all__ = [
    "Baseline",
    "Entry",
    "Standing",
    "compare",
    "default_path",
    "figures_of",
    "identity_of_node",
    "read_baseline",
    "recorded",
    "save_baseline",
]

BASELINE_SCHEMA = 1
VALUES_KEPT = 20
ENTRIES_KEPT = 8
"""Identities; the oldest goes."""
GPUS = Path("/proc/driver/nvidia/gpus")
FIGURES = {
    "cpu.gemm": ("gflops",),
    "cpu.membw": ("gb_s",),
    "perf.gemm": ("rate",),
    "perf.membw": ("rate",),
    "perf.h2d": ("rate",),
    "perf.d2h": ("rate",),
    "perf.p2p": ("rate",),
    "coll.intra": ("all_reduce_mb_s", "all_gather_mb_s", "all_to_all_mb_s"),
    "store.ckpt_path": ("write_mb_s", "read_mb_s"),
    "train.mini_gpt": ("tokens_per_s",),
}
"""Facts of findings that are figures, by check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Values of one identity, the newest last."""

    figures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    recorded_unix_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What a record says of one identity."""

    medians: Mapping[str, float] = field(default_factory=dict)
    mads: Mapping[str, float] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    boot_id: str | None = None
    good_until_unix_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The whole record of a node."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    boot_id: str = ""
    good_until_unix_s: float = 0.0

    def standing(self, identity: str) -> Standing:
        """Medians and spreads of an identity; counters and times of the node."""
        entry = self.entries.get(identity, Entry())
        medians = {name: statistics.median(values) for name, values in entry.figures.items() if values}
        mads = {
            name: statistics.median([abs(value - medians[name]) for value in values])
            for name, values in entry.figures.items()
            if values
        }
        return Standing(
            medians=medians,
            mads=mads,
            digests=entry.digests,
            counters=self.counters,
            boot_id=self.boot_id or None,
            good_until_unix_s=self.good_until_unix_s or None,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"schema": BASELINE_SCHEMA, **encode(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, path: str) -> Baseline:
        """From the JSON form.

        Raises:
            BadFileError: It is no record, or of another schema.
        """
        if data.get("schema") != BASELINE_SCHEMA:
            raise BadFileError(path, problem=f"a record with 'schema: {BASELINE_SCHEMA}' is expected")
        try:
            return decode(cls, {key: value for key, value in data.items() if key != "schema"})
        except CodecError as error:
            raise BadFileError(path, problem=str(error)) from error


def default_path() -> Path:
    """``$XDG_STATE_HOME/sanitycheck/baseline.json``."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(state) / "sanitycheck" / "baseline.json"


def read_baseline(path: str) -> Baseline:
    """Read a record.

    Raises:
        BadFileError: It cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError) as error:
        raise BadFileError(path, problem=str(error)) from error
    if not isinstance(data, dict):
        raise BadFileError(path, problem="a JSON object is expected")
    return Baseline.from_dict(data, path=path)


def save_baseline(baseline: Baseline, path: str) -> None:
    """Write a record, whole or not at all.

    Raises:
        BadFileError: It cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        write_whole(path, json.dumps(baseline.to_dict(), indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise BadFileError(path, problem=f"the record cannot be written: {error.strerror}") from error


def identity_of_node() -> str:
    """Processor, devices and software of this node, read from files only."""
    from sanitycheck.facts import host, software

    serials = []
    for information in sorted(GPUS.glob("*/information")):
        found = re.search(r"GPU UUID:\s*(\S+)", read_text(information) or "")
        serials.append(found.group(1) if found else information.parent.name)
    versions = software.collect(Request(check="sw.fingerprint")).digest
    return f"{host.cpu_model() or 'unknown processor'} | {','.join(serials) or 'no gpu'} | {versions}"


def figures_of(report: Report) -> dict[str, float]:
    """The figures of a report by name, as ``check.fact``."""
    found: dict[str, float] = {}
    for result in report.results:
        for name in FIGURES.get(result.check, ()):
            values = [one.facts[name] for one in result.findings if name in one.facts]
            numbers = [float(value) for value in values if isinstance(value, (int, float))]
            if numbers:
                found[f"{result.check}.{name}"] = min(numbers)
    return found


def _digests(report: Report) -> dict[str, str]:
    return {
        f"{result.check}: {finding.facts['key']}": str(finding.facts["digest"])
        for result in report.results
        for finding in result.findings
        if {"key", "digest"} <= set(finding.facts)
    }


def _boot_id(report: Report) -> str:
    for result in report.results:
        for finding in result.findings:
            if result.check == "host.boot" and "boot_id" in finding.facts:
                return str(finding.facts["boot_id"])
    return ""


def recorded(baseline: Baseline, report: Report, *, identity: str, counters: Mapping[str, int]) -> Baseline:
    """The record with one more run.

    Raises:
        UsageError: Something failed in that run: it is nothing to be measured against.
    """
    if report.verdict is Verdict.FAIL:
        failed = ", ".join(result.check for result in report.with_verdict(Verdict.FAIL))
        raise UsageError(f"a run in which something failed is not recorded ({failed})")
    old = baseline.entries.get(identity, Entry())
    figures = {name: tuple(values) for name, values in old.figures.items()}
    for name, value in figures_of(report).items():
        figures[name] = (*figures.get(name, ()), value)[-VALUES_KEPT:]
    now = time.time()
    entry = Entry(figures=figures, digests={**old.digests, **_digests(report)}, recorded_unix_s=now)
    entries = {**baseline.entries, identity: entry}
    while len(entries) > ENTRIES_KEPT:
        del entries[min(entries, key=lambda name: entries[name].recorded_unix_s)]
    return replace(
        baseline,
        entries=entries,
        counters=dict(counters),
        boot_id=_boot_id(report) or baseline.boot_id,
        good_until_unix_s=report.started_unix_s or now,
    )


def compare(standing: Standing, report: Report) -> list[dict[str, Any]]:
    """Each figure of a report beside the record: value, median, share, and how many MADs away."""
    rows = []
    for name, value in sorted(figures_of(report).items()):
        median = standing.medians.get(name)
        if not median:
            rows.append({"figure": name, "value": value, "median": None, "share": None, "mads": None})
            continue
        mad = standing.mads.get(name, 0.0)
        rows.append(
            {
                "figure": name,
                "value": value,
                "median": median,
                "share": round(value / median, 4),
                "mads": round((value - median) / mad, 2) if mad else None,
            }
        )
    return rows
