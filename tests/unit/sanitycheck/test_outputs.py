"""What other programs read: JSON with its schema, JUnit, Prometheus, the hooks of schedulers, the record."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import sanitycheck
from sanitycheck.baseline import (
    VALUES_KEPT,
    Baseline,
    compare,
    figures_of,
    identity_of_node,
    read_baseline,
    recorded,
)
from sanitycheck.cli import main
from sanitycheck.cli.hook import NPD_CHARS_MAX, drain_reason, npd_answer
from sanitycheck.drill import parse
from sanitycheck.errors import BadFileError, UsageError
from sanitycheck.options import Options
from sanitycheck.render import json as as_json
from sanitycheck.render import junit, prometheus
from sanitycheck.render.schema import report_schema
from sanitycheck.result import Report

MIXED: dict[str, Any] = {
    "host.limits": {"facts": {"nofile_soft": 256}},
    "host.disk": {"facts": {"temp_found": False}},
    "host.kernel": {"cannot": {"kind": "not_permitted", "message": 'no <"way"> & no\x07 bell'}},
    "cpu.gemm": {"facts": {}},
    "store.mounts": {"facts": {}},
}
FAILS = {"gpu.ecc": {"facts": {"devices": [{"uuid": "GPU-7", "volatile_uncorrected": 3}]}}}
BLOCKS = {"host.disk": {"facts": {"temp_found": False}}}
UNKNOWN = {"host.kernel": {"cannot": {"kind": "not_permitted", "message": "/dev/kmsg"}}}
PASSES = {"host.limits": {"facts": {}}}


def drilled(checks: Mapping[str, Any]) -> Report:
    drill = parse({"schema": 1, "checks": checks}, path="test")
    return sanitycheck.run(options=Options(only=tuple(checks)), drill=drill)


def complaints(schema: Mapping[str, Any], value: Any, where: str = "report") -> Iterator[str]:
    """What JSON Schema (the part we use) says against a value."""
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "boolean": bool,
        "integer": int,
        "number": (int, float),
    }
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: {value!r} is none of {schema['enum']}"
    if "type" in schema and not isinstance(value, kinds[schema["type"]]):
        yield f"{where}: {value!r} is no {schema['type']}"
        return
    if isinstance(value, dict):
        yield from (f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, part in value.items():
            inner = schema.get("properties", {}).get(name, schema.get("additionalProperties", {}))
            if isinstance(inner, dict):
                yield from complaints(inner, part, f"{where}.{name}")
    if isinstance(value, list):
        for place, part in enumerate(value):
            yield from complaints(schema.get("items", {}), part, f"{where}[{place}]")


@pytest.mark.parametrize("checks", [MIXED, FAILS, BLOCKS, UNKNOWN, PASSES])
def test_a_report_keeps_to_the_published_schema(checks: dict[str, Any]) -> None:
    data = json.loads(as_json.render(drilled(checks)))
    assert list(complaints(report_schema(), data)) == []


def test_the_schema_notices_what_is_wrong() -> None:
    data = json.loads(as_json.render(drilled(MIXED)))
    for change in ({"schema": 9}, {"verdict": "splendid"}, {"results": {}}, {"node": 7}):
        assert list(complaints(report_schema(), {**data, **change}))
    del data["coverage"]
    assert list(complaints(report_schema(), data))


def test_junit_has_a_case_per_check_and_tells_failures_from_what_could_not_be_looked_at() -> None:
    report = drilled(MIXED)
    suite = ElementTree.fromstring(junit.render(report))
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert set(cases) == {result.check for result in report.results}
    assert suite.get("failures") == "1"
    assert suite.get("errors") == "1"
    assert cases["host.disk"].find("failure") is not None
    error = cases["host.kernel"].find("error")
    assert error is not None
    assert error.get("type") == "not_permitted"
    assert '<"way"> & no bell' in (error.get("message") or "")
    assert cases["store.mounts"].find("skipped") is not None


def test_prometheus_text_has_the_form_that_it_must_have() -> None:
    text = prometheus.render(drilled(MIXED))
    sample = re.compile(r'^[a-z_]+(\{[a-z_]+="[^"]*"(,[a-z_]+="[^"]*")*\})? -?[0-9.e+]+$')
    for line in text.splitlines():
        assert line.startswith("# ") or sample.match(line), line
    assert 'sanitycheck_verdict{check="host.disk",verdict="fail"} 1' in text
    assert 'sanitycheck_verdict{check="host.kernel",verdict="unknown"} 1' in text
    assert 'sanitycheck_figure{name="cpu.gemm.gflops"} 100' in text
    assert "sanitycheck_blocking 1" in text


def test_files_are_written_beside_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {name: str(tmp_path / name) for name in ("json", "junit", "prometheus")}
    args = [part for name, path in paths.items() for part in (f"--{name}", path)]
    assert main(["run", "--only", "host.limits", *args]) == 0
    assert Report.from_json(Path(paths["json"]).read_text())
    assert ElementTree.parse(paths["junit"]).getroot().get("tests") == "1"
    assert "sanitycheck_verdict" in Path(paths["prometheus"]).read_text()
    assert sorted(os.listdir(tmp_path)) == ["json", "junit", "prometheus"]
    capsys.readouterr()


def hooked(kind: str, checks: Mapping[str, Any], folder: Path) -> int:
    path = folder / "drill.json"
    path.write_text(json.dumps({"schema": 1, "checks": checks}))
    return main(["hook", kind, "--only", ",".join(checks), "--drill", str(path)])


@pytest.mark.parametrize("kind", ["slurm-prolog", "k8s-init"])
@pytest.mark.parametrize(("checks", "code"), [(BLOCKS, 1), (FAILS, 0), (UNKNOWN, 0), (PASSES, 0)])
def test_prolog_and_init_container_obey_only_what_blocks(
    kind: str, checks: dict[str, Any], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hooked(kind, checks, tmp_path) == code
    out, err = capsys.readouterr()
    assert ("sanitycheck: host.disk" in err) == (code == 1)
    assert out.startswith("print sanitycheck:") == (code == 1 and kind == "slurm-prolog")


@pytest.mark.parametrize(("checks", "code"), [(BLOCKS, 1), (FAILS, 1), (UNKNOWN, 2), (PASSES, 0)])
def test_the_problem_detector_gets_one_short_line(
    checks: dict[str, Any], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hooked("npd", checks, tmp_path) == code
    (line,) = capsys.readouterr().out.splitlines()
    assert 0 < len(line) <= NPD_CHARS_MAX
    assert npd_answer(drilled(checks))[0] == code


@pytest.mark.parametrize(
    ("kind", "code"), [("slurm-prolog", 0), ("slurm-health", 0), ("k8s-init", 0), ("npd", 2)]
)
@pytest.mark.parametrize(
    "args",
    [
        ("--levle", "quick"),
        ("--only", "host.disc"),
        ("--drill", "/nowhere.json"),
        ("--fingerprint", "/no.json"),
    ],
)
def test_a_typing_error_or_a_bug_never_drains_a_cluster(
    kind: str,
    code: int,
    args: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["hook", kind, *args]) == code
    assert capsys.readouterr().err

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no such thing should happen")

    monkeypatch.setattr("sanitycheck.cli.hook.run", broken)
    assert main(["hook", kind]) == code
    assert "please report" in capsys.readouterr().err


SCONTROL = """#!/bin/sh
echo "$@" >> "$RECORD"
[ "$1" = show ] && echo "NodeName=x State=$STATE Reason=$WHY"
exit ${CODE:-0}
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of that name that writes down what it is asked; the real one needs a cluster."""
    program = tmp_path / "bin" / "scontrol"
    program.parent.mkdir()
    program.write_text(SCONTROL)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("RECORD", str(tmp_path / "asked"))
    monkeypatch.setenv("STATE", "IDLE")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu07")
    return tmp_path / "asked"


def test_the_health_program_drains_what_fails_and_says_why(scontrol: Path, tmp_path: Path) -> None:
    assert hooked("slurm-health", FAILS, tmp_path) == 0
    shown, update = scontrol.read_text().splitlines()
    assert shown.startswith("show node gpu07")
    assert update.startswith(
        "update NodeName=gpu07 State=DRAIN Reason=sanitycheck: gpu.ecc: gpu:GPU-7: 3 memory"
    )


@pytest.mark.parametrize("checks", [UNKNOWN, PASSES])
def test_the_health_program_never_drains_for_what_it_does_not_know(
    checks: dict[str, Any], scontrol: Path, tmp_path: Path
) -> None:
    assert hooked("slurm-health", checks, tmp_path) == 0
    assert not scontrol.exists()


def test_a_node_that_is_drained_already_keeps_its_reason(
    scontrol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATE", "IDLE+DRAIN")
    assert hooked("slurm-health", FAILS, tmp_path) == 0
    assert len(scontrol.read_text().splitlines()) == 1


def test_a_drain_that_does_not_work_is_said(
    scontrol: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CODE", "1")
    assert hooked("slurm-health", FAILS, tmp_path) == 1
    assert "could not be drained" in capsys.readouterr().err


def test_a_reason_is_one_short_line() -> None:
    assert drain_reason(drilled(PASSES)) == ""
    reason = drain_reason(drilled({**BLOCKS, **FAILS}))
    assert reason.startswith("sanitycheck: host.disk: no folder")
    assert len(reason.splitlines()) == 1


# --- the record ---------------------------------------------------------------------------------------------


def measured(gflops: float, **more: Any) -> Report:
    return drilled({"cpu.gemm": {"facts": {"gflops": [gflops]}}, **more})


def test_the_record_keeps_medians_that_one_disturbed_run_does_not_move() -> None:
    baseline = Baseline()
    for value in (100.0, 101.0, 99.0, 20.0, 100.0):
        baseline = recorded(baseline, measured(value), identity="me", counters={})
    standing = baseline.standing("me")
    assert standing.medians == {"cpu.gemm.gflops": 100.0}
    assert standing.mads == {"cpu.gemm.gflops": 1.0}
    assert baseline.standing("another").medians == {}
    (row,) = compare(standing, measured(90.0))
    assert (row["share"], row["mads"]) == (0.9, -10.0)
    for _ in range(2 * VALUES_KEPT):
        baseline = recorded(baseline, measured(50.0), identity="me", counters={})
    assert len(baseline.entries["me"].figures["cpu.gemm.gflops"]) == VALUES_KEPT


def test_a_run_in_which_something_failed_is_not_recorded() -> None:
    with pytest.raises(UsageError, match=r"host\.disk"):
        recorded(Baseline(), measured(1.0, **BLOCKS), identity="me", counters={})


def test_digests_of_a_training_are_recorded_for_their_software() -> None:
    facts = {"digests": ["d", "d"], "key": "torch 2"}
    report = drilled({"train.mini_gpt": {"facts": facts}})
    baseline = recorded(Baseline(), report, identity="me", counters={"a/1.link_downed": 2})
    standing = baseline.standing("me")
    assert standing.digests == {"train.mini_gpt: torch 2": "d"}
    assert standing.counters == {"a/1.link_downed": 2}
    assert figures_of(report) == {"train.mini_gpt.tokens_per_s": 1000.0}


def test_record_show_compare_and_the_next_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, report = str(tmp_path / "deep" / "record.json"), str(tmp_path / "report.json")
    Path(report).write_text(measured(100.0).to_json())
    assert main(["baseline", "show", "--file", file]) == 0
    assert "nothing is recorded yet" in capsys.readouterr().out
    assert main(["baseline", "compare", "--file", file, "--report", report]) == 4
    assert main(["baseline", "record", "--file", file, "--report", report]) == 0
    assert main(["baseline", "show", "--file", file]) == 0
    assert "this node now" in capsys.readouterr().out
    assert read_baseline(file).standing(identity_of_node()).medians == {"cpu.gemm.gflops": 100.0}
    Path(report).write_text(measured(50.0).to_json())
    assert main(["baseline", "compare", "--file", file, "--report", report, "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["figures"][0]["share"] == 0.5
    drill = tmp_path / "drill.json"
    drill.write_text('{"schema": 1, "checks": {"cpu.gemm": {"facts": {"gflops": [50.0]}}}}')
    args = ["run", "--only", "cpu.gemm", "--drill", str(drill)]
    assert main([*args, "--baseline", file]) == 3
    assert "50 %" in capsys.readouterr().out


def test_the_usual_record_is_used_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    report = tmp_path / "report.json"
    report.write_text(measured(100.0).to_json())
    assert main(["baseline", "record", "--report", str(report)]) == 0
    drill = tmp_path / "drill.json"
    drill.write_text('{"schema": 1, "checks": {"cpu.gemm": {"facts": {"gflops": [50.0]}}}}')
    assert main(["run", "--only", "cpu.gemm", "--drill", str(drill)]) == 3


@pytest.mark.parametrize("text", ["[]", "{", '{"schema": 2}', '{"schema": 1, "entries": 7}'])
def test_a_broken_record_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(BadFileError, match=r"record\.json"):
        read_baseline(str(path))
    assert main(["run", "--only", "host.limits", "--baseline", str(path)]) in (0, 2)
    assert main(["baseline", "show", "--file", str(path)]) == 2


EVIDENCE = {
    "schema": 1,
    "nodes": ["a", "b", "c"],
    "rounds": [
        [{"first": "a", "second": "b", "score": 1.0}],
        [{"first": "a", "second": "c", "score": None}],
        [{"first": "b", "second": "c", "score": 0.2}],
    ],
}


def test_localise_reads_what_others_have_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "evidence.json"
    path.write_text(json.dumps(EVIDENCE))
    assert main(["localise", str(path)]) == 3
    assert "bad node   c: bad with several, agreed by" in capsys.readouterr().out
    path.write_text(json.dumps({**EVIDENCE, "rounds": []}))
    assert main(["localise", str(path), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["next"] == [["b", "c"]]
    path.write_text('{"schema": 2}')
    assert main(["localise", str(path)]) == 2
