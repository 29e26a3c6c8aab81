"""The command ``sanitycheck``: ``run``, ``list``, ``explain``, ``localise``, ``baseline``, ``hook``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import textwrap
import traceback
import types
from collections.abc import Callable, Mapping, Sequence

from sanitycheck.catalogue import CHECKS, by_id
from sanitycheck.cli.parser import EXIT_CODES, EXIT_INTERRUPTED, EXIT_OWN_BUG, make_parser
from sanitycheck.errors import SanitycheckError

__all__ = ["EXIT_CODES", "EXIT_INTERRUPTED", "EXIT_OWN_BUG", "main"]


def _run(args: argparse.Namespace) -> int:
    from sanitycheck.cli.running import run_and_show

    return run_and_show(args)


def _localise(args: argparse.Namespace) -> int:
    from sanitycheck.cli.localise import localise

    return localise(args)


def _baseline(args: argparse.Namespace) -> int:
    from sanitycheck.cli.baseline import baseline

    return baseline(args)


def _hook(args: argparse.Namespace) -> int:
    from sanitycheck.cli.hook import hook

    return hook(args)


def _list(args: argparse.Namespace) -> int:
    if args.json:
        rows = [{"id": c.id, "level": c.level.value, "scope": c.scope, "title": c.title} for c in CHECKS]
        print(json.dumps({"schema": 1, "checks": rows}, indent=2))
        return 0
    for check in CHECKS:
        print(f"{check.id:<20} {check.level.value:<8} {check.scope:<5} {check.title}")
    return 0


def _explain(args: argparse.Namespace) -> int:
    from sanitycheck.render.sentences import template
    from sanitycheck.render.texts import NOTHING

    check = by_id(args.id)
    print(f"{check.id}: {check.title}\n")
    print(textwrap.fill(check.about, width=96))
    print(textwrap.fill(f"rule: {check.rule}", width=96, initial_indent="\n"))
    print(textwrap.fill(f"source: {check.source}", width=96))
    hang = f"{check.if_hung.value} (it had {check.deadline_s:g} s)"
    print(f"\nlevel {check.level.value}, scope {check.scope}; if its probe hangs: {hang}\n\nit may say:")
    for reason in check.reasons:
        found, step = template(reason)
        print(
            textwrap.fill(f"{reason.value}: {found}", width=96, initial_indent="  ", subsequent_indent="    ")
        )
        if step != NOTHING:
            print(textwrap.fill(f"-> {step}", width=96, initial_indent="    ", subsequent_indent="       "))
    return 0


def _interrupt(signum: int, frame: types.FrameType | None) -> None:
    raise KeyboardInterrupt


HOOK_UNKNOWN = 2
COMMANDS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "run": _run,
    "list": _list,
    "explain": _explain,
    "localise": _localise,
    "baseline": _baseline,
    "hook": _hook,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = make_parser().parse_args(words)
    except SystemExit as ended:
        return _unless_hook(words, ended.code if isinstance(ended.code, int) else 2)
    return _obey_hook(args) if args.command == "hook" else _obey(args, COMMANDS[args.command])


def _obey_hook(args: argparse.Namespace) -> int:
    """What a hook answers counts; what goes wrong in it does not."""
    answered: list[int] = []

    def answer(given: argparse.Namespace) -> int:
        answered.append(_hook(given))
        return answered[0]

    code = _obey(args, answer)
    return answered[0] if answered else _unless_hook(["hook", args.kind], code)


def _unless_hook(words: Sequence[str], code: int) -> int:
    """The code, but for a hook that went wrong by itself: a typing error in a configuration or a bug of ours
    must not drain a cluster. The problem detector has a code for it, the others are told that nothing is
    wrong."""
    if words[:1] != ["hook"] or code == 0:
        return code
    return HOOK_UNKNOWN if "npd" in words[1:2] else 0


def _obey(args: argparse.Namespace, command: Callable[[argparse.Namespace], int]) -> int:
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return command(args)
    except KeyboardInterrupt:
        print("sanitycheck: interrupted; all probes are ended", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Somebody reads only the first lines (| head): that is no trouble, and nothing may be said at exit.
        sys.stderr.close()
        return 0
    except SanitycheckError as error:
        print(f"sanitycheck: {error}", file=sys.stderr)
        return error.exit_code
    # The outer loop: an error of our own must not look like the verdict about a node.
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        print(f"sanitycheck: our own error, please report it: {error!r}", file=sys.stderr)
        return EXIT_OWN_BUG
    finally:
        signal.signal(signal.SIGTERM, before)
