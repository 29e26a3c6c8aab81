"""Checks that fail for a real reason: full and read-only mounts, low limits, dead mounts, a wrong clock.

What needs mounts runs in a mount namespace of its own, so that nothing of the machine is touched; it is
skipped with a reason where that is not allowed.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sanitycheck
from sanitycheck.facts.clock import NTP_UNIX_S
from sanitycheck.options import Known, Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Finding, Report, Result, Verdict

RUN = f"{sys.executable} -m sanitycheck run --json -"


def namespaces_reason() -> str:
    """Why mounts of one's own are not possible here; empty if they are."""
    try:
        done = subprocess.run(
            ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    except FileNotFoundError:
        return "unshare(1) is not installed"
    return "" if done.returncode == 0 else f"mount namespaces are not allowed: {done.stderr.strip()}"


@pytest.fixture(scope="module")
def in_namespace() -> Callable[..., Report]:
    """Run a shell script in a mount namespace; its stdout is a report."""
    reason = namespaces_reason()
    if reason:
        pytest.skip(reason)

    def run(script: str, *args: str) -> Report:
        command = ["unshare", "-m", "--propagation", "private", "sh", "-ec", script, "sh", *args]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=150)
        assert done.returncode == 0, done.stderr
        return Report.from_json(done.stdout)

    return run


def only(report: Report) -> Result:
    (result,) = report.results
    return result


def finding(result: Result, reason: Reason) -> Finding:
    return next(one for one in result.findings if one.reason is reason)


def checked(check: str, **options: Any) -> Result:
    return only(sanitycheck.run(options=Options(only=(check,), **options)))


def test_a_full_checkpoint_folder_blocks_and_nothing_stays(in_namespace: Callable[..., Report]) -> None:
    result = only(
        in_namespace(
            "mount -t tmpfs -o size=1m none /mnt; head -c 2000000 /dev/zero > /mnt/fill 2>/dev/null || true;"
            f"{RUN} --only store.ckpt_path --ckpt-path /mnt/ckpt || true; test $(ls -A /mnt) = fill"
        )
    )
    assert (result.verdict, result.reason, result.blocking) == (Verdict.FAIL, Reason.STORE_FULL, True)


def test_no_inodes_left_blocks_too(in_namespace: Callable[..., Report]) -> None:
    report = in_namespace(
        "mount -t tmpfs -o nr_inodes=4 none /mnt; touch /mnt/a /mnt/b /mnt/c;"
        f"{RUN} --only store.ckpt_path,host.disk --ckpt-path /mnt || true"
    )
    disk, store = report.results
    assert finding(disk, Reason.INODES_LOW).facts["free"] == 0
    assert (store.reason, store.blocking) == (Reason.STORE_FULL, True)


def test_a_read_only_checkpoint_folder_blocks(in_namespace: Callable[..., Report]) -> None:
    report = in_namespace(
        f"mount -t tmpfs -o ro none /mnt;{RUN} --only store.ckpt_path,host.disk --ckpt-path /mnt/a/b || true"
    )
    disk, store = report.results
    assert finding(disk, Reason.READ_ONLY).subject == "/mnt"
    assert (store.verdict, store.reason, store.blocking) == (Verdict.FAIL, Reason.STORE_READ_ONLY, True)


def test_a_full_disk_is_seen(in_namespace: Callable[..., Report]) -> None:
    result = only(
        in_namespace(
            "mount -t tmpfs -o size=64m none /mnt;"
            "head -c 70000000 /dev/zero > /mnt/fill 2>/dev/null || true;"
            f"{RUN} --only host.disk --ckpt-path /mnt || true"
        )
    )
    assert finding(result, Reason.DISK_FULL).subject == "/mnt"
    assert not result.blocking


def test_no_room_for_temporary_files_blocks(in_namespace: Callable[..., Report], tmp_path: Path) -> None:
    result = only(
        in_namespace(
            "for place in /tmp /var/tmp /usr/tmp; do"
            " test -d $place && mount --bind $place $place && mount -o remount,bind,ro $place; done;"
            f"cd /proc; unset TMPDIR TEMP TMP; {RUN} --only host.disk || true"
        )
    )
    assert finding(result, Reason.NO_TEMP_FOLDER).blocking


