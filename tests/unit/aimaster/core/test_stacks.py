"""What a stack means, and how ranks with equal ones are folded."""

from __future__ import annotations

import pytest

from aimaster.core.sights import STACK_CHARS_MAX, Wait
from aimaster.core.stacks import Frame, fold, in_loader, kind_of, ranges, text_of

SITE = "/v/lib/python3.11/site-packages"


def frames(*rows: str) -> tuple[Frame, ...]:
    """``name path`` per row, innermost first; ``@`` stands for site-packages."""
    pairs = (row.split(" ") for row in rows)
    return tuple(Frame(name=name, path=path.replace("@", SITE), line=1) for name, path in pairs)


@pytest.mark.parametrize(
    ("rows", "wait", "where"),
    [
        ((), Wait.UNKNOWN, ""),
        (("<module> /a/train.py",), Wait.OTHER, "<module> (train.py:1)"),
        (("recv @/torch/distributed/distributed_c10d.py", "f /a/t.py"), Wait.COLLECTIVE, "recv (distrib"),
        (
            ("_log.<locals>.wrapper @/torch/distributed/c10d_logger.py", "barrier @/torch/distributed/x.py"),
            Wait.COLLECTIVE,
            "barrier (x.py:1)",
        ),
        (("_engine_run_backward @/torch/autograd/graph.py", "f /a/t.py"), Wait.COLLECTIVE, "_engine_run"),
        (("all_reduce @/deepspeed/comm/comm.py",), Wait.COLLECTIVE, "all_reduce"),
        (("f /a/mine.py", "_engine_run_backward @/torch/autograd/graph.py"), Wait.OTHER, "f (mine.py:1)"),
        (("write @/torch/distributed/checkpoint/filesystem.py",), Wait.OTHER, "write (filesystem.py:1)"),
        (("readinto /usr/lib/python3.11/socket.py", "put /a/up.py"), Wait.OTHER, "readinto (socket.py:1)"),
        (("Pdb.interaction /usr/lib/python3.11/pdb.py", "f /a/t.py"), Wait.DEBUGGER, "Pdb.interaction"),
        (
            ("__exit__ /usr/lib/python3.11/contextlib.py", "gather @/torch/distributed/x.py"),
            Wait.COLLECTIVE,
            "",
        ),
    ],
)
def test_a_stack_says_what_its_thread_waits_for(rows: tuple[str, ...], wait: Wait, where: str) -> None:
    found, place = kind_of(frames(*rows))
    assert found is wait
    assert place.startswith(where)


def test_a_thread_that_waits_for_data_is_known() -> None:
    inside = "_MultiProcessingDataLoaderIter._try_get_data @/torch/utils/data/dataloader.py"
    assert in_loader(frames("select /usr/lib/python3.11/selectors.py", inside, "f /a/t.py"))
    assert not in_loader(frames("select /usr/lib/python3.11/selectors.py", "f /a/dataloader.py"))


def test_a_long_stack_loses_its_outer_end() -> None:
    text = text_of(frames(*(f"f{number} /a/{'x' * 90}.py" for number in range(100))))
    assert len(text) <= STACK_CHARS_MAX
    assert text.startswith("f0 ")


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 7], "0-2,7"), ([5, 4, 4, 9, 8], "4-5,8-9")]
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert ranges(ranks) == text


def test_the_largest_group_comes_first() -> None:
    keys = {0: ("b",), 1: ("a",), 2: ("b",), 3: ("c",)}
    assert fold(keys) == [(("b",), [0, 2]), (("a",), [1]), (("c",), [3])]
