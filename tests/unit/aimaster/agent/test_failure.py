"""What is made of the output of a failed worker."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from aimaster.agent import failure
from aimaster.core.events import ERROR_TEXT_CHARS_MAX

SCRIPTS = {
    "plain": "def f():\n    raise RuntimeError(f'lost {object()}')\nf()",
    "chained": "try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise OSError('disk 3') from e",
    "syntax": "x = = 3",
    "assertion": "assert 1 == 2",
    "group": "class Own(Exception): pass\nraise Own('several\\nlines\\nof text')",
    "import": "import no_such_module",
}


def _output(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_equal_failures_have_equal_digests_and_others_not(name: str) -> None:
    once, again = (failure.from_output(_output(SCRIPTS[name])) for _ in range(2))
    assert once is not None
    assert again is not None
    assert once.digest == again.digest != ""
    others = {failure.from_output(_output(text)) for key, text in SCRIPTS.items() if key != name}
    assert once.digest not in {other.digest for other in others if other}


def test_the_text_begins_with_the_exception() -> None:
    found = failure.from_output("noise\n" + _output(SCRIPTS["chained"]) + "more noise\n")
    assert found is not None
    assert found.text.startswith("OSError: disk 3\nTraceback")
    assert "ZeroDivisionError" not in found.text


def test_rank_prefixes_do_not_matter() -> None:
    bare = _output(SCRIPTS["plain"])
    prefixed = "".join(f"[rank3]: {line}\n" for line in bare.splitlines())
    one, other = failure.from_output(bare), failure.from_output(prefixed)
    assert one is not None
    assert other is not None
    assert one.digest == other.digest


def test_another_line_is_another_failure() -> None:
    one = failure.from_output(_output("raise ValueError(1)"))
    other = failure.from_output(_output("\nraise ValueError(1)"))
    assert one is not None
    assert other is not None
    assert one.digest != other.digest


@pytest.mark.parametrize(
    "text", ["", "all fine\n", "Traceback (most recent call last):\n  File", "  File x\n"]
)
def test_no_traceback(text: str) -> None:
    assert failure.from_output(text) is None


def test_silence_keeps_the_last_words_bounded() -> None:
    found = failure.from_silence("", "x" * 10_000 + "the end")
    assert found.text.endswith("the end")
    assert len(found.text) <= ERROR_TEXT_CHARS_MAX
    assert found.digest == ""


def test_torchelastic_error_file() -> None:
    trace = _output(SCRIPTS["plain"])
    raw = {
        "message": {"message": "RuntimeError: lost", "extraInfo": {"py_callstack": trace, "timestamp": "1"}}
    }
    found = failure.from_error_file(json.dumps(raw).encode())
    assert found == failure.from_output(trace)
    plain = failure.from_error_file(b'{"message": "died of cold"}')
    assert plain is not None
    assert plain.text == "died of cold"


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'{"message": 3}', b'{"message": {}}', b"\xff\xfe", b"null"]
)
def test_hostile_error_files_are_no_reports(raw: bytes) -> None:
    assert failure.from_error_file(raw) is None


def test_a_huge_message_is_cut_in_the_middle() -> None:
    found = failure.from_output(_output("raise ValueError('a' * 50_000 + 'end')"))
    assert found is not None
    assert len(found.text) <= ERROR_TEXT_CHARS_MAX
    assert found.text.startswith("ValueError: aaa")