def test_small_and_full_shared_memory_warns_with_its_consequence(in_namespace: Callable[..., Report]) -> None:
    result = only(
        in_namespace(
            "mount -t tmpfs -o size=64m none /dev/shm; head -c 60000000 /dev/zero > /dev/shm/leaked;"
            f"{RUN} --only host.limits || true"
        )
    )
    assert {one.reason for one in result.findings} == {Reason.SHM_SMALL, Reason.SHM_FULL}
    assert result.verdict is Verdict.WARN


HANGING_MOUNT = """
import ctypes, os, signal, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
fuse = os.open("/dev/fuse", os.O_RDWR)  # nobody ever answers what the kernel asks here
data = f"fd={fuse},rootmode=40000,user_id=0,group_id=0".encode()
if libc.mount(b"dead", sys.argv[1].encode(), b"fuse", 0, data):
    sys.exit(f"mount: {os.strerror(ctypes.get_errno())}")
sys.exit(subprocess.run(sys.argv[2:]).returncode)
"""


LOOK = """
import json, sys
from dataclasses import replace
from sanitycheck.catalogue import by_id
from sanitycheck.options import Options
from sanitycheck.result import Level, Report
from sanitycheck.runner import run_checks
checks = [
    replace(by_id("host.limits"), deadline_s=60.0),
    by_id("store.mounts"),
    # A hang takes its whole deadline. A tenth is as real; that the whole one blocks, test_judgement shows.
    replace(by_id("store.ckpt_path"), deadline_s=3.0),
]
results = run_checks(checks, Options(ckpt_path=sys.argv[1]), timeout_s=120.0)
print(Report(node="n", level=Level.QUICK, results=results, started_unix_s=0.0, duration_s=0.0).to_json())
"""


@pytest.mark.slow
def test_a_dead_mount_is_found_and_the_rest_goes_on(
    in_namespace: Callable[..., Report], tmp_path: Path
) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse may not be used here")
    (tmp_path / "dead").mkdir()
    script = tmp_path / "hang.py"
    script.write_text(HANGING_MOUNT)
    where = str(tmp_path / "dead")
    look = tmp_path / "look.py"
    look.write_text(LOOK)
    python = sys.executable
    report = in_namespace(f'{python} "$1" "$2" {python} "$3" "$2"', str(script), where, str(look))
    limits, mounts, store = report.results
    assert limits.verdict in (Verdict.PASS, Verdict.WARN)
    dead = finding(mounts, Reason.MOUNT_HUNG)
    assert (dead.subject, dead.verdict, dead.facts["needed_for"]) == (where, Verdict.FAIL, "checkpoints")
    assert (store.verdict, store.reason) == (Verdict.FAIL, Reason.HUNG)


@pytest.mark.slow
def test_at_instant_a_dead_checkpoint_folder_is_only_unknown(
    in_namespace: Callable[..., Report], tmp_path: Path
) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("/dev/fuse may not be used here")
    (tmp_path / "dead").mkdir()
    script = tmp_path / "hang.py"
    script.write_text(HANGING_MOUNT)
    report = in_namespace(
        f'{sys.executable} "$1" "$2" {RUN} --level instant --ckpt-path "$2" || true',
        str(script),
        str(tmp_path / "dead"),
    )
    by_id = {result.check: result for result in report.results}
    assert by_id["store.ckpt_path"].verdict is Verdict.UNKNOWN
    assert by_id["host.disk"].verdict is Verdict.UNKNOWN
    assert not report.blocking


