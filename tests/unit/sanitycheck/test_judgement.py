"""Every judgement from scripted facts: verdict, reason, whether it blocks; and what must never block."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest

import sanitycheck
from sanitycheck.catalogue import CHECKS, by_id, choose
from sanitycheck.drill import parse
from sanitycheck.options import Known, Options
from sanitycheck.outcome import Cannot, Crashed, Hung
from sanitycheck.reasons import Reason
from sanitycheck.render.sentences import describe, next_step
from sanitycheck.render.texts import TEXTS
from sanitycheck.result import Level, Result, Verdict
from sanitycheck.thresholds import GIB, MIB

H100 = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 80 * GIB}


def gpus(*errors: str) -> list[dict[str, object]]:
    return [{**H100, "index": i, "uuid": f"GPU-{i}", "error": error} for i, error in enumerate(errors)]


def judged(check: str, script: Mapping[str, Any], **options: Any) -> Result:
    """What a run says of one scripted check."""
    drill = parse({"schema": 1, "checks": {check: script}}, path="test")
    report = sanitycheck.run(options=Options(only=(check,), **options), drill=drill)
    return report.results[0]


def volume(**facts: Any) -> dict[str, Any]:
    return {"volumes": [facts]}


def bits(*digests: str) -> dict[str, Any]:
    return {"devices": [{"index": i, "name": "H100", "digest": d} for i, d in enumerate(digests)]}


CASES: list[tuple[str, dict[str, Any], dict[str, Any], str, str, bool]] = [
    # check, facts, options, verdict, reason, blocking
    ("env.capabilities", {"sees": {"kernel log": False}}, {}, "pass", "capabilities", False),
    ("gpu.inventory", {"init_error": "LIBRARY_NOT_FOUND"}, {}, "skipped", "gpu_not_expected", False),
    ("gpu.inventory", {"init_error": "LIBRARY_NOT_FOUND"}, {"expect_gpus": 8}, "fail", "gpu_none", True),
    (
        "gpu.inventory",
        {"init_error": "LIBRARY_NOT_FOUND"},
        {"expect_gpus": 0},
        "skipped",
        "gpu_not_expected",
        False,
    ),
    ("gpu.inventory", {"init_error": "DRIVER_NOT_LOADED"}, {"expect_gpus": 1}, "fail", "gpu_none", True),
    (
        "gpu.inventory",
        {"init_error": "UNKNOWN", "pci_devices": 8},
        {},
        "unknown",
        "nvml_unknown_error",
        False,
    ),
    ("gpu.inventory", {"init_error": "UNKNOWN"}, {"expect_gpus": 8}, "unknown", "nvml_unknown_error", False),
    ("gpu.inventory", {"init_error": "UNKNOWN"}, {}, "skipped", "gpu_not_expected", False),
    (
        "gpu.inventory",
        {"init_error": "NO_PERMISSION"},
        {"expect_gpus": 8},
        "unknown",
        "gpu_not_permitted",
        False,
    ),
    ("gpu.inventory", {"init_error": "LIB_RM_VERSION_MISMATCH"}, {}, "fail", "driver_mismatch", False),
    ("gpu.inventory", {"init_error": "CODE_77"}, {"expect_gpus": 1}, "unknown", "nvml_error", False),
    ("gpu.inventory", {"devices": gpus("", "")}, {"expect_gpus": 2}, "pass", "gpu_inventory", False),
    ("gpu.inventory", {"devices": gpus("", "")}, {}, "pass", "gpu_inventory", False),
    ("gpu.inventory", {"devices": []}, {}, "skipped", "gpu_not_expected", False),
    ("gpu.inventory", {"devices": []}, {"expect_gpus": 1}, "fail", "gpu_missing", True),
    ("gpu.inventory", {"devices": gpus("")}, {"expect_gpus": 2}, "fail", "gpu_missing", True),
    ("gpu.inventory", {"devices": gpus("", "GPU_IS_LOST")}, {"expect_gpus": 2}, "fail", "gpu_missing", True),
    ("gpu.inventory", {"devices": gpus("", "GPU_IS_LOST")}, {}, "fail", "gpu_hardware", False),
    (
        "gpu.inventory",
        {"devices": gpus("", "NO_PERMISSION")},
        {"expect_gpus": 2},
        "unknown",
        "gpu_not_permitted",
        False,
    ),
    ("gpu.inventory", {"devices": gpus("", "")}, {"expect_gpus": 1}, "warn", "gpu_extra", False),
    (
        "gpu.inventory",
        {"devices": gpus("", ""), "visible": 1},
        {"expect_gpus": 2},
        "fail",
        "gpu_hidden",
        True,
    ),
    ("gpu.inventory", {"devices": gpus("", ""), "visible": 1}, {}, "pass", "gpu_inventory", False),
    ("gpu.inventory", {"devices": [*gpus(""), {"name": "L4", "index": 1}]}, {}, "warn", "gpu_mixed", False),
    ("host.cpu_mem", {}, {}, "pass", "cpu_mem", False),
    ("host.cpu_mem", {"cpus": 2}, {"local_workers": 8}, "warn", "cpus_few", False),
    ("host.cpu_mem", {"cpus": 64, "cpu_quota": 0.5}, {}, "warn", "cpus_few", False),
    ("host.cpu_mem", {"memory_available_bytes": 100 * MIB}, {}, "warn", "memory_small", False),
    ("host.cpu_mem", {"load_1min": 40.0}, {}, "warn", "load_high", False),
    ("host.cpu_mem", {"edac_uncorrected": 1}, {}, "fail", "memory_errors", False),
    ("host.cpu_mem", {"edac_corrected": 5}, {}, "pass", "cpu_mem", False),
    ("host.cpu_mem", {"edac_corrected": 5000}, {}, "warn", "memory_errors_corrected", False),
    ("host.limits", {}, {}, "pass", "limits", False),
    ("host.limits", {"nofile_soft": 256}, {}, "warn", "nofile_low", False),
    ("host.limits", {"memlock_soft_bytes": 65536}, {}, "pass", "limits", False),
    ("host.limits", {"memlock_soft_bytes": 65536, "rdma_devices": 8}, {}, "warn", "memlock_low", False),
    ("host.limits", {"shm_bytes": None, "shm_free_bytes": None}, {}, "warn", "shm_missing", False),
    ("host.limits", {"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB}, {}, "warn", "shm_small", False),
    ("host.limits", {"shm_free_bytes": 0}, {}, "warn", "shm_full", False),
    ("host.limits", {"tasks_left": 10}, {}, "warn", "tasks_few", False),
    ("host.disk", {}, {}, "pass", "disk", False),
    ("host.disk", {"temp_found": False}, {}, "fail", "no_temp_folder", True),
    ("host.disk", volume(bytes_free=5 * GIB), {}, "warn", "disk_low", False),
    ("host.disk", volume(bytes_total=20 * GIB, bytes_free=10 * GIB), {}, "pass", "disk", False),
    ("host.disk", volume(bytes_free=1), {}, "fail", "disk_full", False),
    ("host.disk", volume(bytes_total=64 * MIB, bytes_free=60 * MIB), {}, "pass", "disk", False),
    ("host.disk", volume(bytes_free=0, read_only=True), {}, "pass", "disk", False),
    ("host.disk", volume(used_for="temp", read_only=True), {}, "warn", "read_only", False),
    ("host.disk", volume(turned_read_only=True, read_only=True), {}, "fail", "turned_read_only", False),
    ("host.disk", volume(errors_count=3), {}, "warn", "fs_errors", False),
    ("host.disk", volume(inodes=1000, inodes_free=1), {}, "warn", "inodes_low", False),
    ("host.boot", {}, {}, "pass", "boot", False),
    ("host.boot", {"boot_id": "b"}, {"known": Known(last_boot_id="a")}, "warn", "rebooted", False),
    ("host.boot", {"boot_id": "a"}, {"known": Known(last_boot_id="a")}, "pass", "boot", False),
    ("host.kernel", {}, {}, "pass", "kernel", False),
    ("host.kernel", {"troubles": [{"kind": "machine_check"}]}, {}, "fail", "kernel_machine_check", False),
    ("host.kernel", {"troubles": [{"kind": "oom_kill"}]}, {}, "warn", "kernel_oom_kill", False),
    ("net.clock", {}, {}, "pass", "clock_synchronised", False),
    ("net.clock", {"synchronised": False}, {}, "pass", "clock_unsynchronised", False),
    ("net.clock", {"synchronised": False}, {"nnodes": 2}, "warn", "clock_unsynchronised", False),
    ("net.clock", {"synchronised": None, "why_not_asked": "EPERM"}, {}, "unknown", "clock_not_asked", False),
    ("net.clock", {"unix_s": 1000.0}, {}, "fail", "clock_wrong", False),
    (
        "net.clock",
        {"peer": "p", "peer_offset_s": 0.01, "synchronised": False},
        {},
        "pass",
        "clock_agrees",
        False,
    ),
    ("net.clock", {"peer": "p", "peer_offset_s": -0.3}, {}, "warn", "clock_off", False),
    ("net.clock", {"peer": "p", "peer_offset_s": 5.0}, {}, "fail", "clock_off", False),
    (
        "net.clock",
        {"peer": "p", "peer_offset_s": 1.2, "peer_uncertainty_s": 1.15},
        {},
        "pass",
        "clock_agrees",
        False,
    ),
    ("net.clock", {"peer": "p", "peer_problem": "no answer"}, {}, "unknown", "clock_peer_silent", False),
    ("sw.versions", {}, {}, "pass", "versions", False),
    ("sw.versions", {"torch_version": "", "torch_metadata": ""}, {}, "skipped", "torch_not_here", False),
    ("sw.versions", {"torch_version": "2.13.0+cu130"}, {}, "pass", "versions", False),
    ("sw.versions", {"torch_version": "2.10.0"}, {}, "warn", "torch_mixed", False),
    ("sw.versions", {"torch_version": "2.5.1", "torch_metadata": "2.5.1"}, {}, "warn", "torch_old", False),
    ("sw.versions", {"nccl": "2.20", "nccl_needed": "2.27"}, {}, "warn", "nccl_mixed", False),
    ("sw.versions", {"torch_cuda": "13.0", "driver": "550.54.15"}, {}, "warn", "driver_old", False),
    ("sw.versions", {"torch_cuda": "12.8", "driver": "550.54.15"}, {}, "pass", "versions", False),
    (
        "sw.versions",
        {"versions": {"torch": "2.13.0"}},
        {"fingerprint": {"torch": "2.12.0"}},
        "fail",
        "version_differs",
        False,
    ),
    (
        "sw.versions",
        {"versions": {"nccl": "2.27"}, "driver": "580.1"},
        {"fingerprint": {"nccl": "2.26"}},
        "fail",
        "version_differs",
        True,
    ),
    (
        "sw.versions",
        {"versions": {"nccl": "2.27"}},
        {"fingerprint": {"nccl": "2.26"}},
        "fail",
        "version_differs",
        False,
    ),
    ("sw.versions", {}, {"fingerprint": {"libc": "glibc-1"}}, "pass", "versions", False),
    ("sw.fingerprint", {}, {}, "pass", "fingerprint", False),
    ("sw.fingerprint", {}, {"fingerprint": {"libc": "glibc-1"}}, "fail", "version_differs", False),
    (
        "sw.fingerprint",
        {"versions": {"libc": "glibc-1"}},
        {"fingerprint": {"libc": "glibc-1"}},
        "pass",
        "fingerprint_equal",
        False,
    ),
    ("store.mounts", {}, {}, "skipped", "no_network_mounts", False),
    ("store.mounts", {"mounts": [{"path": "/a"}]}, {}, "pass", "mounts_alive", False),
    ("store.mounts", {"mounts": [{"path": "/a", "state": "hung"}]}, {}, "warn", "mount_hung", False),
    (
        "store.mounts",
        {"mounts": [{"path": "/a", "state": "hung", "needed_for": "checkpoints"}]},
        {},
        "fail",
        "mount_hung",
        False,
    ),
    (
        "store.mounts",
        {"mounts": [{"path": "/a", "state": "error", "error": "stale"}]},
        {},
        "warn",
        "mount_error",
        False,
    ),
    (
        "store.mounts",
        {"mounts": [{"path": "/a", "state": "not asked"}]},
        {},
        "unknown",
        "mount_not_asked",
        False,
    ),
    ("store.ckpt_path", {}, {}, "pass", "store_measured", False),
    ("store.ckpt_path", {"payload_bytes": 1000}, {}, "pass", "store", False),
    ("store.ckpt_path", {"write_s": 30.0}, {}, "warn", "store_slow", False),
    ("store.ckpt_path", {"write_s": 30.0, "payload_bytes": 1000}, {}, "pass", "store", False),
    ("store.ckpt_path", {"free_bytes": 3}, {"ckpt_bytes": 2}, "warn", "store_tight", False),
    ("store.ckpt_path", {"free_bytes": 1}, {"ckpt_bytes": 2}, "fail", "store_tight", False),
    ("store.ckpt_path", {"free_bytes": None}, {"ckpt_bytes": 2}, "pass", "store_measured", False),
    ("store.ckpt_path", {"left_behind": "/x/.sanitycheck-1"}, {}, "warn", "store_left_behind", False),
    ("store.ckpt_path", {"problem": "read_only"}, {}, "fail", "store_read_only", True),
    ("store.ckpt_path", {"problem": "no_space"}, {}, "fail", "store_full", True),
    ("store.ckpt_path", {"problem": "not_permitted"}, {}, "fail", "store_not_permitted", True),
    ("store.ckpt_path", {"problem": "not_a_folder"}, {}, "fail", "store_not_a_folder", True),
    ("store.ckpt_path", {"problem": "backend_missing"}, {}, "fail", "store_backend_missing", True),
    ("store.ckpt_path", {"problem": "unreachable"}, {}, "fail", "store_unreachable", True),
    ("store.ckpt_path", {"problem": "differs"}, {}, "fail", "store_differs", True),
    ("store.ckpt_path", {"problem": "not_listed"}, {}, "fail", "store_not_listed", True),
    ("cpu.gemm", {}, {}, "pass", "gemm", False),
    ("cpu.gemm", {}, {"baseline": {"cpu.gemm.gflops": 101.0}}, "pass", "gemm", False),
    (
        "cpu.gemm",
        {"gflops": [10.0, 90.0, 20.0]},
        {"baseline": {"cpu.gemm.gflops": 100.0}},
        "warn",
        "gemm_slow",
        False,
    ),
    (
        "cpu.gemm",
        {"gflops": [10.0, 50.0]},
        {"baseline": {"cpu.gemm.gflops": 100.0}},
        "fail",
        "gemm_slow",
        False,
    ),
    ("cpu.gemm", {"relative_error": 0.5}, {}, "fail", "gemm_wrong", True),
    ("num.bitwise", {}, {}, "pass", "bits_equal", False),
    ("num.bitwise", {"digests": ["a", "b"]}, {}, "fail", "bits_differ", True),
    ("num.bitwise", {"repeats_equal": [True, False]}, {}, "fail", "bits_differ", True),
    ("num.bitwise", bits("a", "a", "b"), {}, "fail", "bits_differ_device", True),
    ("num.bitwise", bits("a", "a", "a"), {}, "pass", "bits_equal", False),
    ("num.bitwise", {"devices": [{"digest": "a", "again": False}]}, {}, "fail", "bits_differ_device", True),
    (
        "num.bitwise",
        {"devices": [{"name": "A", "digest": "a"}, {"name": "B"}]},
        {},
        "pass",
        "bits_equal",
        False,
    ),
    ("num.bitwise", {"devices": [{"problem": "CUDA error"}]}, {}, "unknown", "bits_not_compared", False),
    (
        "coll.intra",
        {"mb_s": {"all_reduce": 900.0, "all_gather": 500.0, "all_to_all": 1.0}},
        {},
        "pass",
        "collective",
        False,
    ),
    (
        "coll.intra",
        {"wrong": ["all_reduce of 64 bytes: 1 values wrong on rank 0"]},
        {},
        "fail",
        "collective_wrong",
        True,
    ),
    ("cpu.membw", {}, {}, "pass", "membw", False),
    ("cpu.membw", {"correct": False}, {}, "fail", "membw_wrong", True),
    ("cpu.membw", {"gb_s": [10.0]}, {"baseline": {"cpu.membw.gb_s": 20.0}}, "fail", "membw_slow", False),
    (
        "cpu.membw",
        {"gb_s": [10.0]},
        {"baseline": {"cpu.membw.gb_s": 20.0}, "known": Known(noise={"cpu.membw.gb_s": 3.0})},
        "pass",
        "membw",
        False,
    ),
    ("train.mini_gpt", {}, {}, "pass", "trained", False),
    ("train.mini_gpt", {"losses": [4.2, 4.3]}, {}, "fail", "train_loss_stuck", True),
    ("train.mini_gpt", {"losses": [4.2, float("nan")]}, {}, "fail", "train_loss_stuck", True),
    ("train.mini_gpt", {"digests": ["a", "b"]}, {}, "fail", "train_ranks_differ", True),
    (
        "train.mini_gpt",
        {"digests": ["a", "a"], "key": "torch 2"},
        {"known": Known(digests={"train.mini_gpt: torch 2": "b"})},
        "fail",
        "train_digest_differs",
        True,
    ),
    (
        "train.mini_gpt",
        {"digests": ["a", "a"], "key": "torch 3"},
        {"known": Known(digests={"train.mini_gpt: torch 2": "b"})},
        "pass",
        "trained",
        False,
    ),
    ("train.mini_gpt", {"problem": "connection refused"}, {}, "fail", "train_broken", False),
    ("coll.intra", {"problem": "connection refused"}, {}, "fail", "collective_broken", False),
]


@pytest.mark.parametrize(
    ("check", "facts", "options", "verdict", "reason", "blocking"),
    CASES,
    ids=[f"{case[0]}-{case[4]}-{i}" for i, case in enumerate(CASES)],
)
def test_judgement(
    check: str, facts: dict[str, Any], options: dict[str, Any], verdict: str, reason: str, blocking: bool
) -> None:
    result = judged(check, {"facts": facts}, **options)
    assert (result.verdict.value, result.blocking) == (verdict, blocking)
    assert Reason(reason) in {finding.reason for finding in result.findings}
    for finding in result.findings:
        assert finding.reason in by_id(check).reasons, "'explain' does not know this reason"
        assert "?" not in describe(finding), "a fact of the sentence is missing"
        assert "?" not in next_step(finding)
        if (
            finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
            and finding.reason is not Reason.MOUNT_NOT_ASKED
        ):
            assert next_step(finding), "trouble without a way on"


def drilled_elsewhere(check: str) -> bool:
    """What devices, links and ports say is tried in test_drills.py, what groups say in test_fleet.py."""
    families = ("gpu.", "link.", "perf.", "mem.", "deep.", "net.tcp", "net.rdma", "sw.fleet")
    families += ("coll.pair", "coll.all", "coll.localise")
    return check.startswith(families) and check != "gpu.inventory"


def test_every_reason_of_every_check_is_tried() -> None:
    tried = {(case[0], case[4]) for case in CASES}
    kernel = {reason.value for reason in Reason if reason.value.startswith("kernel_")}
    wanted = {
        (check.id, reason.value)
        for check in CHECKS
        for reason in check.reasons
        if reason.value not in kernel and reason is not Reason.NO_BASELINE
        if not drilled_elsewhere(check.id)
    }
    assert wanted <= tried, sorted(wanted - tried)


def test_every_reason_has_words_and_every_check_has_reasons() -> None:
    assert set(TEXTS) == set(Reason)
    engine = {
        Reason.NOT_APPLICABLE,
        Reason.NOT_IN_DRILL,
        Reason.TOOL_MISSING,
        Reason.NOT_PERMITTED,
        Reason.CANNOT_LOOK,
        Reason.PROBE_BROKEN,
        Reason.TIMED_OUT,
        Reason.HUNG,
        Reason.STUCK_IN_KERNEL,
        Reason.CRASHED,
        Reason.NO_TIME_LEFT,
        Reason.CANCELLED,
    }
    assert {reason for check in CHECKS for reason in check.reasons} | engine == set(Reason)


@pytest.mark.parametrize("check", [check.id for check in CHECKS])
@pytest.mark.parametrize(
    "script",
    [
        {"hung": {"phase": "looking", "after_s": 1.4, "full_time": False}},
        {"hung": {"phase": "looking", "after_s": 10.0}},
        {"hung": {"after_s": 10.0, "unkillable": True, "pid": 7}},
        {"crashed": {"signal": "SIGSEGV"}},
        {"crashed": {"signal": "SIGKILL"}},
        {"crashed": {"code": 1}},
        {"cannot": {"kind": "not_permitted", "message": "no"}},
        {"cannot": {"kind": "tool_missing", "message": "no"}},
        {"cannot": {"kind": "broken", "message": "no"}},
        {"cannot": {"kind": "child_failed", "message": "no"}},
    ],
)
def test_what_gave_no_facts_is_never_a_pass_and_never_blocks(check: str, script: dict[str, Any]) -> None:
    result = judged(check, script)
    assert result.verdict in (Verdict.FAIL, Verdict.UNKNOWN)
    assert not result.blocking
    assert "?" not in describe(result.findings[0])


def test_only_a_store_that_was_given_long_blocks_by_its_silence() -> None:
    assert judged("store.ckpt_path", {"hung": {"after_s": 30.0}}).blocking
    assert not judged("store.ckpt_path", {"hung": {"after_s": 30.0, "full_time": False}}).blocking
    assert not judged("gpu.inventory", {"hung": {"after_s": 30.0}}).blocking


def test_without_expectations_no_environment_blocks() -> None:
    """A container with nothing allowed, small shared memory and no clock trains under torchrun, so also
    here."""
    drill = parse(
        {
            "schema": 1,
            "checks": {
                "env.capabilities": {"facts": {"container": "docker"}},
                "gpu.inventory": {"facts": {"init_error": "UNKNOWN"}},
                "host.cpu_mem": {"facts": {"cpu_quota": 0.1, "memory_available_bytes": 1, "load_1min": 99.0}},
                "host.limits": {
                    "facts": {"nofile_soft": 64, "shm_bytes": 65536, "shm_free_bytes": 0, "tasks_left": 1}
                },
                "host.disk": {"facts": volume(bytes_free=0)},
                "host.boot": {"cannot": {"kind": "tool_missing"}},
                "host.kernel": {"cannot": {"kind": "not_permitted"}},
                "net.clock": {"facts": {"unix_s": 0.0}},
                "sw.versions": {"facts": {"torch_version": "1.0", "torch_metadata": "2.0"}},
                "sw.fingerprint": {"facts": {}},
                "store.mounts": {"facts": {"mounts": [{"path": "/x", "state": "hung"}]}},
                "store.ckpt_path": {"cannot": {"kind": "not_applicable"}},
                "cpu.gemm": {"crashed": {"signal": "SIGILL"}},
                "num.bitwise": {"cannot": {"kind": "not_applicable"}},
                "coll.intra": {"facts": {"problem": "name resolution"}},
            },
        },
        path="test",
    )
    report = sanitycheck.run(drill=drill)
    assert report.verdict is Verdict.FAIL
    assert not report.blocking


def test_levels_include_the_ones_before_and_only_overrides_them() -> None:
    instant = {check.id for check in choose(Level.INSTANT)}
    assert instant == {
        "gpu.inventory",
        "host.limits",
        "host.disk",
        "net.clock",
        "sw.versions",
        "store.ckpt_path",
    }
    levels = [{check.id for check in choose(level)} for level in Level]
    assert all(shallow < deep for shallow, deep in itertools.pairwise(levels))
    assert levels[-1] == {check.id for check in CHECKS}
    assert [check.id for check in choose(Level.INSTANT, only=("cpu.gemm",))] == ["cpu.gemm"]


def test_ids_are_unique_and_well_formed() -> None:
    ids = [check.id for check in CHECKS]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z]+\.[a-z0-9_]+", one) for one in ids)


def test_outcomes_tell_how_long_they_took() -> None:
    assert (Cannot(kind="x").duration_s, Crashed().duration_s, Hung(after_s=2.0).duration_s) == (
        0.0,
        0.0,
        2.0,
    )
