"""The report for a node exporter's textfile collector (Prometheus text format 0.0.4)."""

from __future__ import annotations

from sanitycheck.baseline import figures_of
from sanitycheck.result import Report, Verdict

__all__ = ["render"]


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def render(report: Report) -> str:
    """One sample per check and verdict, the figures, and when it ran."""
    lines = [
        "# HELP sanitycheck_verdict Verdict of a check: 1 for the one that holds.",
        "# TYPE sanitycheck_verdict gauge",
    ]
    lines += [
        f'sanitycheck_verdict{{check="{_label(result.check)}",verdict="{verdict.value}"}}'
        f" {int(result.verdict is verdict)}"
        for result in report.results
        for verdict in Verdict
    ]
    lines += ["# HELP sanitycheck_blocking Training would fail or compute wrongly here."]
    lines += ["# TYPE sanitycheck_blocking gauge", f"sanitycheck_blocking {int(report.blocking)}"]
    figures = figures_of(report)
    if figures:
        lines += ["# HELP sanitycheck_figure A measured figure.", "# TYPE sanitycheck_figure gauge"]
        lines += [f'sanitycheck_figure{{name="{_label(name)}"}} {value:g}' for name, value in figures.items()]
    lines += [
        "# HELP sanitycheck_run_duration_seconds How long the run took.",
        "# TYPE sanitycheck_run_duration_seconds gauge",
        f"sanitycheck_run_duration_seconds {report.duration_s:.3f}",
        "# HELP sanitycheck_run_timestamp_seconds When it began.",
        "# TYPE sanitycheck_run_timestamp_seconds gauge",
        f"sanitycheck_run_timestamp_seconds {report.started_unix_s:.3f}",
    ]
    return "\n".join(lines)
