"""Computing checks for real: right here, and wrong when what ranks exchange is corrupted on the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import sanitycheck
from sanitycheck.baseline import figures_of
from sanitycheck.options import Known, Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Report, Verdict

pytestmark = pytest.mark.slow

torch = pytest.importorskip("torch", reason="torch is not installed")

CORRUPTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/types.h>
/* Flips one bit in the middle of every large buffer that is sent, as a bad cable or NIC would. */
static char *spoilt(const void *data, size_t size) {
    char *copy = malloc(size);
    memcpy(copy, data, size);
    copy[size / 2] ^= 0x10;
    return copy;
}
static ssize_t send_spoilt(int fd, const struct iovec *given, int count) {
    static ssize_t (*real)(int, const struct iovec *, int);
    if (!real) real = dlsym(RTLD_NEXT, "writev");
    struct iovec parts[8];
    char *copies[8] = {0};
    if (count > 8) return real(fd, given, count);
    for (int i = 0; i < count; i++) {
        parts[i] = given[i];
        if (parts[i].iov_len < 4096) continue;
        parts[i].iov_base = copies[i] = spoilt(parts[i].iov_base, parts[i].iov_len);
    }
    ssize_t sent = real(fd, parts, count);
    for (int i = 0; i < count; i++) free(copies[i]);
    return sent;
}
ssize_t writev(int fd, const struct iovec *given, int count) { return send_spoilt(fd, given, count); }
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return send_spoilt(fd, message->msg_iov, (int)message->msg_iovlen);
}
"""


def checked(*checks: str, **options: object) -> Report:
    return sanitycheck.run(options=Options(only=checks, **options))  # type: ignore[arg-type]


def test_this_machine_computes_and_exchanges_rightly() -> None:
    report = checked("cpu.gemm", "num.bitwise", "coll.intra")
    gemm, bits, collective = report.results
    assert gemm.reason is Reason.GEMM
    assert Reason.NO_BASELINE in {finding.reason for finding in gemm.findings}
    assert bits.reason is Reason.BITS_EQUAL
    assert collective.reason is Reason.COLLECTIVE
    assert not report.blocking


Preload = Callable[[str], None]


@pytest.fixture
def preload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Preload:
    """Puts C code before the libraries of every process that is started."""

    def build(code: str) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler")
        (tmp_path / "corrupt.c").write_text(code)
        library = tmp_path / "corrupt.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", str(library), "corrupt.c", "-ldl"], cwd=tmp_path, check=True
        )
        monkeypatch.setenv("LD_PRELOAD", str(library))

    return build


BAD_PROCESSOR = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sched.h>
#include <string.h>
/* One processor loses a bit now and then: here whenever it copies a matrix. */
void *memcpy(void *to, const void *from, size_t size) {
    memmove(to, from, size);
    if (size == 256 * 256 * 4 && sched_getcpu() == PROCESSOR) ((char *)to)[size / 2] ^= 0x10;
    return to;
}
"""


def test_a_processor_that_computes_wrongly_is_found_and_blocks(preload: Preload) -> None:
    mask = sorted(os.sched_getaffinity(0))
    if len(mask) < 2:
        pytest.skip("nothing to compare with: one processor")
    preload(BAD_PROCESSOR.replace("PROCESSOR)", f"{mask[-1]})"))
    (bits,) = checked("num.bitwise").results
    assert (bits.verdict, bits.reason, bits.blocking) == (Verdict.FAIL, Reason.BITS_DIFFER, True)


def test_corrupted_traffic_is_found_and_blocks(preload: Preload) -> None:
    preload(CORRUPTER)
    (collective,) = checked("coll.intra").results
    (training,) = checked("train.mini_gpt").results
    assert (collective.verdict, collective.reason) == (Verdict.FAIL, Reason.COLLECTIVE_WRONG)
    assert "values wrong on rank" in str(collective.findings[0].facts["first"])
    assert training.verdict is Verdict.FAIL
    assert training.reason in (Reason.TRAIN_RANKS_DIFFER, Reason.TRAIN_LOSS_STUCK)
    assert collective.blocking
    assert training.blocking


HOG = "while True: pass"


@pytest.mark.alone
def test_a_neighbour_that_takes_the_processors_is_slow_against_the_own_record() -> None:
    """Many others at once, so that hardly anything is left on however many processors."""
    quiet = checked("cpu.gemm", "cpu.membw")
    figures = figures_of(quiet)
    assert set(figures) == {"cpu.gemm.gflops", "cpu.membw.gb_s"}
    count = 6 * len(os.sched_getaffinity(0))
    # Each in a session of its own: Linux gives a session, however many run in it, no more than one share.
    hogs = [subprocess.Popen([sys.executable, "-c", HOG], start_new_session=True) for _ in range(count)]
    try:
        report = checked("cpu.gemm", "cpu.membw", baseline=figures)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    reasons = {result.check: result.reason for result in report.results}
    assert reasons == {"cpu.gemm": Reason.GEMM_SLOW, "cpu.membw": Reason.MEMBW_SLOW}
    assert not report.blocking


@pytest.mark.alone
def test_a_small_training_gives_the_same_bits_again_and_is_held_to_its_record() -> None:
    (result,) = checked("train.mini_gpt").results
    assert result.reason is Reason.TRAINED, result.to_dict()
    facts = result.findings[0].facts
    name = f"train.mini_gpt: {facts['key']}"
    (again,) = checked("train.mini_gpt", known=Known(digests={name: str(facts["digest"])})).results
    assert again.reason is Reason.TRAINED
    (other,) = checked("train.mini_gpt", known=Known(digests={name: "0" * 32})).results
    assert (other.reason, other.blocking) == (Reason.TRAIN_DIGEST_DIFFERS, True)


def test_an_interface_that_does_not_exist_fails_without_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    (result,) = checked("coll.intra").results
    assert (result.verdict, result.reason, result.blocking) == (Verdict.FAIL, Reason.COLLECTIVE_BROKEN, False)


def test_far_slower_than_its_own_record_fails_without_blocking() -> None:
    (result,) = checked("cpu.gemm", baseline={"cpu.gemm.gflops": 1e9}).results
    assert (result.verdict, result.reason, result.blocking) == (Verdict.FAIL, Reason.GEMM_SLOW, False)


def test_without_torch_the_passive_checks_run_and_the_others_are_skipped(tmp_path: Path) -> None:
    """As on a node whose Python has the runtime dependencies only: torch is taken off the search path."""
    for entry in sys.path:
        for item in Path(entry).iterdir() if Path(entry).is_dir() and "site-packages" in entry else ():
            if not item.name.startswith(("torch", "functorch")):
                (tmp_path / item.name).symlink_to(item)
    code = (
        "import sys; from pathlib import Path;"
        f"sys.path[:] = [p for p in sys.path if 'site-packages' not in p] + [{str(tmp_path)!r}];"
        "from sanitycheck.cli import main;"
        "sys.exit(main(['run', '--only', 'sw.versions,num.bitwise,coll.intra,cpu.gemm', '--json', '-']))"
    )
    package = str(Path(sanitycheck.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=package,
        env={**os.environ, "PYTHONSAFEPATH": ""},
        timeout=120,
    )
    report = Report.from_json(done.stdout)
    versions, gemm, bits, collective = report.results
    assert versions.reason is Reason.TORCH_NOT_HERE
    assert gemm.verdict is Verdict.PASS
    assert str(bits.findings[0].facts["library"]).startswith("numpy")
    assert collective.verdict is Verdict.SKIPPED
    assert done.returncode == 0
