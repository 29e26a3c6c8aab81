"""Checks of devices against an NVML of our own, loaded by the real binding: every question and its answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sanitycheck
from sanitycheck.options import Options
from sanitycheck.result import Result

NVML = r"""
#include <stdlib.h>
#include <string.h>
#include <stdio.h>
static long number(const char *name, long usual) {
    const char *v = getenv(name); return v ? atol(v) : usual; }
#define REFUSED(name) if (number("FAKE_REFUSE_" name, 0)) return (int)number("FAKE_REFUSE_" name, 0)
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return "fake"; }
int nvmlSystemGetDriverVersion(char *out, unsigned size) { snprintf(out, size, "580.65.06"); return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)number("FAKE_COUNT", 2); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **handle) { *handle = (void *)(long)(i + 1); return 0; }
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) {
    snprintf(out, size, "GPU-%ld", (long)h - 1); return 0; }
int nvmlDeviceGetName(void *h, char *out, unsigned size) {
    snprintf(out, size, "%s", getenv("FAKE_NAME") ? getenv("FAKE_NAME") : "NVIDIA H100 80GB HBM3"); return 0;
}
struct field {
    unsigned id, scope; long long stamp, latency; int type, result; union { double d; unsigned u;
    unsigned long long v; } value; };
int nvmlDeviceGetFieldValues(void *h, int count, struct field *fields) {
    REFUSED("FIELD");
    for (int i = 0; i < count; i++) {
        fields[i].result = 0; fields[i].type = 1;
        fields[i].value.v = 0;
        if (fields[i].id == 230) fields[i].value.u = (unsigned)number("FAKE_RECOVERY", 0);
        if (fields[i].id == 59) {
    fields[i].type = 3;
            fields[i].value.v = (unsigned long long)number("FAKE_RECOVERIES", 0); }
    }
    return 0;
}
int nvmlDeviceGetEccMode(void *h, int *now, int *later) {
    REFUSED("ECC"); *now = (int)number("FAKE_ECC", 1); *later = *now; return 0; }
int nvmlDeviceGetTotalEccErrors(void *h, int kind, int counter, unsigned long long *out) {
    *out = kind == 1 ? (unsigned long long)number("FAKE_UNCORRECTED", 0) : 7; return 0;
}
struct sram { unsigned version; unsigned long long parity, secded, rest[9]; unsigned exceeded; };
int nvmlDeviceGetSramEccErrorStatus(void *h, struct sram *out) {
    REFUSED("SRAM"); out->parity = (unsigned long long)number("FAKE_SRAM", 0);
    out->secded = 1; out->exceeded = 0; return 0;
}
int nvmlDeviceGetRemappedRows(void *h, unsigned *c, unsigned *u, unsigned *pending, unsigned *failed) {
    REFUSED("REMAP"); *c = 1; *u = 2; *pending = (unsigned)number("FAKE_PENDING", 0); *failed = 0; return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *h, unsigned long long *out) {
    *out = (unsigned long long)number("FAKE_REASONS", 1); return 0; }
int nvmlDeviceGetTemperature(void *h, int sensor, unsigned *out) { *out = 51; return 0; }
int nvmlDeviceGetTemperatureThreshold(void *h, int kind, unsigned *out) { *out = 90; return 0; }
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *later) {
    REFUSED("MIG"); *now = *later = (unsigned)number("FAKE_MIG", 0); return 0; }
int nvmlDeviceGetComputeMode(void *h, int *mode) { *mode = (int)number("FAKE_MODE", 0); return 0; }
struct process { unsigned pid; unsigned long long used; unsigned a, b; };
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *count, struct process *out) {
    long pid = (long)h == 1 ? number("FAKE_PID", 0) : 0;
    if (!pid) { *count = 0; return 0; }
    if (!out || *count < 1) { *count = 1; return 7; }
    *count = 1; out[0].pid = (unsigned)pid; out[0].used = 1 << 30; return 0;
}
int nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    snprintf(out, size, "/usr/bin/strange"); return 0; }
int nvmlDeviceGetNvLinkState(void *h, unsigned link, int *up) {
    *up = !((long)h == 1 && link < (unsigned)number("FAKE_DOWN", 0)); return 0; }
