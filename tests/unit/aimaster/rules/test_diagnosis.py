"""The table of causes: every row against its samples, the choice of the first cause, and rows of a user."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from aimaster.core.diagnosis import Blame, Failure, Rule, Weight, find, first_cause
from aimaster.errors import UsageError
from aimaster.rules.table import BUILT_IN, load_rules, read_table

SAMPLES: dict[str, dict[str, Any]] = yaml.safe_load(
    (Path(__file__).parents[3] / "data" / "diagnosis.yaml").read_text()
)
ROWS_MIN = 60


@cache
def rules() -> tuple[Rule, ...]:
    return load_rules()


def failure(sample: Any, **more: Any) -> Failure:
    fields = {"text": sample} if isinstance(sample, str) else dict(sample)
    kinds = fields.pop("kinds", ["sample"])
    return Failure(kinds=frozenset(kinds), **fields, **more)


def name(sample: Any) -> str:
    found = find(rules(), failure(sample))
    return found.rule.name if found else ""


def test_there_are_enough_rows_and_each_has_samples() -> None:
    names = [rule.name for rule in rules()]
    assert len(names) >= ROWS_MIN
    assert set(names) == set(SAMPLES)
    assert all(rule.source for rule in rules())


@pytest.mark.parametrize("row", SAMPLES)
def test_a_row_speaks_for_its_sample_and_not_for_another(row: str) -> None:
    assert name(SAMPLES[row]["fits"]) == row
    assert name(SAMPLES[row]["not"]) != row


def test_the_first_cause_is_the_most_specific_then_the_earliest() -> None:
    echo = failure(SAMPLES["peer_closed"]["fits"], rank=0, at_s=1.0)
    launcher = failure(SAMPLES["child_failed"]["fits"], rank=None, at_s=0.5)
    cause = failure(SAMPLES["disk_full"]["fits"], rank=3, at_s=1.2)
    later = failure(SAMPLES["cuda_out_of_memory"]["fits"], rank=5, at_s=1.4)
    found = first_cause(rules(), [launcher, echo, later, cause])
    assert [one.rule.name for one in found] == [
        "disk_full",
        "child_failed",
        "peer_closed",
        "cuda_out_of_memory",
    ]
    assert found[0].failure.rank == 3


def test_echoes_alone_are_still_told() -> None:
    found = first_cause(rules(), [failure(SAMPLES["peer_closed"]["fits"])])
    assert found[0].rule.weight is Weight.ECHO
    assert first_cause(rules(), [failure("nobody knows this")]) == ()


def test_a_users_own_rows_go_first(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(
        "- {name: ours, match: {text: 'No space left'}, cause: quota, blame: storage, retry: never, do: ask}"
    )
    found = find(load_rules(own), failure(SAMPLES["disk_full"]["fits"]))
    assert found is not None
    assert (found.rule.name, found.rule.blame) == ("ours", Blame.STORAGE)


GOOD = {"name": "a", "match": {"text": "x"}, "cause": "c", "blame": "user", "retry": "never", "do": "d"}


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        pytest.param({"a": 1}, "must be a list", id="no list"),
        pytest.param([1], "must have fields", id="no row"),
        pytest.param([{**GOOD, "colour": 1}], "unknown fields colour", id="unknown field"),
        pytest.param([{**GOOD, "match": {"texts": "x"}}], "unknown fields texts", id="unknown match"),
        pytest.param([{**GOOD, "match": {}}], "at least one of", id="matches everything"),
        pytest.param([{**GOOD, "match": {"text": "("}}], "no regular expression", id="broken expression"),
        pytest.param([{**GOOD, "blame": "moon"}], "'moon' is not one of user", id="unknown blame"),
        pytest.param([{**GOOD, "retry": 1}], "is not one of never", id="unknown retry"),
        pytest.param([{**GOOD, "weight": "x"}], "echo, generic, cause", id="unknown weight"),
        pytest.param([{**GOOD, "match": {"signal": "x"}}], "whole numbers", id="signal is no number"),
        pytest.param([{**GOOD, "name": "A b"}], "small letters", id="name"),
        pytest.param([GOOD, GOOD], "two rules are named a", id="twice"),
        pytest.param([{k: v for k, v in GOOD.items() if k != "do"}], "lacks do", id="field is missing"),
    ],
)
def test_a_wrong_table_says_where_and_what(tmp_path: Path, rows: Any, says: str) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump(rows))
    with pytest.raises(UsageError) as error:
        read_table(own)
    assert says in str(error.value)
    assert str(own) in str(error.value)


def test_a_table_that_is_not_there_or_no_yaml_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        read_table(tmp_path / "none.yaml")
    (tmp_path / "own.yaml").write_text("a: [")
    with pytest.raises(UsageError, match="not YAML"):
        read_table(tmp_path / "own.yaml")
    assert BUILT_IN.is_file()
