"""``easyckpt scrub``, ``repair``, ``pin`` and ``unpin``: keeping a folder in good order."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

import typer
from rich.markup import escape

from easyckpt.cli import render
from easyckpt.cli.app import Json, Root, Step, app, emit
from easyckpt.cli.reports import make_report, open_folder, verdict_rows
from easyckpt.errors import Misuse
from easyckpt.mend import Mended, MendKind, repair_steps
from easyckpt.pins import pin, unpin
from easyckpt.scrub import scrub
from easyckpt.storage import open_storage

__all__ = ["pin_command", "repair_command", "scrub_command", "unpin_command"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

PinnedStep = Annotated[int, typer.Argument(metavar="STEP", min=0, help="Which step.")]


@app.command("scrub")
def scrub_command(
    root: Root,
    budget: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Begin no further step once so much was read: 500G, 10GiB."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Prove steps whole, the longest unproved first, and remember it.

    For a timer: with a budget it gets through all steps in turn. `ls` shows what was proved when. Damaged
    is exit code 4, unknown 3.
    """
    storage, _ = open_folder(root)
    limit = None if budget is None else _bytes(budget)
    with render.progress("scrubbing") as on_bytes:
        verdicts = scrub(storage, now_unix_s=time.time(), byte_budget=limit, on_bytes=on_bytes)
    rows, exit_code = verdict_rows(verdicts)
    emit(make_report("scrub", storage, exit_code=exit_code, verdicts=rows), as_json=as_json, text=_scrubbed)


def _bytes(text: str) -> int:
    found = _SIZE.match(text.strip())
    if found is None:
        raise Misuse(f"--budget {text!r} is no size", hint="for example 500G, 10GiB, 1048576")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _scrubbed(report: dict[str, Any]) -> None:
    render.verdicts(report)
    if not report["verdicts"]:
        print("no step is offered: nothing to prove")
    if report["exit_code"] == 4:
        print(f"easyckpt repair {report['root']}  mends what it can")


@app.command("repair")
def repair_command(
    root: Root,
    step: Step = None,
    copies: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="FOLDER", help="A copy of the run, or another tier; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Mend damaged steps from whatever still has the right bytes; set aside what is beyond repair.

    The right bytes may be another rank's, another step's, or in a copy of the folder (--from). A step that
    cannot be mended is set aside: nothing picks it up any more, and its data stays. Without --step, all
    steps are read whole. Exit code 4 if a step was set aside, 3 if the storage refuses.
    """
    storage, _ = open_folder(root)
    others = [open_storage(copy) for copy in copies or ()]
    with render.progress("looking for damage") as on_bytes:
        done = repair_steps(storage, others, step=step, dry_run=dry_run, on_bytes=on_bytes)
    kinds = {item.kind for item in done}
    exit_code = 4 if MendKind.SET_ASIDE in kinds else 3 if MendKind.UNKNOWN in kinds else 0
    rows = [_row(item) for item in done]
    report = make_report("repair", storage, exit_code=exit_code, dry_run=dry_run, done=rows)
    emit(report, as_json=as_json, text=_repaired)


def _row(item: Mended) -> dict[str, Any]:
    return {
        "kind": item.kind.value,
        "step": item.name.step,
        "generation": item.name.generation,
        "where": item.where,
        "detail": item.detail,
    }


_WORDS = {
    "body": ("written anew", "would be written anew"),
    "fragment": ("replaced", "would be replaced"),
    "manifest": ("made anew", "would be made anew"),
    "set_aside": ("set aside", "would be set aside"),
    "unknown": ("unknown, left alone", "unknown, left alone"),
}


def _repaired(report: dict[str, Any]) -> None:
    out = render.console()
    for item in report["done"]:
        word = _WORDS[item["kind"]][1 if report["dry_run"] else 0]
        name = f"step {item['step']} (generation {item['generation']})"
        out.print(f"{name}: {word}: {escape(item['detail'])}", soft_wrap=True)
        out.print(f"    {escape(item['where'])}", soft_wrap=True)
    if not report["done"]:
        out.print("nothing is damaged")
    elif report["exit_code"] == 4:
        out.print("A copy of the run may still have the right bytes: easyckpt repair FOLDER --from COPY")


@app.command("pin")
def pin_command(
    root: Root,
    step: PinnedStep,
    note: Annotated[str, typer.Option(help="Why; for people.")] = "",
    as_json: Json = False,
) -> None:
    """Keep a step whatever retention's policy says. The job may be running."""
    storage, _ = open_folder(root)
    new = pin(storage, step, note=note, now_unix_s=time.time())
    report = make_report("pin", storage, step=step, changed=new)
    emit(
        report, as_json=as_json, text=lambda said: print(f"step {said['step']} is kept until it is unpinned")
    )


@app.command("unpin")
def unpin_command(root: Root, step: PinnedStep, as_json: Json = False) -> None:
    """Leave a step to retention's policy again."""
    storage, _ = open_folder(root)
    was = unpin(storage, step)
    report = make_report("unpin", storage, step=step, changed=was)
    emit(report, as_json=as_json, text=_unpinned)


def _unpinned(report: dict[str, Any]) -> None:
    was = "is not pinned any more" if report["changed"] else "was not pinned"
    print(f"step {report['step']} {was}")