def test_a_low_limit_of_open_files_warns(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run(
        ["sh", "-c", f"ulimit -n 200; {RUN} --only host.limits"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    found = finding(only(Report.from_json(done.stdout)), Reason.NOFILE_LOW)
    assert found.facts["soft"] == 200
    assert done.returncode == 0
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] != 200


def without_override(*command: str) -> str:
    """The command without root's right to pass over file modes."""
    return f"setpriv --bounding-set=-dac_override,-dac_read_search {' '.join(command)}"


def test_a_kernel_log_that_may_not_be_read_is_unknown(
    in_namespace: Callable[..., Report], tmp_path: Path
) -> None:
    closed = tmp_path / "kmsg"
    closed.touch(mode=0)
    report = in_namespace(
        f'mount --bind "$1" /dev/kmsg; {without_override(RUN)} --only host.kernel || true', str(closed)
    )
    result = only(report)
    assert (result.verdict, result.reason) == (Verdict.UNKNOWN, Reason.NOT_PERMITTED)
    assert report.exit_code == 4


def test_a_checkpoint_folder_of_somebody_else_blocks(
    in_namespace: Callable[..., Report], tmp_path: Path
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    command = without_override(RUN)
    result = only(in_namespace(f'{command} --only store.ckpt_path --ckpt-path "$1"/run || true', str(closed)))
    assert (result.reason, result.blocking) == (Reason.STORE_NOT_PERMITTED, True)


def test_a_torch_other_than_the_jobs_fails_by_name() -> None:
    result = checked("sw.versions", fingerprint={"torch": "1.0.0", "python": "2.7.18"})
    assert result.verdict is Verdict.FAIL
    assert {one.subject for one in result.findings if one.verdict is Verdict.FAIL} == {"torch", "python"}
    assert not result.blocking


def test_a_node_has_the_fingerprint_that_it_recorded() -> None:
    recorded = checked("sw.fingerprint")
    assert recorded.reason is Reason.FINGERPRINT
    versions = dict(recorded.findings[0].facts["versions"])
    assert checked("sw.fingerprint", fingerprint=versions).reason is Reason.FINGERPRINT_EQUAL
    differing = checked("sw.fingerprint", fingerprint={**versions, "numpy": "0.1", "made-up": "1"})
    assert {one.subject for one in differing.findings} == {"numpy", "made-up"}


class SkewedServer:
    """An SNTP server whose clock is off by a known number of seconds."""

    def __init__(self, off_s: float) -> None:
        self._sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._sock.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._sock.getsockname()[1]}"
        self._off_s = off_s
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while True:
            _, peer = self._sock.recvfrom(512)
            if peer[1] == self._sock.getsockname()[1]:
                return
            now = time.time() + self._off_s
            stamp = struct.pack("!II", int(now) + NTP_UNIX_S, int(now % 1 * 2**32))
            self._sock.sendto(bytes([0b00_100_100, 1]) + bytes(30) + stamp + stamp, peer)

    def __enter__(self) -> SkewedServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._sock.sendto(b"end", self._sock.getsockname())
        self._thread.join()
        self._sock.close()


@pytest.mark.parametrize(("off_s", "reason"), [(0.0, Reason.CLOCK_AGREES), (-3600.0, Reason.CLOCK_OFF)])
def test_a_clock_is_compared_with_a_peers(off_s: float, reason: Reason) -> None:
    with SkewedServer(off_s) as server:
        result = checked("net.clock", clock_peer=server.address)
    assert result.reason is reason
    assert result.verdict is (Verdict.PASS if off_s == 0 else Verdict.FAIL)
    assert not result.blocking


def test_a_peer_that_does_not_answer_is_unknown() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        result = checked("net.clock", clock_peer=f"127.0.0.1:{silent.getsockname()[1]}")
    assert (result.verdict, result.reason) == (Verdict.UNKNOWN, Reason.CLOCK_PEER_SILENT)


def test_an_offset_that_the_caller_measured_is_judged() -> None:
    assert checked("net.clock", clock_offset_s=0.5).verdict is Verdict.WARN


def test_a_reboot_is_noticed() -> None:
    boot = checked("host.boot").findings[0].facts["boot_id"]
    assert checked("host.boot", known=Known(last_boot_id=boot)).verdict is Verdict.PASS
    assert checked("host.boot", known=Known(last_boot_id="another")).reason is Reason.REBOOTED


def test_a_good_checkpoint_folder_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    result = checked("store.ckpt_path", ckpt_path=str(tmp_path))
    assert result.verdict in (Verdict.PASS, Verdict.WARN)
    assert os.listdir(tmp_path) == ["kept"]


def test_instant_needs_no_torch_and_blocks_nothing_here(tmp_path: Path) -> None:
    report = sanitycheck.run(level="instant", options=Options(ckpt_path=str(tmp_path)))
    assert not report.blocking
    assert len(report.results) == 6
    assert json.loads(report.to_json())["coverage"]["checks"] == 6
    assert os.listdir(tmp_path) == []
