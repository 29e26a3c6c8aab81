"""The contract on the wire: generated code is fresh, and no number ever comes to mean something else.

`protos/numbers.txt` remembers every number that was ever given out. A new field or value is added to it (by
`python tests/tidy/test_protos.py`); one that is taken away stays in it, and must be `reserved` in the file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tidy.source import ROOT, files, text_of

MEMORY = ROOT / "protos" / "numbers.txt"


def test_generated_code_is_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "protos/generate.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def given_out() -> dict[str, str]:
    """`file message number` → name, for every field and enum value, and for what is reserved."""
    found: dict[str, str] = {}
    for name in files():
        if name.endswith(".proto"):
            text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text_of(name), flags=re.S)
            _read(name, text, found)
    return found


def _read(name: str, text: str, found: dict[str, str]) -> None:
    scope: list[str] = []
    for token in re.finditer(
        r"(?P<open>(?:message|enum|oneof|service|rpc)\s+(?P<title>\w+)[^{};]*\{)|(?P<close>\})"
        r"|reserved\s+(?P<reserved>[^;]+);|(?P<field>\w+)\s*=\s*(?P<number>\d+)\s*(?:\[[^\]]*\])?\s*;",
        text,
    ):
        if token["open"]:
            scope.append("" if token["open"].startswith("oneof") else token["title"])
        elif token["close"]:
            scope.pop()
        else:
            where = f"{name} {'.'.join(filter(None, scope))}"
            if token["reserved"]:
                for number in re.findall(r"\d+", re.sub(r'"[^"]*"', "", token["reserved"])):
                    found[f"{where} {number}"] = "reserved"
            elif token["number"]:
                assert f"{where} {token['number']}" not in found, f"{where}: number {token['number']} twice"
                found[f"{where} {token['number']}"] = token["field"]


def remembered() -> dict[str, str]:
    lines = [
        line.rsplit(" ", 1) for line in MEMORY.read_text().splitlines() if line and not line.startswith("#")
    ]
    return dict(lines)  # type: ignore[arg-type]


def test_no_number_changes_its_meaning() -> None:
    now, before = given_out(), remembered()
    wrong = []
    for place, name in before.items():
        if place not in now:
            wrong.append(f"{place} was {name}: write `reserved {place.rsplit(' ', 1)[1]};` in its place")
        elif now[place] not in (name, "reserved"):
            wrong.append(f"{place} was {name} and is now {now[place]}")
    assert not wrong, "\n".join(wrong)
    new = sorted(set(now) - set(before))
    assert not new, f"not remembered yet, run `python tests/tidy/test_protos.py`: {new}"


if __name__ == "__main__":
    old = remembered() if MEMORY.exists() else {}
    rows = sorted({**given_out(), **old}.items())
    head = "# Every number of the contract that was ever given out; see tests/tidy/test_protos.py.\n"
    MEMORY.write_text(head + "".join(f"{place} {name}\n" for place, name in rows))
