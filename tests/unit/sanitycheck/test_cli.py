"""The command: exit codes, what goes to which stream, JSON from the same object, drills, bad input."""

from __future__ import annotations

import json
import os
import pty
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from sanitycheck.catalogue import CHECKS
from sanitycheck.cli import EXIT_CODES, main
from sanitycheck.result import Report

PASSIVE = "host.limits,host.disk,sw.versions"


def run_cli(*args: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sanitycheck", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, **changes)


def drill(folder: Path, text: str, name: str = "drill.yaml") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_coverage_comes_first_and_the_verdict_last(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--only", PASSIVE]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "3 of 3 checks looked" in lines[0]
    assert lines[-1].startswith("verdict: ")
    assert err == ""
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("host.disk: {facts: {}}", 0, "verdict: pass"),
        ("host.disk: {facts: {volumes: [{bytes_free: 1073741824}]}}", 0, "verdict: warn"),
        ("host.disk: {facts: {volumes: [{bytes_free: 1}]}}", 3, "needs attention"),
        ("host.disk: {facts: {temp_found: false}}", 3, "training would fail or compute wrongly here"),
        (
            "host.disk: {cannot: {kind: not_permitted, message: denied}}",
            4,
            "could not be looked at: host.disk",
        ),
        ("host.limits: {facts: {}}", 4, "verdict: unknown"),  # the only check that runs is skipped
    ],
)
def test_exit_codes(
    script: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = drill(tmp_path, f"schema: 1\nchecks:\n  {script}\n")
    assert main(["run", "--only", "host.disk", "--drill", path]) == code
    assert said in capsys.readouterr().out
    assert code in EXIT_CODES


def test_trouble_is_followed_by_the_way_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = drill(
        tmp_path, '{"schema": 1, "checks": {"host.limits": {"facts": {"nofile_soft": 256}}}}', "d.json"
    )
    assert main(["run", "--only", "host.limits", "--drill", path]) == 0
    assert "-> ulimit -n 1024" in capsys.readouterr().out


def test_json_and_text_are_the_same_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(["run", "--only", PASSIVE, "--json", str(path)]) == 0
    text = capsys.readouterr().out
    report = Report.from_json(path.read_text())
    assert [result.check for result in report.results] == ["host.limits", "host.disk", "sw.versions"]
    for item in json.loads(path.read_text())["results"]:
        assert item["findings"][0]["summary"] in text
    assert os.listdir(tmp_path) == ["report.json"]


def test_json_on_stdout_is_nothing_but_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--only", PASSIVE, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["schema"] == 1
    assert err == ""


def test_json_to_a_pipe_goes_into_it_and_leaves_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert main(["run", "--only", "host.limits", "--json", str(pipe)]) == 0
        assert json.loads(os.read(reader, 1 << 16))["schema"] == 1
    finally:
        os.close(reader)
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


@pytest.mark.parametrize(
    "args",
    [
        ("run", "--levle", "quick"),
        ("run", "--level", "bottomless"),
        ("run", "--only", "host.disc"),
        ("run", "--skip", "nothing.here"),
        ("run", "--only", "host.disk", "--skip", "host.disk"),
        ("run", "--timeout", "0"),
        ("run", "--timeout", "soon"),
        ("run", "--expect-gpus", "-1"),
        ("run", "--ckpt-path", ""),
        ("run", "--workers", "0"),
        ("run", "--drill", "/nowhere/drill.yaml"),
        ("run", "--baseline", "/nowhere/baseline.json"),
        ("run", "--fingerprint", "/nowhere/versions.json"),
        ("run", "--only", "host.limits", "--json", "/nowhere/report.json"),
        ("explain", "host.disc"),
        ("explain",),
        (),
    ],
)
def test_bad_usage_is_one_message_and_exit_code_two(args: tuple[str, ...]) -> None:
    done = run_cli(*args)
    assert done.returncode == 2
    assert done.stdout == "" or "--json" in args
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()


@pytest.mark.parametrize(
    "text",
    [
        "checks: {}",
        "schema: 2\nchecks: {}",
        "schema: 1\nchecks: {host.disc: {facts: {}}}",
        "schema: 1\nchecks: {host.disk: {facts: {strange: 1}}}",
        "schema: 1\nchecks: {host.disk: {facts: {}, hung: {}}}",
        "schema: 1\nchecks: {host.disk: {exploded: {}}}",
        "schema: 1\nchecks: {host.disk: 7}",
        "a: [",
        "- 1",
    ],
)
def test_a_bad_drill_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = drill(tmp_path, text)
    assert main(["run", "--drill", path]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert path in err


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--baseline", '{"cpu.gemm.gflops": "fast"}'),
        ("--baseline", '{"cpu.gemm.gflops": true}'),
        ("--fingerprint", '{"torch": 2}'),
        ("--fingerprint", "[]"),
        ("--fingerprint", "{"),
    ],
)
def test_bad_side_files_are_named(
    option: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "file.json"
    path.write_text(text)
    assert main(["run", "--only", "host.limits", option, str(path)]) == 2
    assert str(path) in capsys.readouterr().err


def test_help_names_every_exit_code() -> None:
    for args in (("--help",), ("run", "--help")):
        done = run_cli(*args)
        assert done.returncode == 0
        for code, text in EXIT_CODES.items():
            assert f"{code}" in done.stdout
            assert text in done.stdout


def test_list_and_explain_know_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [
        check.id for check in CHECKS
    ]
    assert main(["list", "--json"]) == 0
    assert [row["id"] for row in json.loads(capsys.readouterr().out)["checks"]] == [
        check.id for check in CHECKS
    ]
    for check in CHECKS:
        assert main(["explain", check.id]) == 0
        assert f"level {check.level.value}" in capsys.readouterr().out


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m sanitycheck explain gpu.inventory | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout.startswith("gpu.inventory")
    assert done.stderr == ""


def test_a_terminal_gets_a_table_while_it_runs_and_the_report_after_it() -> None:
    parent, child = pty.openpty()
    command = [sys.executable, "-m", "sanitycheck", "run", "--only", PASSIVE]
    with subprocess.Popen(
        command, stdout=child, stderr=child, env={**os.environ, "TERM": "xterm"}
    ) as process:
        os.close(child)
        shown = b""
        while True:
            try:
                part = os.read(parent, 4096)
            except OSError:  # EIO: the other end is closed
                break
            if not part:
                break
            shown += part
    os.close(parent)
    assert process.returncode == 0
    assert b"\x1b[" in shown
    assert b"3 of 3 checks looked" in shown.rsplit(b"\x1b", 1)[-1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_probes_and_says_so(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "sanitycheck", "run", "--only", "num.bitwise,coll.intra,cpu.gemm"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    ends = time.monotonic() + 60
    while not children.read_text().split():
        assert process.poll() is None
        assert time.monotonic() < ends
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "Traceback" not in err


def test_our_own_error_is_not_a_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such thing should happen")

    monkeypatch.setattr("sanitycheck.cli.running.run", broken)
    assert main(["run"]) == 70
    assert "please report" in capsys.readouterr().err
