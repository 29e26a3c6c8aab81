"""What every object store has to do with the commit protocol and the tools, said once for their tests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from easyckpt.cli import main
from easyckpt.keep import KeepLatest
from easyckpt.retention import PruneOptions, prune_report
from easyckpt.storage import open_storage
from easyckpt.survey import survey
from easyckpt.testing import SampleRun
from easyckpt.verify import verify_step


def protocol_and_tools(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Save three steps at this address, list, verify and prune them."""
    run = SampleRun(storage=open_storage(url), nodes=2)
    run.begin(1)
    for step in (10, 20, 30):
        run.save(step)
    found = survey(open_storage(url))
    assert [item.step for item in found.visible] == [30, 20, 10]
    assert all(verify_step(run.storage, item.manifest).is_good for item in found.visible)
    assert main(["ls", url, "--json"]) == 0
    assert [row["step"] for row in json.loads(capsys.readouterr().out)["steps"]] == [30, 20, 10]
    later = run.storage.stat(found.visible[0].path)
    assert later is not None
    done = prune_report(
        run.storage, keep=KeepLatest(1), generation=1, now_unix_s=later.mtime_s + 1e5,
        options=PruneOptions(grace_s=0.0),
    )  # fmt: skip
    assert [name.step for name in done.kept] == [30]
    assert main(["verify", url, "--all"]) == 0
    assert "step 30 (generation 1): good" in capsys.readouterr().out
    assert {Path(entry.path).parts[0] for entry in run.storage.list()} == {
        "data", "easyckpt.json", "generations", "latest.json", "manifests"
    }  # fmt: skip
