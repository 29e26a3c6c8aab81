"""`aimaster run`: parse, resolve, look before starting, then hand over to the node agent.

The command gets its words untouched, because it takes torchrun's flags, which no command-line library parses
as argparse does. Errors leave as exceptions of `aimaster.errors`; `aimaster.cli.main` prints them.
"""

from __future__ import annotations

import os
import sys

from aimaster.cli.flags import OWN_FLAGS, render_help
from aimaster.cli.preflight import check_before_start
from aimaster.cli.resolve import resolve
from aimaster.cli.words import parse_words
from aimaster.config import RunConfig
from aimaster.core.diagnosis import Rule
from aimaster.integrations.torchrun import TORCHRUN_FLAGS

__all__ = ["config_from", "run"]


def config_from(argv: list[str], env: dict[str, str]) -> RunConfig | None:
    """The configuration that these words and variables mean; None if they ask for help.

    Raises:
        UsageError: The words or variables are wrong.
        SetupError: They ask for what this machine does not have.
    """
    parsed = parse_words(argv, torchrun=TORCHRUN_FLAGS, own=OWN_FLAGS)
    return None if parsed.help else resolve(parsed, env)


def run(argv: list[str]) -> int:
    """Run this node's part of the job and return the exit code.

    Args:
        argv: The words behind `aimaster run`.

    Raises:
        AimasterError: What went wrong before or while running; carries the exit code.
    """
    config = config_from(argv, dict(os.environ))
    if config is None:
        sys.stdout.write(render_help())
        return 0
    for notice in config.notices:
        sys.stderr.write(f"aimaster: {notice}\n")
    check_before_start(config, stderr=sys.stderr)
    from aimaster.agent.service import run as run_agent  # heavy: only when something will run

    def rules() -> tuple[Rule, ...]:
        from aimaster.rules.table import load_rules  # YAML is read when a worker has failed

        return load_rules(config.paths.rules)

    return run_agent(config, rules=rules)
