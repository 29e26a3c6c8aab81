"""Pages of the checks and the schema of the report are those that the code would write.

`python tests/tidy/test_check_pages.py` writes them anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __package__ in (None, ""):  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sanitycheck.catalogue import CHECKS
from sanitycheck.render.pages import check_pages, index_page
from sanitycheck.render.schema import report_schema
from tests.tidy.source import ROOT

FOLDER = ROOT / "docs/reference/checks"
SCHEMA = ROOT / "docs/reference/sanitycheck-report.schema.json"


def schema_text() -> str:
    return json.dumps(report_schema(), indent=2) + "\n"


def wanted() -> dict[str, str]:
    return {"README.md": index_page(), **check_pages()}


def test_there_is_a_page_for_every_check_and_no_other() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(wanted())


def test_the_pages_are_fresh() -> None:
    stale = [name for name, text in wanted().items() if (FOLDER / name).read_text() != text]
    assert not stale, f"{stale}: run python tests/tidy/test_check_pages.py"


def test_the_schema_of_the_report_is_fresh() -> None:
    assert SCHEMA.read_text() == schema_text(), "run python tests/tidy/test_check_pages.py"


def test_every_check_says_what_why_rule_and_source() -> None:
    for check in CHECKS:
        assert len(check.about) > 30, check.id
        assert check.rule, check.id
        assert check.source, check.id
        assert not check.source.endswith("."), check.id


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for page, text in wanted().items():
        (FOLDER / page).write_text(text)
    SCHEMA.write_text(schema_text())
