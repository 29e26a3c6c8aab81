"""Verdicts, results and the report: order, blocking, exit codes, JSON there and back."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sanitycheck
from sanitycheck.errors import ReportFormatError, UsageError
from sanitycheck.reasons import Reason
from sanitycheck.render.sentences import describe, next_step
from sanitycheck.result import Finding, Level, Report, Result, Verdict, worst


def result(*verdicts: Verdict, check: str = "host.disk", blocking: bool = False) -> Result:
    findings = tuple(
        Finding(verdict=v, reason=Reason.DISK, blocking=blocking and v is Verdict.FAIL) for v in verdicts
    )
    return Result(check=check, level=Level.INSTANT, scope="node", findings=findings)


def report(*results: Result) -> Report:
    return Report(node="n", level=Level.QUICK, results=results)


@pytest.mark.parametrize(
    ("verdicts", "expected", "exit_code"),
    [
        ((Verdict.PASS, Verdict.WARN), Verdict.WARN, 0),
        ((Verdict.PASS, Verdict.SKIPPED), Verdict.PASS, 0),
        ((Verdict.PASS, Verdict.UNKNOWN, Verdict.WARN), Verdict.UNKNOWN, 4),
        ((Verdict.UNKNOWN, Verdict.FAIL), Verdict.FAIL, 3),
        ((Verdict.SKIPPED, Verdict.SKIPPED), Verdict.UNKNOWN, 4),
        ((), Verdict.UNKNOWN, 4),
    ],
)
def test_the_worst_verdict_decides_and_nothing_looked_at_is_not_a_pass(
    verdicts: tuple[Verdict, ...], expected: Verdict, exit_code: int
) -> None:
    made = report(*(result(verdict) for verdict in verdicts))
    assert made.verdict is expected
    assert made.exit_code == exit_code


def test_a_result_has_the_verdict_of_its_worst_finding_and_shows_it_first() -> None:
    made = result(Verdict.SKIPPED, Verdict.PASS, Verdict.FAIL, Verdict.WARN)
    assert made.verdict is Verdict.FAIL
    assert [finding.verdict for finding in made.findings] == [
        Verdict.FAIL,
        Verdict.WARN,
        Verdict.PASS,
        Verdict.SKIPPED,
    ]


def test_only_a_failure_can_block() -> None:
    with pytest.raises(ValueError, match="cannot be blocking"):
        Finding(verdict=Verdict.UNKNOWN, reason=Reason.DISK, blocking=True)
    assert report(result(Verdict.FAIL, blocking=True)).blocking
    assert not report(result(Verdict.FAIL)).blocking


def test_a_result_says_something() -> None:
    with pytest.raises(ValueError, match="says nothing"):
        Result(check="x", level=Level.INSTANT, scope="node", findings=())


_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
_findings = st.builds(
    lambda verdict, reason, subject, facts, blocking: Finding(
        verdict=verdict,
        reason=reason,
        subject=subject,
        facts=facts,
        blocking=blocking and verdict is Verdict.FAIL,
    ),
    st.sampled_from(Verdict),
    st.sampled_from(Reason),
    st.text(max_size=8),
    st.dictionaries(st.text(max_size=6), _values, max_size=3),
    st.booleans(),
)
_results = st.builds(
    Result,
    check=st.sampled_from(["host.disk", "cpu.gemm"]),
    level=st.sampled_from(Level),
    scope=st.just("node"),
    findings=st.lists(_findings, min_size=1, max_size=3).map(tuple),
    duration_s=st.integers(0, 1000).map(float),
)


@given(
    st.builds(
        Report,
        node=st.text(max_size=8),
        level=st.sampled_from(Level),
        results=st.lists(_results, max_size=3).map(tuple),
        started_unix_s=st.integers(0, 2**31).map(float),
        duration_s=st.integers(0, 60).map(float),
        nccl_overrides=st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=2),
    )
)
def test_a_report_survives_json(made: Report) -> None:
    again = Report.from_json(made.to_json())
    assert again.to_dict() == made.to_dict()
    assert (again.verdict, again.blocking, again.exit_code) == (made.verdict, made.blocking, made.exit_code)


@given(_findings)
def test_any_finding_can_be_put_in_words(finding: Finding) -> None:
    assert describe(finding)
    assert isinstance(next_step(finding), str)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", "{}", '{"schema": 1}', '{"schema": 1, "node": "n", "level": "nine", "results": []}'],
)
def test_what_is_not_a_report_is_refused(text: str) -> None:
    with pytest.raises(ReportFormatError):
        Report.from_json(text)


def test_another_schema_is_refused_by_number() -> None:
    data = {**report(result(Verdict.PASS)).to_dict(), "schema": 2}
    with pytest.raises(ReportFormatError, match="schema 2"):
        Report.from_json(json.dumps(data))


def test_no_verdicts_are_unknown() -> None:
    assert worst(()) is Verdict.UNKNOWN


def test_importing_the_package_loads_the_standard_library_only_and_no_engine() -> None:
    code = (
        "import sys; before = set(sys.modules); import sanitycheck;"
        "new = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names)), 'sanitycheck.runner' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['sanitycheck'] False"


def test_the_whole_engine_loads_without_frameworks() -> None:
    code = (
        "import sys, sanitycheck.cli, sanitycheck.drill;"
        "heavy = ('torch', 'numpy', 'rich', 'fsspec', 'yaml', 'psutil', 'pynvml');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_resolve_and_others_do_not() -> None:
    for name in sanitycheck.__all__:
        assert getattr(sanitycheck, name) is not None
        assert name in dir(sanitycheck)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sanitycheck.nothing  # noqa: B018


@pytest.mark.parametrize(
    "options",
    [{"expect_gpus": -1}, {"local_workers": 0}, {"nnodes": 0}, {"ckpt_path": ""}, {"ckpt_bytes": -1}],
)
def test_options_are_checked_when_made(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        sanitycheck.Options(**options)  # type: ignore[arg-type]
