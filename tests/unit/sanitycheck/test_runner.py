"""The engine with real children: what hangs, dies or lies never becomes a pass and never stays behind."""

from __future__ import annotations

import dataclasses
import importlib
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import sanitycheck
from sanitycheck.check import Check, Lane
from sanitycheck.errors import UnknownCheckError, UsageError
from sanitycheck.options import Options
from sanitycheck.process import probe_environment
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Level, Result, Verdict
from sanitycheck.runner import run_checks

PROBES = """
import ctypes, os, pathlib, resource, signal, subprocess, sys, time
from dataclasses import dataclass
from sanitycheck.errors import NotApplicableError, NotPermittedError, ToolMissingError

@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    text: str = ""
    number: int = 0

def fine(request):
    return Facts(text=request.check, number=os.getpid())

def environment(request):
    names = ("RANK", "AIMASTER_AGENT", "TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS")
    names += ("TORCH_DEVICE_BACKEND_AUTOLOAD", "OTHER")
    return Facts(text=",".join(os.environ.get(name, "-") for name in names))

def group(request):
    return Facts(text="alone" if os.getpgrp() == os.getsid(0) == os.getpid() else "not", number=os.getppid())

def hang(request):
    request.tell("waiting for nothing")
    signal.pause()

def stubborn(request):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    request.tell("ignoring SIGTERM")
    while True:
        signal.pause()

def tidy(request):
    place = pathlib.Path(request.options.ckpt_path)
    place.write_text(str(os.getpid()))
    try:
        request.tell("file made")
        signal.pause()
    finally:
        place.unlink()

def family(request):
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    pathlib.Path(request.options.ckpt_path).write_text(str(child.pid))
    return Facts(number=child.pid)

def family_hangs(request):
    family(request)
    signal.pause()

def crash(request):
    request.tell("reading a null pointer")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.string_at(0)

def killed(request):
    os.kill(os.getpid(), signal.SIGKILL)

def leaves(request):
    print("something went wrong here", file=sys.stderr, flush=True)
    os._exit(7)

def broken(request):
    raise ZeroDivisionError("by our own fault")

def forbidden(request):
    raise PermissionError(13, "Permission denied", "/secret")

def no_tool(request):
    raise ToolMissingError("no such tool")

def not_here(request):
    raise NotApplicableError("no such thing")

def other_facts(request):
    @dataclass
    class Other:
        strange: int = 1
    return Other()

def huge(request):
    return Facts(text="x" * (3 << 20))

def endless(request):
    while True:
        os.write(2, b"x" * 65536)

def chatty(request):
    for _ in range(2000):
        print("y" * 100)
        print("z" * 100, file=sys.stderr)
    return Facts(text="still here")
"""


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = f"probes_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(PROBES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return importlib.import_module(name)


MakeCheck = Callable[..., Check]


@pytest.fixture
def make(probes: ModuleType) -> MakeCheck:
    def make_check(name: str, **changes: object) -> Check:
        check = Check(
            id=f"test.{name}",
            level=Level.QUICK,
            scope="node",
            title=name,
            about="",
            collect=getattr(probes, name),
            facts=probes.Facts,
            judge=lambda facts, options: (
                Finding(verdict=Verdict.PASS, reason=Reason.DISK, facts=dataclasses.asdict(facts)),
            ),
            reasons=(Reason.DISK,),
            deadline_s=60.0,
        )
        return dataclasses.replace(check, **changes)  # type: ignore[arg-type]

    return make_check


def one(check: Check, options: Options | None = None, *, timeout_s: float = 90.0) -> Result:
    (result,) = run_checks([check], options or Options(), timeout_s=timeout_s)
    return result


def is_alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(happened: Callable[[], bool], *, within_s: float = 60.0) -> None:
    """Poll for what no signal tells of."""
    ends = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < ends, "it did not happen"
        threading.Event().wait(0.02)


def cancelled_when(happened: Callable[[], bool], check: Check, options: Options) -> Result:
    """Run a check that hangs, and cancel it when it has got to a certain point."""
    cancel = threading.Event()

    def watch() -> None:
        wait_until(happened)
        cancel.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        (result,) = run_checks([check], options, timeout_s=90.0, cancel=cancel)
    finally:
        watcher.join()
    return result


def test_facts_come_back_from_another_process(make: MakeCheck) -> None:
    found = one(make("fine"))
    assert found.verdict is Verdict.PASS
    assert found.findings[0].facts["text"] == "test.fine"
    assert found.findings[0].facts["number"] != os.getpid()


