"""A rate is said once, and again when it is another one."""

from __future__ import annotations

import logging

import pytest

from easyckpt.rates import RateLog

GB = 10**9


def test_once_per_change_and_not_per_save(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    rates = RateLog("written to storage", logging.getLogger("easyckpt.saver"))
    for seconds in (1.0, 1.1, 0.8, 1.4):
        rates.note(2 * GB, seconds, how="ranks of this node: 2")
    rates.note(2 * GB, 4.0, how="ranks of this node: 2")  # the device became slow
    rates.note(4 * GB, 8.0, how="ranks of this node: 2")  # the state has grown
    rates.note(4 * GB, 8.0, how="ranks of this node: 4")
    rates.note(0, 8.0, how="nothing")
    rates.note(1, 0.0, how="no time")
    assert [record.getMessage() for record in caplog.records] == [
        "written to storage: 2 GB at 2.00 GB/s (ranks of this node: 2)",
        "written to storage: 2 GB at 0.50 GB/s (ranks of this node: 2)",
        "written to storage: 4 GB at 0.50 GB/s (ranks of this node: 2)",
        "written to storage: 4 GB at 0.50 GB/s (ranks of this node: 4)",
    ]
