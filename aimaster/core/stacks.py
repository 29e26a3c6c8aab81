"""From Python stacks to what they mean, and to groups that people can read. Pure functions on text.

A frame is ``name (path:line)``, innermost first. What a main thread waits for is told by the first frame
from inside that one of the tables knows; frames of the standard library in between (a wrapper, a context
manager) say nothing. The tables name public modules and functions only, so that a new version of a library
moves a rank from *collective* to *other* at worst: the limit is longer then, and no verdict is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aimaster.core.sights import STACK_CHARS_MAX, WHERE_CHARS_MAX, Wait

GROUPS_MAX = 16
"""Most groups of equal stacks that are kept; the others are counted."""

_DEBUGGERS = (
    "/pdb.py",
    "/bdb.py",
    "/ipdb/",
    "/pudb/",
    "/debugpy/",
    "/pydevd",
    "/IPython/terminal/",
    "/code.py",
)
_LOADER = "/torch/utils/data/dataloader.py"
_LOADER_WAITS = frozenset({"_try_get_data", "_get_data", "_next_data"})
_COMMUNICATION = ("/torch/distributed/", "/deepspeed/comm/", "/horovod/", "/mpi4py/")
_NOT_COMMUNICATION = (
    "/torch/distributed/checkpoint/",
    "/torch/distributed/elastic/",
    "/torch/distributed/run.py",
    "/torch/distributed/launcher/",
)
"""Parts of torch.distributed that read, write and start things."""
_BACKWARD = frozenset({"_engine_run_backward"})
"""Where backward waits: of a rank that uses no processor, for the reducer's collectives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One call."""

    name: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.path}:{self.line})"


def short(frame: Frame) -> str:
    """The frame in a few words: function and file, no folder."""
    return f"{frame.name} ({frame.path.rpartition('/')[2]}:{frame.line})"[:WHERE_CHARS_MAX]


def text_of(frames: Sequence[Frame]) -> str:
    """A stack as lines, innermost first, cut at its outer end."""
    lines: list[str] = []
    size = 0
    for frame in frames:
        line = str(frame)
        size += len(line) + 1
        if size > STACK_CHARS_MAX:
            break
        lines.append(line)
    return "\n".join(lines)


def in_loader(frames: Sequence[Frame]) -> bool:
    """Whether the thread waits for a data worker."""
    return any(f.path.endswith(_LOADER) and f.name.rpartition(".")[2] in _LOADER_WAITS for f in frames)


def in_debugger(frames: Sequence[Frame]) -> bool:
    """Whether a person is at the prompt."""
    return any(mark in frame.path for frame in frames for mark in _DEBUGGERS)


def kind_of(frames: Sequence[Frame]) -> tuple[Wait, str]:
    """What a main thread waits for, and where, by its stack alone.

    Args:
        frames: innermost first; empty where none could be read.
    """
    if not frames:
        return Wait.UNKNOWN, ""
    if in_debugger(frames):
        return Wait.DEBUGGER, short(frames[0])
    for frame in frames:
        if _communicates(frame):
            return Wait.COLLECTIVE, short(_operation(frames))
        if not _says_nothing(frame):
            return Wait.OTHER, short(frame)
    return Wait.OTHER, short(frames[0])


def _communicates(frame: Frame) -> bool:
    if frame.name.rpartition(".")[2] in _BACKWARD and "/torch/autograd/" in frame.path:
        return True
    inside = any(mark in frame.path for mark in _COMMUNICATION)
    return inside and not any(mark in frame.path for mark in _NOT_COMMUNICATION)


def _says_nothing(frame: Frame) -> bool:
    """Frames between a collective and whoever called it."""
    return frame.path.endswith(("/contextlib.py", "/functools.py", "/torch/utils/_contextlib.py"))


def _operation(frames: Sequence[Frame]) -> Frame:
    """The frame that names the operation: the innermost that is no wrapper."""
    for frame in frames:
        if frame.name.rpartition(".")[2] not in ("wrapper", "wait") and not _says_nothing(frame):
            return frame
    return frames[0]


def ranges(ranks: Iterable[int]) -> str:
    """Ranks as ranges: ``0-3,7``."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    begin = 0
    for index, rank in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != rank + 1:
            first = ordered[begin]
            parts.append(str(first) if first == rank else f"{first}-{rank}")
            begin = index + 1
    return ",".join(parts)


def fold(keys: Mapping[int, tuple[str, ...]]) -> list[tuple[tuple[str, ...], list[int]]]:
    """Ranks with equal keys together, the largest group first, then by lowest rank."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(keys):
        groups.setdefault(keys[rank], []).append(rank)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[1][0]))
