"""Scripted facts of devices, links and ports: verdict, reason, whether it blocks. No GPU is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import sanitycheck
from sanitycheck.catalogue import CHECKS, by_id
from sanitycheck.checks.devices import DEVICE_REASONS
from sanitycheck.drill import parse
from sanitycheck.options import Known, Options
from sanitycheck.reasons import Reason
from sanitycheck.render.sentences import describe, next_step
from sanitycheck.result import Result, Verdict
from sanitycheck.thresholds import GIB

A100_PCIE, H100, GB200, GH200 = (
    "NVIDIA A100 80GB PCIe",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA GB200",
    "NVIDIA GH200 480GB",
)
STRANGE = "NVIDIA Z9000"


def judged(check: str, script: Mapping[str, Any], **options: Any) -> Result:
    drill = parse({"schema": 1, "checks": {check: script}}, path="test")
    return sanitycheck.run(options=Options(only=(check,), **options), drill=drill).results[0]


def one(**facts: Any) -> dict[str, Any]:
    return {"devices": [{"index": 0, "uuid": "GPU-0", **facts}]}


def eight(first: Mapping[str, Any] | None = None, **all_of_them: Any) -> dict[str, Any]:
    devices = [{"index": i, "uuid": f"GPU-{i}", **all_of_them} for i in range(8)]
    devices[0] |= first or {}
    return {"devices": devices}


def xid(code: int, **facts: Any) -> dict[str, Any]:
    return {"events": [{"code": code, "pci": "0000:3b:00", **facts}]}


def rates(metric: str, *values: float, name: str = H100) -> dict[str, Any]:
    devices = [{"index": i, "uuid": f"GPU-{i}", "name": name, "values": [v]} for i, v in enumerate(values)]
    return {"metric": metric, "devices": devices}


PORT = {"name": "mlx5_0/1"}
LOST = {"error": "GPU_IS_LOST"}
DOWN = {"active": 17, "inactive": 1}

DRILLS: list[tuple[str, str, dict[str, Any], dict[str, Any], str, str, bool]] = [
    # what happened, check, facts, options, verdict, reason, blocking
    ("nothing", "gpu.recovery_action", {}, {}, "pass", "recovery_none", False),
    ("reset wanted", "gpu.recovery_action", one(action="GPU_RESET"), {}, "fail", "recovery_reset", True),
    ("bus reset", "gpu.recovery_action", one(action="BUS_RESET"), {}, "fail", "recovery_reset", True),
    ("reboot wanted", "gpu.recovery_action", one(action="NODE_REBOOT"), {}, "fail", "recovery_reboot", True),
    ("drain wanted", "gpu.recovery_action", one(action="DRAIN_P2P"), {}, "fail", "recovery_drain", False),
    (
        "reset later",
        "gpu.recovery_action",
        one(action="DRAIN_AND_RESET"),
        {},
        "warn",
        "recovery_drain",
        False,
    ),
    ("new action", "gpu.recovery_action", one(action="CODE_9"), {}, "unknown", "recovery_unknown", False),
    (
        "old driver",
        "gpu.recovery_action",
        one(refused="NOT_SUPPORTED"),
        {},
        "skipped",
        "not_supported",
        False,
    ),
    ("nothing", "gpu.context", {}, {}, "pass", "context_made", False),
    ("CUDA fails", "gpu.context", one(problem="CUDA error: 802"), {}, "fail", "context_failed", True),
    ("bytes wrong", "gpu.context", one(wrong_bytes=3), {}, "fail", "context_wrong", True),
    ("nothing", "gpu.ecc", {}, {}, "pass", "ecc_clean", False),
    ("ECC off", "gpu.ecc", one(enabled=False), {}, "skipped", "ecc_off", False),
    ("volatile", "gpu.ecc", one(volatile_uncorrected=1), {}, "fail", "ecc_uncorrected", False),
    ("corrected only", "gpu.ecc", one(volatile_corrected=9000), {}, "pass", "ecc_clean", False),
    ("SRAM 4", "gpu.ecc", one(sram_uncorrected=4), {}, "pass", "ecc_clean", False),
    ("SRAM 5", "gpu.ecc", one(sram_uncorrected=5), {}, "fail", "ecc_sram", False),
    ("SRAM limit", "gpu.ecc", one(sram_threshold_exceeded=True), {}, "fail", "ecc_sram", False),
    ("nothing", "gpu.remap", {}, {}, "pass", "remap_clean", False),
    ("remapped long ago", "gpu.remap", one(remapped_uncorrected=3), {}, "pass", "remap_clean", False),
    ("remap pending", "gpu.remap", one(pending=True), {}, "fail", "remap_pending", False),
    ("remap failed", "gpu.remap", one(failed=True), {}, "fail", "remap_failed", False),
    ("nothing", "gpu.throttle", {}, {}, "pass", "throttle_none", False),
    ("power cap", "gpu.throttle", one(reasons=["sw_power_cap"]), {}, "pass", "throttle_none", False),
    ("brake", "gpu.throttle", one(reasons=["hw_power_brake"]), {}, "fail", "throttle_hardware", False),
    ("warm", "gpu.throttle", one(reasons=["sw_thermal_slowdown"]), {}, "warn", "throttle_thermal", False),
    ("hot", "gpu.throttle", one(temperature_c=91), {}, "fail", "temperature_high", False),
    ("nothing", "gpu.processes", {}, {}, "pass", "gpu_free", False),
    ("our own", "gpu.processes", one(processes=[{"pid": 7, "ours": True}]), {}, "pass", "gpu_free", False),
    ("foreign", "gpu.processes", one(processes=[{"pid": 7}]), {}, "fail", "gpu_busy", False),
    (
        "foreign, exclusive",
        "gpu.processes",
        one(processes=[{"pid": 7}], compute_mode="exclusive_process"),
        {},
        "fail",
        "gpu_busy",
        True,
    ),
    ("exclusive", "gpu.processes", one(compute_mode="exclusive_process"), {}, "warn", "gpu_exclusive", False),
    ("prohibited", "gpu.processes", one(compute_mode="prohibited"), {}, "fail", "gpu_prohibited", True),
    ("nothing", "gpu.mig", {}, {}, "pass", "mig_as_expected", False),
    ("MIG on", "gpu.mig", one(current=True, pending=True), {}, "warn", "mig_not_expected", False),
    (
        "MIG on, meant off",
        "gpu.mig",
        one(current=True, pending=True),
        {"known": Known(mig=False)},
        "fail",
        "mig_not_expected",
        False,
    ),
    (
        "MIG meant",
        "gpu.mig",
        one(current=True, pending=True),
        {"known": Known(mig=True)},
        "pass",
        "mig_as_expected",
        False,
    ),
    ("MIG pending", "gpu.mig", one(pending=True), {}, "warn", "mig_pending", False),
    ("no message", "gpu.xid_recent", {}, {}, "pass", "xid_none", False),
    ("program", "gpu.xid_recent", xid(43), {}, "pass", "xid_seen", False),
    ("program, once", "gpu.xid_recent", xid(31), {}, "pass", "xid_seen", False),
    ("program, again", "gpu.xid_recent", xid(31, count=3), {}, "warn", "xid_repeated", False),
    ("fallen off", "gpu.xid_recent", xid(79), {}, "fail", "xid_isolate", False),
    ("double bit", "gpu.xid_recent", xid(48), {}, "fail", "xid_isolate", False),
    ("contained", "gpu.xid_recent", xid(94), {}, "warn", "xid_suspect", False),
    ("remap", "gpu.xid_recent", xid(63), {}, "warn", "xid_suspect", False),
    ("NVLink", "gpu.xid_recent", xid(74), {}, "fail", "xid_isolate", False),
    ("GSP", "gpu.xid_recent", xid(119), {}, "fail", "xid_isolate", False),
    ("NVLink 5, harmless", "gpu.xid_recent", xid(145, payload="nonfatal"), {}, "pass", "xid_seen", False),
    ("NVLink 5, fatal", "gpu.xid_recent", xid(145, payload="fatal"), {}, "fail", "xid_isolate", False),
    ("NVLink 5, unclear", "gpu.xid_recent", xid(145), {}, "unknown", "xid_unknown", False),
    (
        "reset wanted",
        "gpu.xid_recent",
        xid(154, wanted="GPU Reset Required"),
        {},
        "fail",
        "xid_isolate",
        False,
    ),
    ("later", "gpu.xid_recent", xid(154, wanted="Drain and Reset"), {}, "warn", "xid_suspect", False),
    ("malformed", "gpu.xid_recent", xid(154, wanted=""), {}, "unknown", "xid_unknown", False),
    ("not listed", "gpu.xid_recent", xid(999), {}, "unknown", "xid_unknown", False),
    (
        "switch, fatal",
        "gpu.xid_recent",
        xid(1, switch=True, payload="fatal"),
        {},
        "fail",
        "xid_isolate",
        False,
    ),
    ("switch", "gpu.xid_recent", xid(1, switch=True, payload="nonfatal"), {}, "warn", "xid_suspect", False),
    (
        "reset since",
        "gpu.xid_recent",
        {
            "events": [
                {"code": 62, "pci": "a", "newest_age_s": 900.0},
                {"code": 154, "pci": "a", "wanted": "None", "newest_age_s": 60.0},
            ]
        },
        {},
        "warn",
        "xid_recovered",
        False,
    ),
    ("board, all up", "link.nvlink", eight(), {}, "pass", "nvlink_up", False),
    ("board, one down", "link.nvlink", eight(DOWN), {}, "fail", "nvlink_down", False),
    (
        "no bridge",
        "link.nvlink",
        eight(name=A100_PCIE, active=0, inactive=12),
        {},
        "pass",
        "nvlink_none",
        False,
    ),
    (
        "one bridge of two",
        "link.nvlink",
        eight({"active": 4}, name=A100_PCIE, active=12),
        {},
        "fail",
        "nvlink_down",
        False,
    ),
    ("one device of a board", "link.nvlink", one(active=0, inactive=18), {}, "pass", "nvlink_none", False),
    (
        "NVLink 5 symbols",
        "link.nvlink",
        eight(name=GB200, symbol_errors=5_000_000, version=8),
        {},
        "pass",
        "nvlink_up",
        False,
    ),
    ("trained anew", "link.nvlink", eight({"recoveries": 2}), {}, "warn", "nvlink_errors", False),
    (
        "unknown model, one differs",
        "link.nvlink",
        eight({"active": 3}, name=STRANGE, active=4),
        {},
        "fail",
        "nvlink_down",
        False,
    ),
    (
        "unknown model, all alike",
        "link.nvlink",
        eight(name=STRANGE, active=3, inactive=1),
        {},
        "unknown",
        "gpu_model_unknown",
        False,
    ),
    ("joined", "link.fabric", eight(), {}, "pass", "fabric_joined", False),
    ("joining", "link.fabric", eight({"state": "in_progress"}), {}, "unknown", "fabric_joining", False),
    ("not joined", "link.fabric", eight({"state": "not_started"}), {}, "fail", "fabric_not_joined", False),
    ("joined badly", "link.fabric", eight({"status": "CODE_3"}), {}, "fail", "fabric_not_joined", False),
    ("no fabric", "link.fabric", one(state="not_supported"), {}, "skipped", "not_supported", False),
    ("rack, no clique", "link.fabric", one(name=GB200), {}, "fail", "fabric_no_clique", False),
    ("rack", "link.fabric", one(name=GB200, clique=1, cluster=True), {}, "pass", "fabric_joined", False),
    ("full speed", "link.pcie", eight(), {}, "pass", "pcie_full", False),
    ("idle at 1", "link.pcie", one(generation=1, loaded=False), {}, "pass", "pcie_idle", False),
    ("stuck at 2", "link.pcie", one(generation=2), {}, "fail", "pcie_slow", False),
    (
        "old slot",
        "link.pcie",
        one(generation=4, path_generation=4, width=8, path_width=8),
        {},
        "pass",
        "pcie_full",
        False,
    ),
    ("narrow", "link.pcie", one(width=4), {}, "fail", "pcie_narrow", False),
    ("chip link", "link.pcie", one(name=GH200, width=1), {}, "skipped", "not_supported", False),
    ("few", "link.pcie_aer", one(corrected=100), {}, "pass", "aer_clean", False),
    ("many", "link.pcie_aer", one(corrected=50_000_000), {}, "warn", "aer_corrected", False),
    ("lost once", "link.pcie_aer", one(nonfatal=1), {}, "warn", "aer_nonfatal", False),
    ("fatal", "link.pcie_aer", one(fatal=1), {}, "fail", "aer_fatal", False),
    (
        "not counted",
        "link.pcie_aer",
        one(corrected=None, nonfatal=None, fatal=None),
        {},
        "skipped",
        "aer_not_counted",
        False,
    ),
    ("as usual", "perf.gemm", rates("gemm_tflops", 790.0, 785.0), {}, "pass", "perf_measured", False),
    ("slow", "perf.gemm", rates("gemm_tflops", 500.0), {}, "fail", "perf_slow", False),
    ("rather slow", "perf.gemm", rates("gemm_tflops", 700.0), {}, "warn", "perf_slow", False),
    (
        "one slower",
        "perf.gemm",
        rates("gemm_tflops", 840.0, 840.0, 790.0),
        {},
        "warn",
        "perf_spread",
        False,
    ),
    (
        "unknown model",
        "perf.gemm",
        rates("gemm_tflops", 840.0, name=STRANGE),
        {},
        "unknown",
        "gpu_model_unknown",
        False,
    ),
    (
        "unknown model, one slower",
        "perf.gemm",
        rates("gemm_tflops", 840.0, 840.0, 500.0, name=STRANGE),
        {},
        "unknown",
        "perf_spread",
        False,
    ),
    ("broken", "perf.gemm", one(problem="CUDA error"), {}, "fail", "perf_broken", False),
    ("as usual", "perf.membw", rates("memory_gb_s", 2900.0), {}, "pass", "perf_measured", False),
    ("slow", "perf.membw", rates("memory_gb_s", 1000.0), {}, "fail", "perf_slow", False),
    ("as usual", "perf.h2d", rates("h2d_gb_s", 54.0), {}, "pass", "perf_measured", False),
    ("Gen2 stuck", "perf.h2d", rates("h2d_gb_s", 6.5), {}, "fail", "perf_slow", False),
    ("as usual", "perf.d2h", rates("d2h_gb_s", 53.0), {}, "pass", "perf_measured", False),
    ("as usual", "perf.p2p", {}, {}, "pass", "perf_measured", False),
    (
        "slow pair",
        "perf.p2p",
        {"pairs": [{"source": 0, "target": 1, "gb_s": 40.0}]},
        {},
        "fail",
        "perf_slow",
        False,
    ),
    (
        "broken pair",
        "perf.p2p",
        {"pairs": [{"source": 0, "target": 1, "problem": "CUDA error"}]},
        {},
        "fail",
        "perf_broken",
        False,
    ),
    ("one device", "perf.p2p", {"count": 1, "pairs": []}, {}, "skipped", "perf_one_device", False),
    ("clean", "mem.pattern", {}, {}, "pass", "memory_pattern", False),
    ("wrong byte", "mem.pattern", one(wrong_bytes=1), {}, "fail", "memory_pattern_wrong", True),
    ("busy device", "mem.pattern", one(tested_bytes=10 * GIB), {}, "unknown", "memory_pattern_part", False),
    (
        "steady",
        "deep.gemm_sustain",
        rates("sustained_tflops", 1.0) | one(values=[800.0] * 9),
        {},
        "pass",
        "sustained",
        False,
    ),
    (
        "drops",
        "deep.gemm_sustain",
        one(values=[800.0] * 3 + [700.0] * 6),
        {},
        "fail",
        "sustained_drop",
        False,
    ),
    ("passed", "deep.dcgm", {}, {}, "pass", "dcgm_passed", False),
    ("failed", "deep.dcgm", {"failed": [{"name": "memory"}]}, {}, "fail", "dcgm_failed", False),
    ("reached", "net.tcp", {}, {}, "pass", "tcp_reached", False),
    ("no name", "net.tcp", {"targets": [{"problem": "name"}]}, {}, "fail", "tcp_name", False),
    ("refused", "net.tcp", {"targets": [{"problem": "refused"}]}, {}, "warn", "tcp_refused", False),
    ("cut", "net.tcp", {"targets": [{"problem": "timeout"}]}, {}, "fail", "tcp_unreachable", False),
    ("mixed sizes", "net.tcp", {"targets": [{"mtu": 9000}, {"mtu": 1500}]}, {}, "warn", "tcp_mtu", False),
    ("up", "net.rdma_ports", {}, {}, "pass", "rdma_ports", False),
    (
        "down",
        "net.rdma_ports",
        {"ports": [{**PORT, "state": "DOWN", "physical": "Polling"}]},
        {},
        "fail",
        "rdma_down",
        False,
    ),
    (
        "disabled on purpose",
        "net.rdma_ports",
        {"ports": [{**PORT, "state": "DOWN", "physical": "Disabled"}]},
        {},
        "pass",
        "rdma_disabled",
        False,
    ),
    (
        "slower than its siblings",
        "net.rdma_ports",
        {"ports": [PORT, {"name": "mlx5_1/1", "rate_gbit": 200.0}]},
        {},
        "fail",
        "rdma_slow",
        False,
    ),
    (
        "storage port of another kind",
        "net.rdma_ports",
        {"ports": [PORT, {"name": "mlx5_9/1", "rate_gbit": 100.0, "layer": "Ethernet"}]},
        {},
        "pass",
        "rdma_ports",
        False,
    ),
    ("too few", "net.rdma_ports", {}, {"known": Known(rdma_ports=8)}, "fail", "rdma_few", False),
    ("quiet", "net.rdma_counters", {"counters": {"a/1.link_downed": 1}}, {}, "pass", "rdma_counters", False),
    (
        "flapping",
        "net.rdma_counters",
        {"counters": {"a/1.link_downed": 40}},
        {"known": Known(counters={"a/1.link_downed": 35})},
        "fail",
        "rdma_flaps",
        False,
    ),
    (
        "flapped last year",
        "net.rdma_counters",
        {"counters": {"a/1.link_downed": 40}},
        {"known": Known(counters={"a/1.link_downed": 40})},
        "pass",
        "rdma_counters",
        False,
    ),
    (
        "flapping, no record",
        "net.rdma_counters",
        {"counters": {"a/1.link_downed": 9}},
        {},
        "fail",
        "rdma_flaps",
        False,
    ),
    (
        "errors",
        "net.rdma_counters",
        {"counters": {"a/1.symbol_error": 10**6}},
        {},
        "warn",
        "rdma_errors",
        False,
    ),
]
DEVICE_CHECKS = [
    check for check in CHECKS if Reason.GPU_NONE in check.reasons and check.id != "gpu.inventory"
]


@pytest.mark.parametrize(
    ("what", "check", "facts", "options", "verdict", "reason", "blocking"),
    DRILLS,
    ids=[f"{drill[1]}-{drill[0]}".replace(" ", "_") for drill in DRILLS],
)
def test_drill(
    what: str,
    check: str,
    facts: dict[str, Any],
    options: dict[str, Any],
    verdict: str,
    reason: str,
    blocking: bool,
) -> None:
    result = judged(check, {"facts": facts}, **options)
    assert (result.verdict.value, result.blocking) == (verdict, blocking)
    assert Reason(reason) in {finding.reason for finding in result.findings}
    for finding in result.findings:
        assert finding.reason in by_id(check).reasons, "'explain' does not know this reason"
        assert "?" not in describe(finding), "a fact of the sentence is missing"
        assert "?" not in next_step(finding)
        if finding.verdict in (Verdict.FAIL, Verdict.UNKNOWN):
            assert next_step(finding), "trouble without a way on"


def test_every_reason_of_devices_links_and_ports_is_tried() -> None:
    families = ("gpu.", "link.", "net.tcp", "net.rdma", "deep.")
    tried = {(drill[1], drill[5]) for drill in DRILLS}
    wanted = {
        (check.id, reason.value)
        for check in CHECKS
        if check.id.startswith(families) and check.id != "gpu.inventory"
        for reason in check.reasons
        if reason not in DEVICE_REASONS and (check.id, reason) != ("deep.gemm_sustain", Reason.PERF_BROKEN)
    }
    assert wanted <= tried, sorted(wanted - tried)
    assert len(DRILLS) >= 100


@pytest.mark.parametrize("check", [check.id for check in DEVICE_CHECKS])
@pytest.mark.parametrize(
    ("error", "expect", "verdict", "reason"),
    [
        ("LIBRARY_NOT_FOUND", None, "skipped", Reason.GPU_NOT_EXPECTED),
        ("LIBRARY_NOT_FOUND", 8, "fail", Reason.GPU_NONE),
        ("NOT_FOUND", None, "skipped", Reason.GPU_NOT_EXPECTED),
        ("LIB_RM_VERSION_MISMATCH", None, "fail", Reason.DRIVER_MISMATCH),
        ("GPU_IS_LOST", None, "fail", Reason.GPU_HARDWARE),
        ("NO_PERMISSION", None, "unknown", Reason.GPU_NOT_PERMITTED),
        ("UNKNOWN", None, "unknown", Reason.NVML_UNKNOWN_ERROR),
        ("UNKNOWN", 8, "unknown", Reason.NVML_UNKNOWN_ERROR),
    ],
)
def test_without_nvml_every_device_check_says_why(
    check: str, error: str, expect: int | None, verdict: str, reason: Reason
) -> None:
    empty = "pairs" if check == "perf.p2p" else "devices"
    result = judged(check, {"facts": {"init_error": error, empty: []}}, expect_gpus=expect)
    assert (result.verdict.value, result.reason, result.blocking) == (verdict, reason, False)


@pytest.mark.parametrize("check", [check.id for check in DEVICE_CHECKS if check.id != "perf.p2p"])
def test_a_lost_device_fails_every_check_of_it_and_the_others_are_still_judged(check: str) -> None:
    result = judged(check, {"facts": {"devices": [{"index": 0, "uuid": "", **LOST}]}})
    assert (result.verdict, result.reason) == (Verdict.FAIL, Reason.GPU_HARDWARE)
    assert "gpu:0" in describe(result.findings[0])


def test_a_hanging_nvml_fails_and_says_where_it_stood() -> None:
    result = judged("gpu.ecc", {"hung": {"phase": "asking device 3", "after_s": 30.0}})
    assert (result.verdict, result.reason) == (Verdict.FAIL, Reason.HUNG)
    assert "asking device 3" in describe(result.findings[0])


def test_a_kernel_log_that_may_not_be_read_is_unknown() -> None:
    result = judged("gpu.xid_recent", {"cannot": {"kind": "not_permitted", "message": "/dev/kmsg"}})
    assert result.verdict is Verdict.UNKNOWN


def test_two_drivers_in_a_fleet_are_named_by_the_fingerprint() -> None:
    result = judged(
        "sw.fingerprint",
        {"facts": {"versions": {"driver": "550.54.15"}}},
        fingerprint={"driver": "580.65.06"},
    )
    assert "550.54.15" in describe(result.findings[0])
    assert "580.65.06" in describe(result.findings[0])
