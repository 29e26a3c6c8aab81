"""The command `aimaster`: find the sub-command, run it, turn what it raises into a message and an exit code.

`aimaster run` gets its words untouched, since it takes torchrun's flags; all others are typer commands.
Nothing heavy is imported before it is known what will run, so that ``aimaster --help`` is quick.

What a command raises on purpose is an `AimasterError`: its sentences go to stderr and its exit code is ours.
Anything else is a bug of ours: the traceback goes to a file that the message names (or to stderr with
``AIMASTER_DEBUG=1``), and the exit code is 70.
"""

from __future__ import annotations

import os
import sys

from aimaster.errors import AimasterError, ExitCode

__all__ = ["main"]

DEBUG_VARIABLE = "AIMASTER_DEBUG"


def main(argv: list[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words behind `aimaster`; None takes them from the process.

    Returns:
        The exit code; see `aimaster.errors.EXIT_CODES`.
    """
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _dispatch(words)
        sys.stdout.flush()
    except AimasterError as error:
        sys.stderr.write(f"aimaster: {error}\n")
        return int(error.exit_code)
    except KeyboardInterrupt:
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`); the interpreter must not complain at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return int(ExitCode.FINISHED)
    except Exception as error:  # noqa: BLE001  # the outer loop: a bug ends with a report, not a traceback
        from aimaster.cli.bug import report

        report(error, debug=os.environ.get(DEBUG_VARIABLE) == "1")
        return int(ExitCode.OWN_BUG)
    return code


def _dispatch(words: list[str]) -> int:
    if words and words[0] == "run":
        from aimaster.cli.run import run

        return run(words[1:])
    from aimaster.cli.app import app

    try:
        app(args=words, prog_name="aimaster")
    except SystemExit as ended:  # how typer ends, in every case
        return ended.code if isinstance(ended.code, int) else int(ExitCode.USAGE)
    return int(ExitCode.FINISHED)
