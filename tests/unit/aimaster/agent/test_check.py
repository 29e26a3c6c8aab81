"""The look at a node before it joins, with the real checks: who is refused, and how long it takes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from aimaster.agent import check
from aimaster.agent.check import STORE, check_node
from aimaster.cli.run import config_from
from aimaster.config import RunConfig
from aimaster.errors import NodeRefused
from sanitycheck import Report, Verdict


def config(folder: Path, *flags: str) -> RunConfig:
    script = folder / "train.py"
    script.write_text("")
    found = config_from(["--standalone", *flags, str(script)], {})
    assert found is not None
    return found


def verdicts(report: Report | None) -> dict[str, Verdict]:
    assert report is not None
    return {result.check: result.verdict for result in report.results}


def test_a_node_that_cannot_keep_checkpoints_is_refused_unless_told_otherwise(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    flags = ("--ckpt-dir", str(tmp_path / "file" / "ckpt"))
    with pytest.raises(NodeRefused) as refused:
        asyncio.run(check_node(config(tmp_path, *flags), "n"))
    assert int(refused.value.exit_code) == 3
    assert STORE in str(refused.value)
    assert "--sanity-check warn" in str(refused.value)
    report = asyncio.run(check_node(config(tmp_path, *flags, "--sanity-check", "warn"), "n"))
    assert verdicts(report)[STORE] is Verdict.FAIL
    assert "is not a folder (blocks training)" in capfd.readouterr().err
    assert asyncio.run(check_node(config(tmp_path, *flags, "--sanity-check", "off"), "n")) is None


def test_quick_has_a_limit_and_a_store_that_has_not_answered_by_then_is_asked_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "QUICK_LIMIT_S", 0.7)  # enough for nothing
    flags = ("--ckpt-dir", str(tmp_path / "ckpt"), "--sanity-check", "quick")
    found = verdicts(asyncio.run(check_node(config(tmp_path, *flags), "n")))
    assert found[STORE] is Verdict.PASS
    assert found["cpu.gemm"] is Verdict.UNKNOWN
    assert "asking once more" in capfd.readouterr().err
