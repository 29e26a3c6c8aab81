"""The line that says what can be seen of workers here, and when they are said to hang."""

from __future__ import annotations

from aimaster.agent.outlook import look_out
from aimaster.agent.spy import Spy
from aimaster.cli.run import config_from
from aimaster.config import RunConfig


def config(*words: str) -> RunConfig:
    found = config_from([*words, "train.py"], {})
    assert found is not None
    return found


def spy(trouble: str = "") -> Spy:
    made = Spy(own=lambda pid: None, disown=lambda pid: None)
    made.trouble = trouble
    return made


def test_what_is_seen_and_the_limits_are_said_in_one_line() -> None:
    line = str(look_out(config("--hang-busy-timeout", "90"), {}, spy()))
    assert "\n" not in line
    assert line.startswith("watching steps, processes")
    assert "3 s without a step" in line
    assert "90 s of work" in line


def test_what_is_not_seen_is_said_with_its_reason() -> None:
    line = str(
        look_out(config("--no-hang-detection"), {"AIMASTER_HOOK": "0"}, spy("py-spy is not installed"))
    )
    for part in (
        "not steps (AIMASTER_HOOK=0)",
        "stacks (py-spy is not installed)",
        "hangs (--no-hang-detection)",
    ):
        assert part in line
    assert "without a step" not in line
