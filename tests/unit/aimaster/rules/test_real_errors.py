"""Rows of the table against messages that the installed libraries really print."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from aimaster.core.diagnosis import Failure, find
from aimaster.rules.table import load_rules

PROGRAM = Path(__file__).with_name("real_errors.py")
REPEATED_MIN = 20
NATIVE = {
    "segmentation_fault": "import ctypes; ctypes.string_at(0)",
    "aborted": "import os; os.abort()",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "bus_error": "import os; os.kill(os.getpid(), 7)",
    "bad_arguments": "import argparse; p = argparse.ArgumentParser(); p.add_argument('--lr', required=True); "
    "p.parse_args([])",
    "keyboard_interrupt": "raise KeyboardInterrupt",
}


@pytest.mark.slow
def test_messages_of_the_installed_libraries_are_known() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    rules = load_rules()
    wrong = {}
    for name, text in said.items():
        found = find(rules, Failure(kinds=frozenset({"worker_failed"}), exit_code=1, text=text))
        got = found.rule.name if found else ""
        if got != name.split()[0]:
            wrong[name] = (got, text)
    assert not wrong, json.dumps(wrong, indent=2)
    assert len(said) >= REPEATED_MIN


@pytest.mark.parametrize("row", NATIVE)
def test_ends_of_real_processes_are_known(row: str) -> None:
    words = [sys.executable, "-c", "import resource; resource.setrlimit(4, (0, 0))\n" + NATIVE[row]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    signal = -done.returncode if done.returncode < 0 else None
    lines = done.stderr.strip().splitlines()
    # As the agent does: the exception's own line comes first.
    text = "\n".join([*lines[-1:], *lines]) if row != "bad_arguments" else done.stderr
    code = done.returncode if signal is None else None
    if row == "keyboard_interrupt":
        signal, code = None, 1
    found = find(load_rules(), Failure(kinds=frozenset(), exit_code=code, signal=signal, text=text))
    assert found is not None
    assert found.rule.name == row
