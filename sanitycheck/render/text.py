"""The report as plain text: coverage first, then one line per check, then what to do. No colour, no
redraw."""

from __future__ import annotations

from sanitycheck.render.sentences import describe, next_step
from sanitycheck.result import Finding, Report, Result, Verdict

__all__ = ["coverage_line", "render", "result_lines", "verdict_line"]

_TROUBLE = (Verdict.FAIL, Verdict.UNKNOWN, Verdict.WARN)
ID_WIDTH = 20


def coverage_line(report: Report) -> str:
    """How much was looked at, and what was not."""
    counts = report.coverage()
    parts = [f"{counts[v.value]} {v.value}" for v in Verdict if counts[v.value]]
    line = (
        f"sanitycheck {report.level.value} on {report.node}:"
        f" {counts['looked']} of {counts['checks']} checks looked"
        f" ({', '.join(parts) or 'none'}) in {report.duration_s:.1f} s"
    )
    if report.missing:
        line += f"; never came: {', '.join(report.missing)}"
    unseen = [result.check for result in report.with_verdict(Verdict.UNKNOWN)]
    return f"{line}; could not be looked at: {', '.join(unseen)}" if unseen else line


def _lines(result: Result, finding: Finding, *, first: bool) -> list[str]:
    name = result.check if first else ""
    blocks = " (blocks training)" if finding.blocking else ""
    lines = [f"{finding.verdict.value:<8} {name:<{ID_WIDTH}} {describe(finding)}{blocks}"]
    step = next_step(finding)
    if step and finding.verdict in _TROUBLE:
        lines.append(f"{'':<8} {'':<{ID_WIDTH}} -> {step}")
    return lines


def result_lines(result: Result) -> list[str]:
    """The findings of one check, the worst first."""
    shown = [result.findings[0], *(one for one in result.findings[1:] if one.verdict is not Verdict.SKIPPED)]
    return [line for i, finding in enumerate(shown) for line in _lines(result, finding, first=i == 0)]


def verdict_line(report: Report) -> str:
    """The last line: the verdict in words."""
    if report.blocking:
        return "verdict: fail; training would fail or compute wrongly here"
    if report.verdict is Verdict.FAIL:
        return "verdict: fail; training may run, but this node needs attention"
    if report.verdict is Verdict.UNKNOWN:
        return "verdict: unknown; nothing failed, but not everything could be looked at"
    return f"verdict: {report.verdict.value}"


def render(report: Report) -> str:
    """The whole report; ends without a newline."""
    lines = [coverage_line(report)]
    if report.nccl_overrides:
        lines.append(
            "set in the environment: " + ", ".join(f"{k}={v}" for k, v in report.nccl_overrides.items())
        )
    for result in report.results:
        lines.extend(result_lines(result))
    lines.append(verdict_line(report))
    return "\n".join(lines)
