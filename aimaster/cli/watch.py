"""`aimaster status --watch`: the picture of a job, kept up to date until the job is over.

On a terminal the picture is drawn anew in its place. Anywhere else a line is printed whenever something has
changed that a reader of a log wants to know: phase, generation, checkpoint steps, incidents.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from aimaster.cli.status import Wanted, picture
from aimaster.cli.status_text import headline, render
from aimaster.errors import CredentialsMissing, PeerRefused, SetupError, UsageError

__all__ = ["watch"]

EVERY_S = 1.0

Plain = dict[str, Any]


def watch(wanted: Wanted, *, as_json: bool) -> None:
    """Watch until the job is over or nobody is left who could tell; Ctrl-C ends it, too.

    Raises:
        AimasterError: no job is found, or it cannot be asked.
    """
    first: Plain = picture(wanted)
    wanted = replace(wanted, job_id=first["job_id"])  # another job that begins meanwhile is not looked at
    if as_json or not sys.stdout.isatty():
        _follow(wanted, first, as_json=as_json)
        return
    console = Console()
    with Live(_drawn(first), console=console, auto_refresh=False) as live:
        now: Plain | None = first
        while now is not None and not _is_over(now):
            time.sleep(EVERY_S)
            now = _next(wanted)
            if now is not None:
                live.update(_drawn(now), refresh=True)


def _follow(wanted: Wanted, first: Plain, *, as_json: bool) -> None:
    said: object = None
    now: Plain | None = first
    while now is not None:
        telling = _telling(now)
        if telling != said:
            said = telling
            when = time.strftime("%H:%M:%S")
            print(json.dumps(now) if as_json else f"{when}  {headline(now)}", flush=True)
        if _is_over(now):
            return
        time.sleep(EVERY_S)
        now = _next(wanted)


def _next(wanted: Wanted) -> Plain | None:
    """None when nobody is left who could tell: the job's folders, or the master that was asked, are gone."""
    try:
        return picture(wanted)
    except (CredentialsMissing, PeerRefused):
        raise
    except (SetupError, UsageError):
        return None


def _is_over(now: Plain) -> bool:
    return bool(now["phase"] == "ended")


def _telling(now: Plain) -> object:
    """What makes a line worth printing."""
    incidents = [(one["id"], one["recovered_s"] is None) for one in now["incidents"]]
    states = [(one["node"], one["state"]) for one in now["nodes"]]
    return now["source"], now["phase"], now["generation"], now["steps"], incidents, states


def _drawn(now: Plain) -> Text:
    return Text(render(now))
