"""Policy files: what is not named keeps its default, and what is wrong is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from aimaster.core.detector import DetectorConfig
from aimaster.core.policy import Budget, Policy, Timeouts
from aimaster.errors import UsageError
from aimaster.rules.policies import PolicyFile, read_policy


def read(tmp_path: Path, text: str) -> PolicyFile:
    path = tmp_path / "policy.yaml"
    path.write_text(text)
    return read_policy(path)


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    assert read(tmp_path, "") == PolicyFile(policy=Policy(), detector=DetectorConfig())


def test_what_is_named_is_changed_and_nothing_else(tmp_path: Path) -> None:
    told = read(
        tmp_path,
        "worker_failures: {limit: 5, window_s: 1800}\n"
        "timeouts: {replacement_s: 120}\n"
        "node_strikes_max: 4\n"
        "detector: {suspect_s: 5, dead_s: 10}\n",
    )
    assert told.policy == Policy(
        worker_failures=Budget(limit=5, window_s=1800.0),
        timeouts=Timeouts(replacement_s=120.0),
        node_strikes_max=4,
    )
    assert told.detector == DetectorConfig(suspect_s=5.0, dead_s=10.0)
    assert isinstance(told.policy.timeouts.replacement_s, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budgets: 3", "unknown fields budgets"),
        ("worker_failures: 3", "fields with values are needed"),
        ("worker_failures: {limit: 1.5}", "whole number"),
        ("worker_failures: {limit: true}", "whole number"),
        ("worker_failures: {limit: -1}", "limits of 0 or more"),
        ("timeouts: {join_s: soon}", "a number is needed"),
        ("detector: {dead_s: 1}", "suspect_s < dead_s"),
        ("[1, 2]", "must be fields"),
        ("a: [", "not YAML"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        read(tmp_path, text)
    assert "policy.yaml" in str(raised.value)
