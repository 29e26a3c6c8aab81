"""The report as JUnit XML: one test case per check, for what shows test results."""

from __future__ import annotations

from xml.sax.saxutils import escape, quoteattr

from sanitycheck.render.sentences import describe, next_step
from sanitycheck.result import Report, Result, Verdict

__all__ = ["render"]

_TAGS = {Verdict.FAIL: "failure", Verdict.UNKNOWN: "error", Verdict.SKIPPED: "skipped"}
"""*Unknown* is an error of the test, not a failure of the node: that is JUnit's own distinction."""
_CONTROL = {code: None for code in range(32) if code not in (9, 10, 13)}


def _clean(text: str) -> str:
    """XML 1.0 has no control characters, not even escaped ones."""
    return text.translate(_CONTROL)


def _case(result: Result) -> str:
    head = f"  <testcase classname={quoteattr('sanitycheck.' + result.level.value)}"
    head += f' name={quoteattr(result.check)} time="{result.duration_s:.3f}"'
    text = "\n".join(
        f"{finding.verdict.value}: {describe(finding)}" + (f" -> {step}" if step else "")
        for finding in result.findings
        for step in (next_step(finding),)
    )
    tag = _TAGS.get(result.verdict)
    if tag is None:
        body = f"<system-out>{escape(_clean(text))}</system-out>"
    else:
        message = quoteattr(_clean(describe(result.findings[0])))
        body = (
            f"<{tag} message={message} type={quoteattr(result.reason.value)}>{escape(_clean(text))}</{tag}>"
        )
    return f"{head}>\n    {body}\n  </testcase>"


def render(report: Report) -> str:
    """The whole report."""
    counts = report.coverage()
    return "\n".join(
        [
            '<?xml version="1.0" encoding="UTF-8"?>',
            f'<testsuite name="sanitycheck" hostname={quoteattr(report.node)} tests="{counts["checks"]}"'
            f' failures="{counts["fail"]}" errors="{counts["unknown"]}" skipped="{counts["skipped"]}"'
            f' time="{report.duration_s:.3f}">',
            *(_case(result) for result in report.results),
            "</testsuite>",
        ]
    )
