"""What a failed worker said: its exception in a few lines, and a digest that is equal for equal failures.

Pure functions on text. Two sources, best first: the error file that torchelastic's ``@record`` writes, and
the last lines of the error output, where Python prints its traceback.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, replace

from aimaster.core.events import ERROR_TEXT_CHARS_MAX

ERROR_FILE_BYTES_MAX = 1024 * 1024
"""A longer error file is not read; the output says enough."""
_HEADER = "Traceback (most recent call last):"
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_FRAME = re.compile(r'^ *File "(?P<file>.*)", line (?P<line>\d+)(?:, in (?P<name>.*))?$')
_EXCEPTION = re.compile(
    r"^(?P<type>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Warning|Exit|Failure))(?::|$)"
)
_CHANGING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Text for people and digest for comparison; both empty where nothing was said."""

    text: str = ""
    digest: str = ""


def from_error_file(raw: bytes) -> Failure | None:
    """What torchelastic's error file says; None if it is not one."""
    try:
        message = json.loads(raw)["message"]
        if isinstance(message, str):
            return Failure(text=_cut(message), digest=_digest([_CHANGING.sub("#", message)]))
        extra = message.get("extraInfo", {})
        trace = str(extra.get("py_callstack") or message["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return from_output(trace) or Failure(text=_cut(trace), digest=_digest([_CHANGING.sub("#", trace)]))


def from_output(text: str) -> Failure | None:
    """The last traceback in some output; None if there is none."""
    lines = _RANK_PREFIX.sub("", text).split("\n")
    begin = max((index for index, line in enumerate(lines) if line.strip() == _HEADER), default=-1)
    if begin < 0:
        # A syntax error in the script itself has frames and no header.
        begin = next((index for index, line in enumerate(lines) if _FRAME.match(line)), -1)
    if begin < 0:
        return None
    end = _exception_line(lines, begin)
    if end is None:
        return None
    frames = [match for match in map(_FRAME.match, lines[begin:end]) if match]
    marks = [f"{match['file']}:{match['line']}:{match['name']}" for match in frames]
    marks.append(_CHANGING.sub("#", lines[end]))
    body = [lines[end], *lines[begin:end], *lines[end + 1 :]]
    return Failure(text=_cut("\n".join(body).rstrip()), digest=_digest(marks))


def from_silence(stdout: str, stderr: str) -> Failure:
    """Where there is no traceback: the last lines of the output, and no digest."""
    text = stderr.strip() or stdout.strip()
    return Failure(text=text[-ERROR_TEXT_CHARS_MAX:])


def led_by(sentence: str, said: Failure) -> Failure:
    """What was said, with a line of the agent's own in front; the digest stays the failure's own."""
    return replace(said, text=_cut(sentence + said.text)) if sentence else said


def _exception_line(lines: list[str], begin: int) -> int | None:
    """Index of the line that names the exception: the first unindented one below the frames."""
    for index in range(begin + 1, len(lines)):
        line = lines[index]
        if line and not line[0].isspace() and (_EXCEPTION.match(line) or ":" in line or line.isidentifier()):
            return index
    return None


def _cut(text: str) -> str:
    if len(text) <= ERROR_TEXT_CHARS_MAX:
        return text
    half = ERROR_TEXT_CHARS_MAX // 2 - 4
    return f"{text[:half]}\n...\n{text[-half:]}"


def _digest(marks: list[str]) -> str:
    return hashlib.blake2s("\n".join(marks).encode("utf-8", "replace"), digest_size=8).hexdigest()
