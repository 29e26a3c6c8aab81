"""Is this node fit to train?

Works alone (``sanitycheck run``) and as a library::

    import sanitycheck

    report = sanitycheck.run(level="quick", options=sanitycheck.Options(ckpt_path="/data/ckpt"))
    if report.blocking:
        print(report.to_json())

Theory of operation. A check is two halves. Its *facts* half (``sanitycheck.facts``) looks at the machine; it
runs in a child process with a deadline, because looking can hang (a dead mount, a wedged driver) or crash.
Its *judgement* half (``sanitycheck.checks``) is pure: facts and options in, findings with reasons out. The
engine (``sanitycheck.runner``) starts the children, ends what does not answer, and asks the judgement. A
scripted set of facts (``--drill``) goes through the same judgement.

Importing this package does nothing and loads nothing but the standard library; the names below load on use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sanitycheck.errors import SanitycheckError
    from sanitycheck.options import Known, Options
    from sanitycheck.reasons import Reason
    from sanitycheck.result import Finding, Level, Report, Result, Verdict
    from sanitycheck.runner import run

__all__ = [
    "Finding",
    "Known",
    "Level",
    "Options",
    "Reason",
    "Report",
    "Result",
    "SanitycheckError",
    "Verdict",
    "run",
]

_HOMES = {
    "Finding": "result",
    "Known": "options",
    "Level": "result",
    "Options": "options",
    "Reason": "reasons",
    "Report": "result",
    "Result": "result",
    "SanitycheckError": "errors",
    "Verdict": "result",
    "run": "runner",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for (PEP 562), so that the import alone stays light."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
