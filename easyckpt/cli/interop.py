"""``easyckpt export`` and ``easyckpt import``. torch is imported when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from easyckpt.cli import render
from easyckpt.cli.app import Json, Root, Step, app, emit
from easyckpt.cli.reports import SCHEMA
from easyckpt.errors import Misuse

__all__ = ["export_command", "import_command"]

PARAMETERS_BYTES_MAX = 64 << 20
"""Of a list of names."""

_FORMATS_HELP = "torch, huggingface, dcp or deepspeed."


@app.command("export")
def export_command(
    root: Root,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="File or folder; not there yet.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=_FORMATS_HELP)],
    step: Step = None,
    key: Annotated[
        str | None, typer.Option(help="Key of the model in the state, if there are several.")
    ] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose values are taken where ranks differ.")] = 0,
    as_json: Json = False,
) -> None:
    """Write a step in another program's format, proved while it is read."""
    from easyckpt.interop import export_step

    with render.progress("exporting") as on_bytes:
        done = export_step(root, target, to=to, step=step, key=key, rank=rank, on_bytes=on_bytes)
    report = _report("export", root=root, target=target, format=to, step=done)
    emit(report, as_json=as_json, text=_exported)


@app.command("import")
def import_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="File or folder of another program.")],
    root: Root,
    step: Annotated[int, typer.Option("--step", min=0, help="Training step that it belongs to.")],
    key: Annotated[str, typer.Option(help="Key that a bare model gets in the state.")] = "model",
    objects: Annotated[
        list[str] | None,
        typer.Option("--object", help="A key whose value belongs to an object with load_state_dict."),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="File with the names of the optimizer's parameters, one a line.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Commit another program's checkpoint as a step of a checkpoint folder.

    Its format is told by what is there: torch, huggingface, dcp or deepspeed. Nothing in it is unpickled that
    could run code.
    """
    from easyckpt.interop import ImportOptions, import_state

    names = _lines(parameters) if parameters is not None else ()
    options = ImportOptions(key=key, objects=tuple(objects or ()), parameters=names)
    with render.progress("importing") as on_bytes:
        name = import_state(source, root, step=step, options=options, on_bytes=on_bytes)
    report = _report("import", root=root, source=source, step=name.step, generation=name.generation)
    emit(report, as_json=as_json, text=_imported)


def _report(command: str, **fields: Any) -> dict[str, Any]:
    return {"schema": SCHEMA, "command": command, "exit_code": 0, **fields}


def _exported(report: dict[str, Any]) -> None:
    print(f"step {report['step']} is in {report['target']} ({report['format']})")


def _imported(report: dict[str, Any]) -> None:
    print(f"step {report['step']} is in {report['root']} (generation {report['generation']})")


def _lines(path: str) -> tuple[str, ...]:
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(PARAMETERS_BYTES_MAX)
    except (OSError, UnicodeDecodeError) as error:
        raise Misuse(f"the list of parameters cannot be read: {error}", where=path) from error
    return tuple(line.strip() for line in text.splitlines() if line.strip())
