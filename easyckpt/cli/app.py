"""Commands over a checkpoint folder, whether or not the job that writes it is running.

Every command makes one report of plain values (`easyckpt.cli.reports`), which is either printed as JSON or
rendered as text (`easyckpt.cli.render`); so both always say the same. Results go to stdout, everything else
to stderr. Neither torch nor numpy is imported.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from easyckpt.cli import render, reports
from easyckpt.errors import EasyckptError, Misuse
from easyckpt.keep import KeepAny, KeepEvery, KeepLatest, KeepPinned, KeepPolicy

__all__ = ["EXIT_CODES", "Json", "Root", "Step", "app", "emit", "main"]

# Newer versions of typer bring their own copy of click: its errors are reached through typer's only.
_CommandLineError: type[Any] = typer.BadParameter.__mro__[2]

EXIT_CODES = (
    (0, "good: what was asked for is there, loadable, or equal"),
    (1, "diff: the two differ"),
    (2, "usage: unknown option, or a value that makes no sense"),
    (
        3,
        "folder, file system or permissions refuse; what could not be read is unknown, never good",
    ),
    (4, "no such checkpoint, or it is damaged, incomplete, or not loadable"),
    (70, "a bug of easyckpt"),
    (130, "Ctrl-C"),
)

_HELP = "Look into checkpoints, prove them, compare them, and remove old ones."
_CODES_HELP = "Exit codes:\n\n" + "\n\n".join(f"{code}  {meaning}" for code, meaning in EXIT_CODES)

app = typer.Typer(
    help=f"{_HELP}\n\n{_CODES_HELP}",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Root = Annotated[str, typer.Argument(metavar="FOLDER", help="Checkpoint folder, or a URL of one.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object with a schema number.")]
Step = Annotated[
    int | None, typer.Option("--step", min=0, help="Which step; the newest that is offered if not given.")
]


def emit(report: dict[str, Any], *, as_json: bool, text: Callable[[dict[str, Any]], None]) -> None:
    """Print a report as JSON or text, and end with its exit code."""
    if as_json:
        render.print_json(report)
    else:
        text(report)
    if report["exit_code"]:
        raise typer.Exit(report["exit_code"])


@app.command("ls")
def ls_command(
    root: Root,
    show_all: Annotated[
        bool,
        typer.Option("--all", help="Also steps that are not offered, and data that was never committed."),
    ] = False,
    as_json: Json = False,
) -> None:
    """List the steps that can be loaded, newest first."""
    emit(
        reports.list_steps(root, show_all=show_all, now_unix_s=time.time()),
        as_json=as_json,
        text=render.steps,
    )


@app.command("inspect")
def inspect_command(root: Root, step: Step = None, as_json: Json = False) -> None:
    """Show what a step consists of: ranks, files, tensors."""
    emit(reports.inspect_step(root, step=step), as_json=as_json, text=render.inspection)


@app.command("verify")
def verify_command(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Every step that is offered.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Index files, lengths and headers only; no tensor bytes.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Read a step back and prove every byte against its hash."""
    if every and step is not None:
        raise Misuse("--all and --step exclude each other")
    with render.progress("reading back") as on_bytes:
        report = reports.verify(root, step=step, every=every, quick=quick, on_bytes=on_bytes)
    emit(report, as_json=as_json, text=render.verdicts)


@app.command("why")
def why_command(
    root: Root,
    step: Annotated[int, typer.Argument(metavar="STEP", min=0, help="The step in question.")],
    as_json: Json = False,
) -> None:
    """Say why a step can, or cannot, be loaded."""
    with render.progress("reading back") as on_bytes:
        report = reports.why(root, step=step, on_bytes=on_bytes)
    emit(report, as_json=as_json, text=render.answer)


@app.command("diff")
def diff_command(
    a: Annotated[str, typer.Argument(metavar="A", help="FOLDER, or FOLDER@STEP; else its newest step.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    as_json: Json = False,
) -> None:
    """Compare two checkpoints bit for bit, by the names of their tensors."""
    emit(reports.diff(a, b), as_json=as_json, text=render.difference)


@app.command("prune")
def prune_command(
    root: Root,
    keep_latest: Annotated[int | None, typer.Option(min=1, help="Keep the newest N steps.")] = None,
    keep_every: Annotated[int | None, typer.Option(min=1, help="Keep steps that N divides.")] = None,
    pin: Annotated[list[int] | None, typer.Option(help="Keep this step; may be repeated.")] = None,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds from hiding a step to deleting its bytes.")
    ] = 60.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all steps but those to keep.

    A step goes only after a newer one was read back whole and found good, and the newest good one always
    stays. It is hidden at once; its bytes go with the first prune after the grace time. The job may be
    running.
    """
    policies: list[KeepPolicy] = []
    if keep_latest is not None:
        policies.append(KeepLatest(keep_latest))
    if keep_every is not None:
        policies.append(KeepEvery(keep_every))
    if pin:
        policies.append(KeepPinned(frozenset(pin)))
    if not policies:
        raise Misuse("nothing says what to keep", hint="for example --keep-latest 3")
    with render.progress("reading back") as on_bytes:
        report = reports.prune(
            root,
            keep=KeepAny(tuple(policies)),
            grace_s=grace,
            dry_run=dry_run,
            now_unix_s=time.time(),
            on_bytes=on_bytes,
        )
    emit(report, as_json=as_json, text=render.pruned)


@contextmanager
def _quiet_pipe() -> Iterator[None]:
    """A reader that went away (``| head``) is no trouble of ours."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at exit, into nothing.
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit code and prints trouble to stderr.

    Args:
        argv: arguments without the program's name; ``sys.argv`` if not given.
    """
    try:
        with _quiet_pipe():
            result = app(args=argv, prog_name="easyckpt", standalone_mode=False)
            return result if isinstance(result, int) else 0
    except EasyckptError as error:
        render.trouble(error)
        return error.exit_code
    except _CommandLineError as error:
        error.show(sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception:  # noqa: BLE001  the outer loop of the command: whatever it is, it is ours
        traceback.print_exc()
        print("easyckpt: this is a bug of easyckpt; please report the lines above", file=sys.stderr)
        return 70
    return 0
