"""What the kernel counts for a main thread: read from this very process."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from aimaster.agent.counters import effort

pytestmark = pytest.mark.skipif(effort(os.getpid()) is None, reason="the kernel keeps no schedstat")


def test_work_is_awake_and_sleep_is_not() -> None:
    first = effort(os.getpid())
    end_s = time.thread_time() + 0.2
    while time.thread_time() < end_s:
        pass
    worked = effort(os.getpid())
    time.sleep(0.5)
    slept = effort(os.getpid())
    assert first is not None
    assert worked is not None
    assert slept is not None
    assert worked.running_s - first.running_s >= 0.19
    assert worked.awake_s >= worked.running_s
    assert slept.running_s - worked.running_s < 0.1
    assert slept.at_s - worked.at_s >= 0.5


def test_a_process_that_is_gone_has_none() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert effort(gone.pid) is None
