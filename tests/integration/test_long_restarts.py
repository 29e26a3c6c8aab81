"""Fifty restarts in a row: nothing of them is left in agent, master or folders.

`python -m benchmarks.restarts` does the same with gloo, and with survivors that keep their process.
"""

from __future__ import annotations

import pytest

from benchmarks.restarts import measure

RSS_KB_MAX = 8 * 1024
"""Python's allocator takes pages as it likes; a restart that kept 200 kB would be beyond it."""


@pytest.mark.slow
def test_fifty_restarts_leave_nothing_behind() -> None:
    seen = measure(restarts=50, kind="bare", nproc=1)
    assert seen["exit_code"] == 0
    assert {"agent", "master", "saver", "folders"} <= seen["growth"].keys()
    for role, grown in seen["growth"].items():
        assert grown.get("fds", 0) <= 1, (role, grown)
        assert grown.get("threads", 0) <= 1, (role, grown)
        assert grown.get("files", 0) <= 2, (role, grown)
        assert grown.get("rss_kb", 0) <= RSS_KB_MAX, (role, grown)
