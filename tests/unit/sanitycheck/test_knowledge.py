"""The packaged tables hold what they say, and a table with a slip is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from sanitycheck.checks.xid import judge_xid
from sanitycheck.errors import TableError
from sanitycheck.facts.xid import find_xids
from sanitycheck.knowledge.specs import SPECS, load_specs, replay_expected_per_min, spec_of
from sanitycheck.knowledge.xids import CATALOGUE, catalogue, load_catalogue, parse_line, recovery_wanted
from sanitycheck.options import Options
from sanitycheck.result import Verdict

XID = "NVRM: Xid (PCI:0000:3b:00): "


@pytest.fixture(scope="module")
def tables() -> dict[str, Any]:
    return {path.name: yaml.safe_load(path.read_text()) for path in (SPECS, CATALOGUE)}


@pytest.fixture
def spoilt(tables: dict[str, Any], tmp_path: Path) -> Callable[..., Path]:
    def write(path: Path, change: Callable[[Any], object]) -> Path:
        data = copy.deepcopy(tables[path.name])
        change(data)
        out = tmp_path / path.name
        out.write_text(yaml.safe_dump(data))
        return out

    return write


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("NVIDIA H100 80GB HBM3", "h100_sxm5_80gb"),
        ("NVIDIA H100 PCIe", "h100_pcie_80gb"),
        ("NVIDIA H200", "h200_sxm_141gb"),
        ("NVIDIA H200 NVL", "h200_nvl_141gb"),
        ("NVIDIA H20", "h20_96gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm4_80gb"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40", "l40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200_sxm_180gb"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A10G", None),
        ("NVIDIA Z9000", None),
        ("", None),
    ],
)
def test_a_name_means_one_model_or_none(name: str, model: str | None) -> None:
    spec = spec_of(name)
    assert (spec.id if spec else None) == model


def test_every_figure_has_a_source_and_bridged_parts_are_marked() -> None:
    specs = load_specs()
    assert len({spec.id for spec in specs}) == len(specs) >= 35
    assert all(spec.source for spec in specs)
    assert {spec.id for spec in specs if spec.bridged} >= {"a100_pcie_80gb", "h100_nvl_94gb", "a30"}
    assert not any(spec.bridged for spec in specs if "sxm" in spec.id)


def at(index: int, *path: str) -> Callable[[Any], dict[str, Any]]:
    def find(data: Any) -> dict[str, Any]:
        place = data["gpus"][index]
        for part in path:
            place = place[part]
        return place  # type: ignore[no-any-return]

    return find


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: at(2)(data).update(memory_bw_gb_s=2_039_000), "memory bandwidth"),
        (lambda data: at(2)(data).update(memory_bw_gb_s=2.039), "memory bandwidth"),
        (lambda data: at(2)(data).update(memory_gb=80e9), "memory of"),
        (lambda data: at(2, "dense_tflops")(data).update(bf16=312_000), "TFLOP/s bf16"),
        (lambda data: at(2, "achieved")(data).update(matmul_bf16_tflops=27.1), "of the peak"),
        (lambda data: at(2, "nvlink")(data).update(total_unidir_gb_s=2400), "per NVLink"),
        (lambda data: at(2, "pcie")(data).update(typical_h2d_gb_s=200), "copies of"),
        (lambda data: at(2, "pcie")(data).update(gen=9), "generation 9"),
        (lambda data: at(2)(data).update(match=["A100"]), "fits"),
        (lambda data: at(2)(data).pop("memory_gb"), "incomplete"),
        (lambda data: data.update(version=2), "version: 1"),
    ],
)
def test_a_slip_in_the_table_of_models_is_refused(
    spoilt: Callable[..., Path], change: Callable[[Any], object], said: str
) -> None:
    with pytest.raises(TableError, match=said):
        load_specs(spoilt(SPECS, change))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data["entries"].append(data["entries"][0]), "stands twice"),
        (lambda data: data["entries"][0].update(action="pray"), "action 'pray'"),
        (lambda data: data["entries"][0].update(scope="moon"), "scope"),
        (lambda data: data["entries"][0].update(code="79"), "no code"),
        (lambda data: data["entries"][0].pop("meaning"), "meaning"),
        (lambda data: data["actions"]["none"].update(node_effect="explode"), "unknown effect"),
        (lambda data: data["log_patterns"].pop("xid"), "incomplete"),
        (lambda data: data["log_patterns"].update(xid="("), "incomplete"),
    ],
)
def test_a_slip_in_the_catalogue_is_refused(
    spoilt: Callable[..., Path], change: Callable[[Any], object], said: str
) -> None:
    with pytest.raises(TableError, match=said):
        load_catalogue(spoilt(CATALOGUE, change))


def test_a_table_that_is_not_there_or_no_table_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError):
        load_specs(tmp_path / "nothing.yaml")
    (tmp_path / "odd.yaml").write_text("a: [")
    with pytest.raises(TableError):
        load_catalogue(tmp_path / "odd.yaml")


def test_corrected_errors_grow_with_speed_and_lanes() -> None:
    assert replay_expected_per_min(5, width=16) == pytest.approx(1.92 * 16)
    assert replay_expected_per_min(3, width=8) < replay_expected_per_min(4, width=8)


# --- messages -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code", "pci"),
    [
        (XID + "79, pid=1234, name=python, GPU has fallen off the bus.", 79, "0000:3b:00"),
        ("NVRM: Xid (PCI:0000:79:00): 13, Graphics SM Warp Exception", 13, "0000:79:00"),
        ("NVRM: Xid (0000:03:00): 31, Ch 00000010", 31, "0000:03:00"),
        ("NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.", 79, ""),
        ("NVRM: fallen off the bus and is not responding to commands.", 79, ""),
        ("NVRM: nvAssertFailed: Reset required [NV_ERR_RESET_REQUIRED] (0x62)", 154, ""),
        ("nvidia 0000:3b:00.0: NVRM: Xid (PCI:0000:3b:00): 48, DBE", 48, "0000:3b:00"),
        (XID + "109", 109, "0000:3b:00"),
    ],
)
def test_the_code_is_the_number_behind_the_bracket(text: str, code: int, pci: str) -> None:
    line = parse_line(text)
    assert line is not None
    assert (line.code, line.pci) == (code, pci)


NEAR_MISSES = (
    "usb 1-1: new device",
    "Xid 79",
    "NVRM: loading NVIDIA UNIX Kernel Module",
    "NVRM: Xid handling is on",
    "NVRM: SXid (PCI:0000:3b:00): 79, Fatal, Link 1",
    "xNVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    "Command line: BOOT=x NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    'audit: type=1300 comm="NVRM: Xid (PCI:0000:3b:00): 79,"',
    "Out of memory: Killed process 7 (NVRM: fallen off the bus) total-vm:1kB",
    "oom: task=nvidia-nvswitch1: SXid (PCI:0000:3b:00): 20034, Fatal, Link 30",
    "python[7]: NVRM: NV_ERR_RESET_REQUIRED",
    "NVRM: NV_ERR_RESET_REQUIRED_NOT",
    "NVRM: module of a GPU that could have fallen off the bus",
)


UNREADABLE = (
    "NVRM: Xid (PCI:0000:3b:00)",
    "NVRM: Xid (PCI:0000:3b:00): ",
    "NVRM: Xid (PCI:0000:3b:00): 0x4f, GPU has left",
    "NVRM: Xid (PCI:0000:3b:00): 79th, GPU has left",
    "NVRM: Xid (PCI:0000:3b:00): 79.5, GPU has left",
    "NVRM: Xid (PCI:0000:3b:00): " + "7" * 5000 + ", GPU has left",
    "NVRM: Xid (gpu zero): 79, GPU has left",
    "nvidia-nvswitch0: SXid (PCI:0000:3b:00): 11001, Perhaps, Link 1",
)


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_message_without_a_code_that_can_be_read_is_unknown_and_no_other_code(text: str) -> None:
    facts = find_xids([record(text)], uptime_s=1001.0)
    assert [event.code for event in facts.events] == [0]
    assert {finding.verdict for finding in judge_xid(facts, Options())} == {Verdict.UNKNOWN}


@pytest.mark.parametrize("code", sorted(catalogue().entries))
def test_every_code_is_read_as_itself_whatever_a_program_calls_itself(code: int) -> None:
    """The bus numbers, the pid and the name are those of other codes."""
    text = f"NVRM: Xid (PCI:0000:79:00): {code}, pid=48, name=): 79, Ch 94"
    line = parse_line(text)
    assert line is not None
    assert (line.code, line.pci, line.switch) == (code, "0000:79:00", False)


@pytest.mark.parametrize("text", NEAR_MISSES)
def test_other_messages_are_no_xids(text: str) -> None:
    assert parse_line(text) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("None", "NONE"),
        ("GPU Reset Required", "GPU_RESET"),
        ("Node Reboot Required", "NODE_REBOOT"),
        ("Drain P2P", "DRAIN_P2P"),
        ("Drain and Reset", "DRAIN_AND_RESET"),
        ("something else", ""),
    ],
)
def test_the_recovery_is_read_from_its_words(text: str, name: str) -> None:
    line = parse_line(f"{XID}154, GPU recovery action changed from 0x0 (None) to 0x1 ({text})")
    assert line is not None
    assert recovery_wanted(line.wanted) == name


def test_every_code_has_an_effect_that_the_judgement_knows() -> None:
    assert len(catalogue().entries) >= 120
    assert catalogue().entries[79].effect == "isolate"
    assert catalogue().entries[43].effect == "none"


def record(text: str, *, priority: int = 4, at_s: float = 1000.0) -> str:
    return f"{priority},1,{int(at_s * 1e6)},-;{text}\n"


def test_messages_are_counted_by_device_and_code() -> None:
    records = [
        record(XID + "31, one", at_s=900.0),
        record(XID + "31, two", at_s=950.0),
        record(XID + "79, gone", at_s=990.0),
        record("NVRM: Xid (PCI:0000:4c:00): 31, other", at_s=995.0),
        record("nothing of ours"),
        "broken",
    ]
    facts = find_xids(records, uptime_s=1000.0)
    assert [(event.pci, event.code, event.count) for event in facts.events] == [
        ("0000:3b:00", 31, 2),
        ("0000:3b:00", 79, 1),
        ("0000:4c:00", 31, 1),
    ]
    assert facts.events[0].newest_age_s == pytest.approx(50.0)
    assert facts.records == 6


def test_what_a_program_wrote_into_the_log_and_what_is_old_does_not_count() -> None:
    forged = record(XID + "79, gone", priority=(1 << 3) | 4)
    old = record(XID + "79, gone", at_s=10.0)
    assert find_xids([forged, old], uptime_s=1000.0, window_s=500.0).events == ()


def test_the_payload_of_newer_links_says_how_bad_it_is() -> None:
    text = XID + "145, RLW_REMAP Nonfatal XC0 i0 Link 3 (0x00000004 0x00000001)"
    facts = find_xids([record(text)], uptime_s=1001.0)
    assert facts.events[0].payload == "nonfatal"
