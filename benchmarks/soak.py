"""A long training with honest pauses and real faults: what is missed, who is blamed, and every false alarm.

    python -m benchmarks.soak --minutes 60 --seed 1 --json soak.json

Three ranks of DDP on gloo with easyckpt under `aimaster run`, with no option but a budget that allows every
restart (`soak_loop.py` is the script). Faults are written down by the rank that makes them, in the moment
before; incidents come from the journal. An incident belongs to the newest fault before it that has none yet;
one without a fault is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from aimaster.journal.incidents import Incident, incidents
from aimaster.journal.sqlite import SqliteJournal
from benchmarks.launchers import end_on_sigterm

LOOP = Path(__file__).with_name("soak_loop.py")
RANKS = 3
POLICY = "worker_failures: {limit: 100000}\nhangs: {limit: 100000}\nfruitless_attempts_max: 100000\n"
END_LIMIT_S = 300.0
"""How long the end may take: the last fault may just have been made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What a rank did to itself, and what became of it."""

    kind: str
    rank: int
    wall_s: float
    incident: Incident | None = None

    @property
    def blamed(self) -> tuple[int, ...]:
        """The ranks that the incident names."""
        if self.incident is None:
            return ()
        if self.incident.hang is not None:
            return self.incident.hang.culprits
        return () if self.incident.rank is None else (self.incident.rank,)

    @property
    def found_s(self) -> float | None:
        """From the fault to its detection."""
        return None if self.incident is None else self.incident.detected_wall_s - self.wall_s

    @property
    def back_s(self) -> float | None:
        """From the fault to the next first step."""
        if self.incident is None or self.incident.recovered_s is None or self.found_s is None:
            return None
        return self.found_s + self.incident.recovered_s


def made(folder: Path) -> list[Fault]:
    """All faults, in their order."""
    told = [json.loads(path.read_text()) for path in folder.glob("fault-*.json")]
    faults = [Fault(kind=one["kind"], rank=one["rank"], wall_s=one["wall_s"]) for one in told]
    return sorted(faults, key=lambda fault: fault.wall_s)


def matched(faults: Sequence[Fault], found: Sequence[Incident]) -> tuple[list[Fault], list[Incident]]:
    """Each fault with its incident, and the incidents that belong to none."""
    result: list[Fault] = list(faults)
    alarms = []
    for incident in found:
        before = [index for index, one in enumerate(result) if one.wall_s <= incident.detected_wall_s]
        if before and result[before[-1]].incident is None:
            result[before[-1]] = replace(result[before[-1]], incident=incident)
        else:
            alarms.append(incident)
    return result, alarms


def run(folder: Path, *, minutes: float, environment: dict[str, str]) -> tuple[int, list[Incident]]:
    """One training; its exit code and what the journal says went wrong."""
    (folder / "policy.yaml").write_text(POLICY)
    env = {
        **os.environ,
        **environment,
        "OMP_NUM_THREADS": "1",
        "XDG_STATE_HOME": str(folder / "state"),
        "SOAK_FOLDER": str(folder),
        "SOAK_END": str(time.time() + 60 * minutes),
    }
    words = [sys.executable, "-m", "aimaster", "run", "--run-dir", str(folder / "run")]
    words += ["--policy", str(folder / "policy.yaml"), "--nproc-per-node", str(RANKS), str(LOOP)]
    with (folder / "output").open("wb") as out:
        process = subprocess.Popen(words, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        code = process.wait(60 * minutes + END_LIMIT_S)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    (journal,) = (folder / "state").glob("aimaster/*/journal.db")
    with SqliteJournal.read(journal) as entries:
        return code, list(incidents(entries.entries()))


def middle(values: Sequence[float | None]) -> str:
    """Median and maximum, in seconds."""
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.1f} ({max(known):.1f})" if known else "–"


def report(faults: Sequence[Fault], alarms: Sequence[Incident]) -> None:
    """A line per kind of fault, and each false alarm."""
    print("| fault | made | found | blamed right | blamed wrong | found after, s | first step after, s |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for kind, number in sorted(Counter(fault.kind for fault in faults).items()):
        ours = [fault for fault in faults if fault.kind == kind]
        found = [fault for fault in ours if fault.incident is not None]
        right = sum(fault.blamed == (fault.rank,) for fault in found)
        wrong = sum(bool(fault.blamed) and fault.rank not in fault.blamed for fault in found)
        times = f"{middle([one.found_s for one in ours])} | {middle([one.back_s for one in ours])}"
        print(f"| {kind} | {number} | {len(found)} | {right} | {wrong} | {times} |")
    for one in alarms:
        print(f"false alarm: {one.kind.value} of rank {one.rank} at {one.detected_at_s:.0f} s: {one.error}")
    print(f"false alarms: {len(alarms)}")


def told(fault: Fault) -> dict[str, Any]:
    """One line of the JSON."""
    return {
        "kind": fault.kind,
        "rank": fault.rank,
        "blamed": fault.blamed,
        "found_s": fault.found_s,
        "first_step_s": fault.back_s,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--pause-each", type=float, default=100.0, help="steps between honest pauses, mean")
    parser.add_argument("--fault-each", type=float, default=600.0, help="steps between faults, mean")
    parser.add_argument("--keep", type=Path, help="an empty folder in which everything stays")
    parser.add_argument("--json", type=Path)
    words = parser.parse_args()
    end_on_sigterm()
    folder = words.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        "SOAK_SEED": words.seed,
        "SOAK_PAUSE_EACH": str(words.pause_each),
        "SOAK_FAULT_EACH": str(words.fault_each),
    }
    try:
        code, found = run(folder, minutes=words.minutes, environment=environment)
        faults, alarms = matched(made(folder), found)
        steps = (folder / "steps").read_text() if (folder / "steps").exists() else "?"
    finally:
        if words.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    report(faults, alarms)
    print(f"exit code {code}, {steps} steps in {words.minutes:g} minutes")
    if words.json:
        outcome = {"exit_code": code, "faults": [told(one) for one in faults], "false_alarms": len(alarms)}
        words.json.write_text(json.dumps(outcome, indent=1))
    return 0 if code == 0 and not alarms and all(one.incident for one in faults) else 1


if __name__ == "__main__":
    sys.exit(main())