int nvmlDeviceGetNvLinkVersion(void *h, unsigned link, unsigned *version) { *version = 6; return 0; }
int nvmlDeviceGetGpuFabricInfoV(void *h, void *out) { REFUSED("FABRIC"); return 3; }
"""
NOT_SUPPORTED, NO_PERMISSION, LOST = 3, 4, 15


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(NVML)
    subprocess.run(
        [compiler, "-x", "c", "-shared", "-fPIC", "-w", "-o", "libnvidia-ml.so.1", "nvml.c"],
        cwd=folder,
        check=True,
    )
    return folder


Look = Callable[..., Result]


@pytest.fixture
def look(library: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    def run(check: str, **fake: Any) -> Result:
        before = os.environ.get("LD_LIBRARY_PATH")
        monkeypatch.setenv("LD_LIBRARY_PATH", f"{library}{os.pathsep}{before}" if before else str(library))
        for name, value in fake.items():
            monkeypatch.setenv(f"FAKE_{name.upper()}", str(value))
        return sanitycheck.run(options=Options(only=(check,))).results[0]

    return run


@pytest.mark.parametrize(
    ("check", "fake", "verdict", "reason"),
    [
        ("gpu.recovery_action", {}, "pass", "recovery_none"),
        ("gpu.recovery_action", {"recovery": 1}, "fail", "recovery_reset"),
        ("gpu.recovery_action", {"recovery": 2}, "fail", "recovery_reboot"),
        ("gpu.recovery_action", {"recovery": 4}, "warn", "recovery_drain"),
        ("gpu.recovery_action", {"recovery": 99}, "unknown", "recovery_unknown"),
        ("gpu.recovery_action", {"refuse_field": NOT_SUPPORTED}, "skipped", "not_supported"),
        ("gpu.ecc", {}, "pass", "ecc_clean"),
        ("gpu.ecc", {"ecc": 0}, "skipped", "ecc_off"),
        ("gpu.ecc", {"uncorrected": 2}, "fail", "ecc_uncorrected"),
        ("gpu.ecc", {"sram": 9}, "fail", "ecc_sram"),
        ("gpu.ecc", {"sram": 9, "refuse_sram": 25}, "pass", "ecc_clean"),
        ("gpu.ecc", {"refuse_ecc": LOST}, "fail", "gpu_hardware"),
        ("gpu.remap", {}, "pass", "remap_clean"),
        ("gpu.remap", {"pending": 1}, "fail", "remap_pending"),
        ("gpu.remap", {"refuse_remap": NO_PERMISSION}, "unknown", "gpu_not_permitted"),
        ("gpu.throttle", {}, "pass", "throttle_none"),
        ("gpu.throttle", {"reasons": 0x48}, "fail", "throttle_hardware"),
        ("gpu.mig", {}, "pass", "mig_as_expected"),
        ("gpu.mig", {"mig": 1}, "warn", "mig_not_expected"),
        ("gpu.processes", {}, "pass", "gpu_free"),
        ("gpu.processes", {"mode": 2}, "fail", "gpu_prohibited"),
        ("gpu.processes", {"pid": 1}, "fail", "gpu_busy"),
        ("gpu.processes", {"pid": os.getpid()}, "pass", "gpu_free"),
        ("link.nvlink", {}, "pass", "nvlink_up"),
        ("link.nvlink", {"down": 1}, "fail", "nvlink_down"),
        ("link.nvlink", {"recoveries": 5}, "warn", "nvlink_errors"),
        ("link.fabric", {"refuse_fabric": NOT_SUPPORTED}, "skipped", "not_supported"),
    ],
)
def test_the_answers_of_the_driver_become_verdicts(
    look: Look, check: str, fake: dict[str, Any], verdict: str, reason: str
) -> None:
    result = look(check, **fake)
    assert (result.verdict.value, result.reason.value) == (verdict, reason), result.to_dict()
    if verdict not in ("pass", "skipped") and check != "link.nvlink":
        assert result.findings[0].subject.startswith("gpu:GPU-")


def test_who_computes_on_a_device_is_named(look: Look) -> None:
    (finding,) = look("gpu.processes", pid=1).findings
    assert finding.facts["who"] == "strange (pid 1)"
    assert finding.facts["used_bytes"] == 1 << 30
