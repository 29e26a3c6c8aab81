"""GPU inventory against an NVML that misbehaves: a library of our own, loaded by the real binding."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sanitycheck
from sanitycheck.catalogue import by_id
from sanitycheck.options import Options
from sanitycheck.reasons import Reason
from sanitycheck.result import Result, Verdict
from sanitycheck.runner import run_checks

NVML = r"""
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
#include <unistd.h>
static int number(const char *name) { const char *v = getenv(name); return v ? atoi(v) : 0; }
static int hang(const char *where) {
    const char *v = getenv("FAKE_HANG");
    while (v && !strcmp(v, where)) pause();
    return 0;
}
int nvmlInitWithFlags(unsigned flags) { hang("init"); return number("FAKE_INIT"); }
int nvmlInit_v2(void) { hang("init"); return number("FAKE_INIT"); }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "fake"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("FAKE_COUNT"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    if (number("FAKE_ERROR") && index == (unsigned)number("FAKE_BAD")) return number("FAKE_ERROR");
    if (index == (unsigned)number("FAKE_BAD")) hang("device");
    *handle = (void *)(long)(index + 1);
    return 0;
}
int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
    snprintf(out, size, "GPU-%ld", (long)handle - 1);
    return 0;
}
int nvmlDeviceGetName(void *handle, char *out, unsigned size) { snprintf(out, size, "Fake H100"); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory) { memory[0] = 80ull << 30; return 0; }
struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute; };
int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, struct process *out) {
    if (!out) { *count = 1; return 7; }
    *count = 1;
    out[0] = (struct process){1, 1ull << 30, ~0u, ~0u};
    return 0;
}
"""

LOST, NO_PERMISSION, UNKNOWN, NOT_LOADED, MISMATCH = 15, 4, 999, 9, 18


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    subprocess.run(
        [compiler, "-x", "c", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"], cwd=folder, check=True
    )
    return folder


Look = Callable[..., Result]


@pytest.fixture
def look(library: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    def run(*, expect: int | None = None, timeout_s: float | None = None, **fake: Any) -> Result:
        before = os.environ.get("LD_LIBRARY_PATH")
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}{os.pathsep}{before}" if before else str(library))
        for name, value in fake.items():
            monkeypatch.setenv(
                f"FAKE_{name.upper()}" if name != "visible" else "CUDA_VISIBLE_DEVICES", str(value)
            )
        options = Options(only=("gpu.inventory",), expect_gpus=expect)
        return sanitycheck.run(options=options, timeout_s=timeout_s).results[0]

    return run


def test_devices_are_counted_and_named(look: Look) -> None:
    result = look(count=8, expect=8)
    assert result.verdict is Verdict.PASS
    facts = result.findings[0].facts
    assert (facts["count"], facts["model"], facts["driver"]) == (8, "Fake H100", "580.65.06")


def test_a_lost_device_fails_and_blocks_where_it_was_expected(look: Look) -> None:
    result = look(count=8, error=LOST, bad=5, expect=8)
    assert {one.reason for one in result.findings} == {Reason.GPU_HARDWARE, Reason.GPU_MISSING}
    assert result.blocking


def test_a_lost_device_that_nobody_asked_for_does_not_block(look: Look) -> None:
    result = look(count=8, error=LOST, bad=5)
    assert (result.verdict, result.blocking) == (Verdict.FAIL, False)
    assert result.findings[0].subject == "gpu:5"


def test_seven_of_eight(look: Look) -> None:
    result = look(count=7, expect=8)
    assert (result.reason, result.blocking) == (Reason.GPU_MISSING, True)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (UNKNOWN, Reason.NVML_UNKNOWN_ERROR),
        (NO_PERMISSION, Reason.GPU_NOT_PERMITTED),
        (77, Reason.NVML_ERROR),
    ],
)
def test_what_says_nothing_about_the_hardware_is_unknown(look: Look, code: int, reason: Reason) -> None:
    result = look(init=code, expect=8)
    assert (result.verdict, result.reason, result.blocking) == (Verdict.UNKNOWN, reason, False)


def test_a_driver_that_is_not_loaded(look: Look) -> None:
    assert look(init=NOT_LOADED).verdict is Verdict.SKIPPED
    assert look(init=NOT_LOADED, expect=1).blocking


def test_a_driver_updated_under_a_running_kernel_module(look: Look) -> None:
    assert look(init=MISMATCH, expect=1).reason is Reason.DRIVER_MISMATCH


def test_hidden_devices(look: Look) -> None:
    assert look(count=2, visible="0", expect=2).reason is Reason.GPU_HIDDEN


@pytest.mark.parametrize(("where", "phase"), [("init", "starting NVML"), ("device", "asking device 3")])
def test_a_hanging_driver_is_found_and_says_where(look: Look, where: str, phase: str) -> None:
    result = look(count=8, hang=where, bad=3, timeout_s=3.0)
    assert result.verdict is Verdict.UNKNOWN
    assert result.findings[0].facts["phase"] == phase


def test_an_older_driver_is_asked_in_its_own_version_who_computes(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.environ.get("LD_LIBRARY_PATH")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}{os.pathsep}{before}" if before else str(library))
    monkeypatch.setenv("FAKE_COUNT", "1")
    (result,) = sanitycheck.run(options=Options(only=("gpu.processes",))).results
    assert (result.verdict, result.reason) == (Verdict.FAIL, Reason.GPU_BUSY)


ASK_THE_DRIVER = (
    "gpu.inventory",
    "gpu.recovery_action",
    "gpu.ecc",
    "gpu.remap",
    "gpu.throttle",
    "gpu.processes",
    "gpu.mig",
    "link.nvlink",
    "link.fabric",
)


@pytest.mark.slow
def test_no_check_waits_for_a_driver_that_hangs(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a child of its own that is ended at its deadline, here a tenth of the usual one."""
    before = os.environ.get("LD_LIBRARY_PATH")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}{os.pathsep}{before}" if before else str(library))
    for name, value in {"FAKE_COUNT": "8", "FAKE_HANG": "device", "FAKE_BAD": "3"}.items():
        monkeypatch.setenv(name, value)
    checks = [replace(by_id(name), deadline_s=3.0) for name in ASK_THE_DRIVER]
    results = run_checks(checks, Options(), timeout_s=120.0)
    assert {result.check: (result.verdict, result.reason) for result in results} == dict.fromkeys(
        ASK_THE_DRIVER, (Verdict.FAIL, Reason.HUNG)
    )
