"""The error tree and the table of exit codes."""

from __future__ import annotations

import inspect

import pytest

import aimaster.errors as errors
from aimaster.errors import EXIT_CODES, AimasterError, ExitCode, PortInUse


def classes() -> list[type[AimasterError]]:
    found = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    return [value for value in found if issubclass(value, AimasterError)]


def test_every_code_has_one_row() -> None:
    assert sorted(row.code for row in EXIT_CODES) == sorted(ExitCode)
    assert [row.code for row in EXIT_CODES] == sorted(row.code for row in EXIT_CODES)


@pytest.mark.parametrize("kind", classes(), ids=lambda kind: kind.__name__)
def test_every_class_has_a_documented_code(kind: type[AimasterError]) -> None:
    assert kind.exit_code in {row.code for row in EXIT_CODES}
    assert kind.exit_code is not ExitCode.FINISHED


def test_message_says_what_where_and_what_next() -> None:
    error = PortInUse("the port is taken", where="127.0.0.1:5", next_step="give\nanother", facts={"port": 5})
    assert str(error).splitlines() == ["the port is taken: 127.0.0.1:5", "  give", "  another"]
    assert error.facts["port"] == 5
    assert str(AimasterError("plain")) == "plain"


def test_facts_are_frozen() -> None:
    with pytest.raises(TypeError):
        PortInUse("x", facts={"port": 5}).facts["port"] = 6  # type: ignore[index]
