"""Children of a probe: answers in order, no answer, an error, a crash that the engine must see."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from sanitycheck.facts.forked import run_forked


def probe(body: str) -> subprocess.CompletedProcess[str]:
    """Run a body in a fresh interpreter, as a probe is: forking is for such processes only."""
    code = "import os, signal, sys\nfrom sanitycheck.facts.forked import run_forked\n" + textwrap.dedent(body)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=90
    )


def test_answers_come_in_order() -> None:
    done = probe("print(run_forked(lambda index: {'square': index * index}, count=4, deadline_s=60))")
    assert done.stdout.strip() == "[{'square': 0}, {'square': 1}, {'square': 4}, {'square': 9}]"


@pytest.mark.slow
def test_one_that_hangs_is_ended_and_the_others_count() -> None:
    done = probe(
        """
        def work(index):
            if index == 0:
                signal.pause()
            return {"pid": os.getpid()}
        first, second = run_forked(work, count=2, deadline_s=3)
        print(first, second["pid"] != os.getpid())
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            print("nothing left")
        """
    )
    assert done.stdout.split("\n")[:2] == ["None True", "nothing left"]


def test_an_error_in_a_child_is_told() -> None:
    done = probe(
        """
        from sanitycheck.errors import ChildFailedError
        try:
            run_forked(lambda index: {"quotient": 1 // index}, count=2, deadline_s=60)
        except ChildFailedError as error:
            print(error)
        """
    )
    assert done.stdout.startswith("child 0: ZeroDivisionError")


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_crash_of_a_child_is_a_crash_of_the_probe(number: signal.Signals) -> None:
    done = probe(
        f"""
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        run_forked(lambda index: os.kill(os.getpid(), {number.value}), count=2, deadline_s=60)
        """
    )
    assert done.returncode == -number


def test_a_child_that_somebody_kills_only_gives_no_answer() -> None:
    done = probe("print(run_forked(lambda index: os.kill(os.getpid(), 9), count=1, deadline_s=60))")
    assert done.stdout.strip() == "[None]"


def test_no_children_are_no_answers() -> None:
    assert run_forked(lambda index: {}, count=0, deadline_s=1) == []
