"""What `aimaster run` looks at before anything starts: the program, its syntax, its folders.

A script that is not there or does not compile would fail in every worker of every attempt; it is cheaper, and
kinder, to say so at once. Nothing of the user's is imported or executed here.
"""

from __future__ import annotations

import errno
import importlib.machinery
import importlib.util
import os
import shutil
import sys
import traceback
import warnings
from pathlib import Path
from typing import TextIO

from aimaster.config import ProgramConfig, ProgramKind, RunConfig
from aimaster.errors import FolderUnusable, NoSpace, ScriptMissing, SetupError, TorchMissing, UserError

__all__ = ["check_before_start"]


def check_before_start(config: RunConfig, *, stderr: TextIO) -> None:
    """Look at program and folders; print a syntax error as Python does.

    Raises:
        ScriptMissing: Nothing of that name can be started.
        TorchMissing: Workers are to be forked from a process that has imported torch, and there is none.
        UserError: The script does not compile.
        FolderUnusable: The checkpoint or log folder cannot be made or written.
        UsageError: The rules cannot be read, or a row of them is wrong.
        NoSpace: Making a folder needs space that is not there.
    """
    source = _find(config.program)
    _need_torch(config)
    if source is not None and config.program.python is None:
        _compile(source, stderr)
    if config.paths.rules is not None:
        from aimaster.rules.table import read_table  # YAML is for those who bring rules

        read_table(config.paths.rules)
    if config.checkpoint.ckpt_dir is not None and "://" not in config.checkpoint.ckpt_dir:
        _folder(Path(config.checkpoint.ckpt_dir), "--ckpt-dir")
    if config.stdio.log_dir is not None and str(config.stdio.log_dir) != os.devnull:
        _folder(config.stdio.log_dir, "--log-dir")


def _find(program: ProgramConfig) -> Path | None:
    """The source file to compile, or None where there is none to look at."""
    target = program.target
    if program.kind is ProgramKind.MODULE:
        return _find_module(target) if program.python is None else None
    if program.kind in (ProgramKind.COMMAND, ProgramKind.NO_PYTHON):
        if shutil.which(target) is None:
            raise ScriptMissing(f"the command {target} was not found", where="it is no file and not on PATH")
        return None
    path = Path(target)
    if target == "-" or (path.is_dir() and (path / "__main__.py").is_file()):
        return None
    if path.is_dir():
        raise ScriptMissing("the script is a folder without __main__.py", where=str(path.absolute()))
    if not path.is_file():
        command = shutil.which(target)
        raise ScriptMissing(
            "the script does not exist",
            where=str(path.absolute()),
            next_step=f"if {target} is a command, put -- in front of it: aimaster run -- {target} …"
            if command
            else "",
        )
    return path if path.suffix == ".py" else None


def _find_module(name: str) -> Path | None:
    """Source file of a module, found without importing its parents; None if it is not a source file."""
    sys_path = [os.getcwd(), *sys.path]
    spec = importlib.machinery.PathFinder.find_spec(name.partition(".")[0], sys_path)
    if spec is None:
        try:
            spec = importlib.util.find_spec(
                name.partition(".")[0]
            )  # editable installs bring their own finder
        except ValueError:  # __main__ and other modules without a spec
            spec = None
    full = name.partition(".")[0]
    for part in name.split(".")[1:]:
        full = f"{full}.{part}"
        places = None if spec is None else spec.submodule_search_locations
        spec = None if places is None else importlib.machinery.PathFinder.find_spec(full, list(places))
    if spec is None:
        raise ScriptMissing(f"there is no module named {name}", where="looked in the folder and on sys.path")
    if spec.submodule_search_locations is not None:
        files = [Path(place) / "__main__.py" for place in spec.submodule_search_locations]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            raise ScriptMissing(f"the package {name} cannot be executed", where="it has no __main__.py")
        return found
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _spec_of(top: str) -> importlib.machinery.ModuleSpec | None:
    """Where a module without dots would come from; nothing is imported for it."""
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is not None:
        return spec
    try:
        return importlib.util.find_spec(top)  # editable installs bring a finder of their own
    except ValueError:  # __main__ and other modules without a spec
        return None


def _need_torch(config: RunConfig) -> None:
    if config.warm and _spec_of("torch") is None:
        raise TorchMissing(
            "torch is not installed in this environment",
            where=sys.prefix,
            next_step='pip install "aimaster-ft[torch]"\n'
            "or, if the script needs none: aimaster run --no-warm …",
        )


def _compile(path: Path, stderr: TextIO) -> None:
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ScriptMissing(f"the script cannot be read ({error.strerror})", where=str(path)) from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers say them, once each
            compile(text, str(path), "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:  # ValueError: a NUL byte, before Python 3.12
        stderr.write("".join(traceback.format_exception_only(error)))
        raise UserError("the script does not compile; nothing was started", where=str(path)) from error


def _folder(path: Path, flag: str) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _folder_error(error, path, flag) from error
    if not os.access(path, os.W_OK | os.X_OK):
        read_only = os.statvfs(path).f_flag & os.ST_RDONLY
        code = errno.EROFS if read_only else errno.EACCES
        raise _folder_error(OSError(code, os.strerror(code)), path, flag)


def _folder_error(error: OSError, path: Path, flag: str) -> SetupError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "is a file, or lies below one" if isinstance(error, FileExistsError | NotADirectoryError) else ""
    return (NoSpace if full else FolderUnusable)(
        f"the folder of {flag} {what or f'cannot be used ({error.strerror})'}",
        where=str(path.absolute()),
        next_step="free space there, or give another folder" if full else "give another folder",
        facts={"errno": error.errno, "flag": flag},
    )
