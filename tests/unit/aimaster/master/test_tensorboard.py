"""Curves for TensorBoard, read back by its own library."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from aimaster.config import WatchConfig
from aimaster.errors import FolderUnusable, SetupError
from aimaster.master.options import watch_from
from aimaster.master.tensorboard import Board
from aimaster.rpc.goodput import GoodputStatus
from tests.unit.aimaster.rpc.recording_master import RecordingMaster


def test_curves_are_what_the_job_was(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = Board(tmp_path)
    status = replace(RecordingMaster().status(), attempt=2, durable_age_s=None)
    for wall_s, share in ((10.0, 0.5), (20.0, 0.75)):
        times = GoodputStatus(wall_s=wall_s, phases=(("training", share * wall_s),))
        board.write(replace(status, goodput=times, memory_age_s=wall_s / 4), wall_s=1000.0 + wall_s)
    board.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    curves = {
        tag: [(one.step, float(one.tensor_proto.float_val[0])) for one in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
    }
    assert curves["aimaster/goodput"] == [(10, 0.5), (20, 0.75)]
    assert curves["aimaster/restarts"] == [(10, 2.0), (20, 2.0)]
    assert curves["aimaster/checkpoint_age_s/memory"] == [(10, 2.5), (20, 5.0)]
    assert "aimaster/checkpoint_age_s/durable" not in curves


def test_a_missing_library_and_a_bad_folder_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(SetupError, match="not installed"):
            watch_from(WatchConfig(tensorboard=str(tmp_path)), {})
    if importlib.util.find_spec("tensorboard") is not None:
        with pytest.raises(FolderUnusable, match="cannot be made"):
            watch_from(WatchConfig(tensorboard=str(tmp_path / "file" / "below")), {})