def test_a_probe_is_no_worker(make: MakeCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("AIMASTER_AGENT", "/somewhere")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    monkeypatch.setenv("OTHER", "kept")
    assert one(make("environment")).findings[0].facts["text"] == "-,-,-,1,0,kept"


def test_a_probe_leads_a_group_of_its_own(make: MakeCheck) -> None:
    found = one(make("group"))
    assert found.findings[0].facts == {"text": "alone", "number": os.getpid()}


def test_a_file_in_the_working_folder_cannot_replace_a_module(
    make: MakeCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    for name in ("json.py", "dataclasses.py", "sanitycheck.py", "torch.py", "sitecustomize.py"):
        (tmp_path / "work" / name).write_text("raise SystemExit('imported the wrong one')")
    monkeypatch.chdir(tmp_path / "work")
    assert one(make("fine")).verdict is Verdict.PASS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "phase"), [("hang", "waiting for nothing"), ("stubborn", "ignoring SIGTERM")]
)
def test_a_hang_is_ended_and_says_where(make: MakeCheck, name: str, phase: str) -> None:
    found = one(make(name, deadline_s=3.0))
    assert found.verdict is Verdict.UNKNOWN
    assert found.reason is Reason.TIMED_OUT
    assert found.findings[0].facts["phase"] == phase


def test_a_hang_is_a_failure_where_that_is_what_the_check_looks_for(make: MakeCheck) -> None:
    found = one(make("hang", deadline_s=1.0, if_hung=Verdict.FAIL))
    assert (found.verdict, found.reason, found.blocking) == (Verdict.FAIL, Reason.HUNG, False)


def test_a_hang_that_was_not_given_its_time_is_only_unknown(make: MakeCheck) -> None:
    found = one(make("hang", if_hung=Verdict.FAIL), timeout_s=1.5)
    assert (found.verdict, found.reason) == (Verdict.UNKNOWN, Reason.TIMED_OUT)


def test_a_probe_that_is_ended_removes_what_it_made(make: MakeCheck, tmp_path: Path) -> None:
    place = tmp_path / "made"
    found = cancelled_when(lambda: place.exists(), make("tidy"), Options(ckpt_path=str(place)))
    assert found.reason is Reason.CANCELLED
    assert not place.exists()


@pytest.mark.parametrize("name", ["family", "family_hangs"])
def test_children_of_a_probe_do_not_outlive_it(make: MakeCheck, tmp_path: Path, name: str) -> None:
    place = tmp_path / "pid"
    written = lambda: place.exists() and place.read_text() != ""  # noqa: E731
    if name == "family":
        one(make(name), Options(ckpt_path=str(place)))
    else:
        cancelled_when(written, make(name), Options(ckpt_path=str(place)))
    child = int(place.read_text())
    wait_until(lambda: not is_alive(child))


def test_a_crash_is_not_a_pass_and_says_how(make: MakeCheck) -> None:
    found = one(make("crash"))
    assert (found.verdict, found.reason) == (Verdict.UNKNOWN, Reason.CRASHED)
    assert found.findings[0].facts["how"] == "SIGSEGV"
    assert found.findings[0].facts["phase"] == "reading a null pointer"


def test_a_crash_in_a_computing_check_fails_without_blocking(make: MakeCheck) -> None:
    found = one(make("crash", if_crashed=Verdict.FAIL))
    assert (found.verdict, found.blocking) == (Verdict.FAIL, False)


def test_a_probe_that_somebody_killed_says_nothing_about_the_node(make: MakeCheck) -> None:
    found = one(make("killed", if_crashed=Verdict.FAIL))
    assert found.verdict is Verdict.UNKNOWN
    assert found.findings[0].facts["how"] == "SIGKILL"


@pytest.mark.parametrize(
    ("name", "verdict", "reason", "message"),
    [
        ("leaves", Verdict.UNKNOWN, Reason.CRASHED, "something went wrong here"),
        ("broken", Verdict.UNKNOWN, Reason.PROBE_BROKEN, "ZeroDivisionError"),
        ("forbidden", Verdict.UNKNOWN, Reason.NOT_PERMITTED, "/secret"),
        ("no_tool", Verdict.UNKNOWN, Reason.TOOL_MISSING, "no such tool"),
        ("not_here", Verdict.SKIPPED, Reason.NOT_APPLICABLE, "no such thing"),
        ("other_facts", Verdict.UNKNOWN, Reason.PROBE_BROKEN, "unknown field 'strange'"),
        ("huge", Verdict.UNKNOWN, Reason.PROBE_BROKEN, "longer than"),
    ],
)
def test_what_could_not_be_looked_at_is_never_a_pass(
    make: MakeCheck, name: str, verdict: Verdict, reason: Reason, message: str
) -> None:
    found = one(make(name))
    assert (found.verdict, found.reason) == (verdict, reason)
    assert message in str(found.findings[0].facts["message"])


def test_output_of_libraries_neither_blocks_a_probe_nor_reaches_the_caller(
    make: MakeCheck, capfd: pytest.CaptureFixture[str]
) -> None:
    assert one(make("chatty")).findings[0].facts["text"] == "still here"
    assert capfd.readouterr() == ("", "")


def test_a_probe_that_never_stops_talking_has_a_deadline_too(make: MakeCheck) -> None:
    assert one(make("endless", deadline_s=1.0)).reason is Reason.TIMED_OUT


