"""Groups of the configuration: size, frozenness, values that depend on each other."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import aimaster.config as config
from aimaster.config import CheckpointConfig, DetectorConfig, RendezvousConfig, StdMap, is_loopback


def groups() -> list[type]:
    found = [value for _, value in inspect.getmembers(config, inspect.isclass)]
    return [value for value in found if dataclasses.is_dataclass(value)]


@pytest.mark.parametrize("group", groups(), ids=lambda group: group.__name__)
def test_groups_are_small_frozen_and_keyword_only(group: type) -> None:
    fields = dataclasses.fields(group)
    assert len(fields) <= 12
    assert all(field.kw_only for field in fields)
    assert group.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert hasattr(group, "__slots__")


@pytest.mark.parametrize(
    "values",
    [
        {"heartbeat_interval_s": 3.0},
        {"suspect_after_s": 6.0},
        {"heartbeat_interval_s": 0.0},
        {"orphan_timeout_s": 6.0},
        {"dead_after_s": float("nan")},
    ],
)
def test_time_outs_are_checked_together(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need"):
        DetectorConfig(**values)


def test_checkpoint_limits() -> None:
    with pytest.raises(ValueError, match="saver-memory"):
        CheckpointConfig(memory_limit_bytes=0)
    with pytest.raises(ValueError, match="saver-linger"):
        CheckpointConfig(saver_linger_s=-1)


@pytest.mark.parametrize(
    ("host", "answer"),
    [("localhost", True), ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("10.0.0.1", False)],
)
def test_loopback(host: str, answer: bool) -> None:
    assert is_loopback(host) is answer


def test_rendezvous_needs_a_plain_id_and_a_port() -> None:
    source = config.JobIdSource.FLAG
    with pytest.raises(ValueError, match="job id"):
        RendezvousConfig(job_id="a/b", job_id_source=source, run_id="a/b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="port"):
        RendezvousConfig(job_id="a", job_id_source=source, run_id="a", host="h")  # type: ignore[arg-type]


def test_std_map() -> None:
    assert StdMap().of(0) is config.Std.NONE
    assert StdMap(per_rank=((1, config.Std.ERR),)).of(0) is config.Std.NONE