def test_one_bad_probe_does_not_touch_the_others(make: MakeCheck) -> None:
    checks = [make("crash"), make("hang", deadline_s=2.0), make("fine"), make("broken")]
    verdicts = [result.verdict for result in run_checks(checks, Options(), timeout_s=90.0)]
    assert verdicts == [Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.PASS, Verdict.UNKNOWN]


def test_measuring_probes_wait_for_the_light_ones_and_get_no_time_when_it_is_over(make: MakeCheck) -> None:
    checks = [make("hang"), make("fine", lane=Lane.CPU)]
    hung, waiting = run_checks(checks, Options(), timeout_s=2.0)
    assert hung.reason is Reason.TIMED_OUT
    assert (waiting.verdict, waiting.reason) == (Verdict.UNKNOWN, Reason.NO_TIME_LEFT)


def test_cancelling_ends_the_probes(make: MakeCheck) -> None:
    cancel = threading.Event()
    timer = threading.Timer(1.0, cancel.set)
    timer.start()
    running, waiting = run_checks(
        [make("hang"), make("fine", lane=Lane.CPU)], Options(), timeout_s=90.0, cancel=cancel
    )
    timer.join()
    assert running.reason is Reason.CANCELLED
    assert waiting.reason is Reason.CANCELLED


def test_a_caller_that_reaps_every_child_takes_nothing_from_the_result(make: MakeCheck) -> None:
    """An agent that is a child subreaper may take our exit statuses."""

    def reap(signum: int, frame: object) -> None:
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return

    before = signal.signal(signal.SIGCHLD, reap)
    try:
        results = run_checks(
            [make("fine"), make("not_here"), make("leaves"), make("hang", deadline_s=1.0)],
            Options(),
            timeout_s=90.0,
        )
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert [result.verdict for result in results] == [
        Verdict.PASS,
        Verdict.SKIPPED,
        Verdict.UNKNOWN,
        Verdict.UNKNOWN,
    ]


def test_works_in_a_thread_beside_other_threads(make: MakeCheck) -> None:
    found: list[Result] = []
    threads = [threading.Thread(target=lambda: found.append(one(make("fine")))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.verdict for result in found] == [Verdict.PASS] * 3


def test_an_exception_of_the_caller_ends_the_run_and_every_probe(make: MakeCheck) -> None:
    class Stop(Exception):
        pass

    def stop(result: Result) -> None:
        raise Stop

    with pytest.raises(Stop):
        sanitycheck.run(level="instant", on_result=stop)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)  # nothing left, not even to reap


def test_the_probe_dies_with_a_caller_that_is_killed(probes: ModuleType, tmp_path: Path) -> None:
    place = tmp_path / "pid"
    code = textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        import {probes.__name__} as probes
        from sanitycheck.check import Check
        from sanitycheck.options import Options
        from sanitycheck.result import Level
        from sanitycheck.runner import run_checks
        check = Check(id="t", level=Level.QUICK, scope="node", title="", about="", collect=probes.tidy,
                      facts=probes.Facts, judge=None, reasons=(), deadline_s=300.0)
        run_checks([check], Options(ckpt_path={str(place)!r}), timeout_s=300.0)
    """)
    caller = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: place.exists() and place.read_text() != "")
        probe = os.pidfd_open(int(place.read_text()))
    finally:
        caller.kill()
        caller.wait()
    assert select.select([probe], [], [], 60.0)[0], "the probe still runs"
    os.close(probe)


def test_results_are_told_as_they_come_and_stand_in_the_order_of_the_catalogue() -> None:
    started: list[str] = []
    told: list[str] = []
    report = sanitycheck.run(
        level="quick",
        options=Options(only=("sw.versions", "host.limits", "host.boot")),
        on_start=lambda check: started.append(check.id),
        on_result=lambda result: told.append(result.check),
    )
    assert [result.check for result in report.results] == ["host.limits", "host.boot", "sw.versions"]
    assert sorted(told) == sorted(started) == ["host.boot", "host.limits", "sw.versions"]


def test_what_does_not_exist_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no level 'deepest'"):
        sanitycheck.run(level="deepest")
    with pytest.raises(UnknownCheckError, match=r"host\.disc.*host\.disk"):
        sanitycheck.run(options=Options(only=("host.disc",)))
    with pytest.raises(UsageError, match="no check is left"):
        sanitycheck.run(options=Options(only=("host.disk",), skip=("host.disk",)))
    with pytest.raises(UsageError, match="time limit"):
        sanitycheck.run(timeout_s=0)


def test_a_probe_keeps_the_mark_of_its_owner_and_nothing_that_makes_a_worker() -> None:
    given = {"AIMASTER_OWNER": "d1.agent", "AIMASTER_AGENT": "/run/agent.sock", "RANK": "0", "HOME": "/root"}
    kept = probe_environment(given, threads=1)
    assert {name: kept.get(name) for name in given} == {
        "AIMASTER_OWNER": "d1.agent",
        "AIMASTER_AGENT": None,
        "RANK": None,
        "HOME": "/root",
    }
